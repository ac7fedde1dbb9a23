"""The decoder: parity with transformers' Llama, precision."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.model import ATTENTION_CORES, Decoder, cross_entropy_sum, rope_tables
from common.model_config import ModelConfig, RopeScaling
from common.weights.huggingface import huggingface_name
from common.weights.initialisation import materialise, random_values

GQA = ModelConfig(vocab=96, hidden=64, layers=2, heads=4, kv_heads=2, ffn=112, tie_embeddings=False)
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
CASES = {
    "gqa": GQA,
    "gqa-tied": replace(GQA, tie_embeddings=True),
    "mqa": replace(GQA, kv_heads=1, norm_eps=1e-6),
    "mha": replace(GQA, kv_heads=4, rope_theta=1e6),
    "head_dim": replace(GQA, head_dim=24),
    "llama3": replace(GQA, rope_theta=500000.0, rope_scaling=LLAMA3, head_dim=32),
    "llama3-tied-mqa": replace(GQA, kv_heads=1, rope_scaling=LLAMA3, tie_embeddings=True),
}
CORES = sorted(ATTENTION_CORES)


def build(config: ModelConfig, dtype=torch.float64, core="fused") -> Decoder:
    model = Decoder(config, ATTENTION_CORES[core])
    materialise(model, dtype, torch.device("cpu"), random_values(seed=0))
    return model


def liven(model: Decoder) -> Decoder:
    """Weights larger than the initial ones and gains other than 1: attention that selects, norms that matter."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(1 + 0.3 * noise if noise.dim() == 1 else 1.5 / math.sqrt(noise.shape[-1]) * noise)
    return model


def tokens_of(config: ModelConfig, batch=2, seq=80) -> torch.Tensor:
    return torch.randint(config.vocab, (batch, seq), generator=torch.Generator().manual_seed(2))


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return ((ours - theirs).norm() / theirs.norm()).item()


def peer(model: Decoder, attention: str = "sdpa"):
    """transformers' LlamaForCausalLM with the same weights; its configuration is written a second time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 64}
    shape = {"vocab_size": config.vocab, "hidden_size": config.hidden, "intermediate_size": config.ffn}
    shape |= {"num_hidden_layers": config.layers, "tie_word_embeddings": config.tie_embeddings}
    shape |= {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads}
    shape |= {"head_dim": config.head_width, "max_position_embeddings": config.max_positions}
    shape |= {"rms_norm_eps": config.norm_eps, "rope_parameters": rope, "attn_implementation": attention}
    theirs = LlamaForCausalLM(LlamaConfig(**shape)).to(next(model.parameters()).dtype)
    weights = dict(theirs.named_parameters())
    for parameter in model.parameters():
        weights[huggingface_name(parameter.spec.name)].data.copy_(parameter.detach())
    return theirs


def worst_difference(model: Decoder, theirs) -> float:
    """The largest relative difference of the logits, the loss and the gradients of all parameters."""
    tokens = tokens_of(model.config)
    positions = torch.arange(30, 30 + tokens.shape[1])  # beyond the 64 positions before the scaling
    logits, their_logits = model(tokens, positions), theirs(tokens, position_ids=positions[None]).logits
    loss = cross_entropy_sum(logits[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    their_loss = F.cross_entropy(their_logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    (loss + their_loss).backward()
    pairs = [(logits, their_logits), (loss, their_loss)]
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    pairs += [(p.grad, gradients.pop(huggingface_name(p.spec.name))) for p in model.parameters()]
    assert not gradients
    return max(difference(*pair) for pair in pairs)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, core, monkeypatch):
    """2e-6 with transformers as it is; 1e-12 in float64 when its casts to float32 are patched away."""
    model = liven(build(CASES[case], torch.float32, core))
    assert worst_difference(model, peer(model, {"naive": "eager", "fused": "sdpa"}[core])) < 2e-6
    remove_casts(monkeypatch)
    model = liven(build(CASES[case], torch.float64, core))
    assert worst_difference(model, peer(model)) < 1e-12


def remove_casts(monkeypatch) -> None:
    """transformers computes norms and rotary tables in float32, whatever the model's type."""
    from transformers.models.llama import modeling_llama

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def tables(self, x, position_ids):
        rope, d = self.config.rope_parameters, self.config.head_dim
        frequency = rope["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        if rope["rope_type"] == "llama3":  # Llama 3.1's own code, a frequency at a time
            old, factor = rope["original_max_position_embeddings"], rope["factor"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            for i, f in enumerate(frequency.tolist()):
                wavelength = 2 * math.pi / f
                if wavelength > old / low:
                    frequency[i] = f / factor
                elif wavelength >= old / high:
                    smooth = (old / wavelength - low) / (high - low)
                    frequency[i] = (1 - smooth) * f / factor + smooth * f
        angles = position_ids[..., None].double() * frequency
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", tables)


def test_llama3_scaling_has_its_three_regimes():
    """So that the parity above covers all of them: unchanged, blended and stretched frequencies."""
    configs = (replace(CASES["llama3"], rope_scaling=scaling) for scaling in (LLAMA3, None))
    scaled, plain = (rope_tables(each, torch.tensor([1]), torch.float64)[1].asin()[0, :16] for each in configs)
    ratio = plain / scaled
    assert (ratio < 1 + 1e-9).sum() >= 2 and (ratio > 8 - 1e-9).sum() >= 2
    assert ((ratio > 1.01) & (ratio < 7.99)).sum() >= 1


class Only64(TorchDispatchMode):
    """Fails when any operation makes a floating-point tensor that is not float64."""

    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                assert leaf.dtype == torch.float64, f"{function} makes {leaf.dtype}"
                self.seen += 1
        return result


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("case", ["gqa-tied", "llama3"])
def test_float64_never_passes_through_float32(case, core):
    model, tokens = build(CASES[case], core=core), tokens_of(GQA)
    with Only64() as mode:
        cross_entropy_sum(model(tokens), tokens).backward()
    assert mode.seen > 100


@pytest.mark.parametrize("core", CORES)
def test_bfloat16_runs_near_float32(core):
    config = CASES["llama3"]
    narrow, full = build(config, torch.bfloat16, core), build(config, torch.float32, core)
    tokens = tokens_of(config)
    logits = narrow(tokens)
    loss = cross_entropy_sum(logits, tokens)
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert {table.dtype for table in rope_tables(config, torch.arange(5), torch.bfloat16)} == {torch.float32}
    loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in narrow.parameters())
    assert difference(logits, full(tokens)) < 0.03  # bf16 has 8 bits: 0.4% a rounding
