"""A model with experts holds many parameters and uses few of them for a token: both counted, and what it computes."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from common.config import TrainConfig
from common.counts import count_flops, count_parameters
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.model import Decoder, cross_entropy_sum, naive_attention
from common.presets import PRESETS
from common.process_groups import Mesh
from common.weights.initialisation import materialise, random_values
from step07_expert_parallel.experiments.ranks import checked
from step07_expert_parallel.experiments.tools import STEP
from step07_expert_parallel.moe import apply_experts

# float64, in which experts are a loop, and naive attention: FlopCounterMode does not know the CPU's fused kernels
MODEL = STEP | {"model": "debug", "dtype": "float64", "seq_len": 64, "micro_batch": 1, "balance": "none"}
CASES = {
    "dense": {},
    "8 experts, top 1": {"experts": 8, "top_k": 1},
    "8 experts, top 2": {"experts": 8, "top_k": 2, "expert_ffn": 192},
    "64 experts, top 6, 2 shared, 1 dense layer": {"experts": 64, "top_k": 6, "expert_ffn": 48, "shared_experts": 2},
}
CASES["64 experts, top 6, 2 shared, 1 dense layer"] |= {"dense_layers": 1}
# Total and active, in billions, as the authors say: mistral.ai/news/mixtral-of-experts; arXiv:2412.19437, abstract
PUBLISHED = {"mixtral-8x7b": ("46.7", "12.9"), "deepseek-v3-like": ("671", "37"), "llama3-70b": ("70.6", "70.6")}


def active(quick: bool) -> None:
    """Parameters that a model holds, those that a token uses, and FLOPs per token."""
    names = list(CASES)[:3:2] if quick else list(CASES)
    cases = [MODEL | CASES[name] for name in names]
    found = on_ranks(1, on_every_case, count_all, cases, title="active", jobs=len(cases))[0]
    totals, actives, flops = [], [], []
    for name, flags, (total, used, forward, both) in zip(names, cases, found):
        shape = TrainConfig(**flags).model_config
        parameters, predicted = count_parameters(shape), count_flops(shape, flags["seq_len"])
        totals.append((name, parameters.total, total))
        actives.append((name, parameters.active, used))
        flops.append((f"{name}: forward", predicted.forward, forward))
        flops.append((f"{name}: forward and backward", predicted.model, both))
    print_comparison("parameters of the model", "", totals)
    print_comparison("active parameters: all but those of experts that get no gradient from one token", "", actives)
    print_comparison("thousands of FLOPs per token", "", flops, ",.1f", 1e3 * MODEL["seq_len"])
    compare_published()


def count_all(mesh: Mesh, flags: dict) -> tuple[int, int, int, int]:
    """On a rank: parameters, the active ones, and FLOPs of the forward and of forward and backward of a sequence."""
    config, mesh = checked(mesh, **flags)
    with torch.device("meta"):
        model = Decoder(config.model_config, naive_attention)
    apply_experts(model, config, mesh)
    materialise(model, config.torch_dtype, mesh.device, random_values(config.seed))
    tokens = torch.randint(config.model_config.vocab, (1, config.seq_len), generator=torch.Generator().manual_seed(0))

    cross_entropy_sum(model(tokens[:, :1]), tokens[:, :1]).backward()
    total = used = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        rows = parameter.grad.flatten(1).any(1) if ".experts." in name else torch.ones(1)  # (experts,)
        used += int(rows.sum()) * parameter.numel() // len(rows)

    with FlopCounterMode(display=False) as both:
        with FlopCounterMode(display=False) as forward:
            loss = cross_entropy_sum(model(tokens), tokens)
        loss.backward()
    return total, used, forward.get_total_flops(), both.get_total_flops()


def compare_published(tokens: int = 4096) -> None:
    """PREDICTED: the same counts of two well-known models, beside what their authors have published."""
    rows = []
    for name, (total, active_) in PUBLISHED.items():
        count, flops = count_parameters(PRESETS[name]), count_flops(PRESETS[name], tokens).forward / tokens
        rows.append(_row(name, count.total, total, count.active, active_, flops))
        if name == "deepseek-v3-like":
            layers = PRESETS[name].layers
            other = layers * (latent_attention() - count.attention)
            rows.append(
                _row("... with latent attention", count.total + other, total, count.active + other, active_, None)
            )
    header = ("", "total", "published", "active", "published", "active / total", "GFLOP per token, forward")
    print_table(f"predicted: billions of parameters, and FLOPs with {tokens:,} tokens", header, rows)


def _row(name: str, total: float, published: str, used: float, published_used: str, flops: float | None) -> tuple:
    cells = (f"{total / 1e9:.1f}", published, f"{used / 1e9:.1f}", published_used, f"{used / total:.1%}")
    return name, *cells, "-" if flops is None else f"{flops / 1e9:.1f}"


def latent_attention(h: int = 7168, heads: int = 128, d: int = 128, rope: int = 64) -> int:
    """Parameters of one layer of DeepSeek-V3's attention (arXiv:2412.19437, section 4.2), which we do not build."""
    q_rank, kv_rank = 1536, 512
    q = h * q_rank + q_rank * heads * (d + rope)
    kv = h * (kv_rank + rope) + kv_rank * heads * 2 * d
    return q + kv + heads * d * h
