"""What the tests of step 7 share: one layer with experts, and the same layer written out, token by token."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import TrainConfig
from common.model import Decoder
from common.weights.initialisation import materialise, random_values
from step07_expert_parallel.moe import MoE, apply_experts
from tests.harness.observing import configure, mesh_of

BASE = (
    "--layers 1 --hidden 16 --heads 2 --kv-heads 1 --ffn 24 --vocab 64 --seq-len 12 --global-batch 8 --data synthetic"
)
BASE += " --device cpu --dtype float64"
CASES = {
    "mixtral": "--experts 6 --top-k 2",
    "one expert per token": "--experts 6 --top-k 1 --balance none",
    "all experts": "--experts 3 --top-k 3 --gate sigmoid",
    "deepseek": "--experts 8 --top-k 3 --gate sigmoid --shared-experts 2 --expert-ffn 10 --aux-coef 0.3",
    "node-limited": "--experts 8 --top-k 3 --gate sigmoid --expert-groups 4 --node-limit 2 --z-coef 0.2",
    "groups of one": "--experts 4 --top-k 2 --expert-groups 4 --node-limit 2",
    "capacity": "--experts 6 --top-k 2 --capacity-factor 0.8 --aux-coef 0.3 --z-coef 0.2",
    "tight capacity": "--experts 4 --top-k 2 --gate sigmoid --capacity-factor 0.3 --shared-experts 1",
}


def configured(flags: str, world: int = 1) -> TrainConfig:
    return configure(7, f"{BASE} {flags}", world)


def layer_of(config: TrainConfig, lively: float = 20.0) -> MoE:
    """The only layer's experts, with weights so large that tokens differ in what they choose."""
    model = Decoder(config.model_config)
    apply_experts(model, config, mesh_of(config))
    materialise(model, config.torch_dtype, torch.device("cpu"), random_values(1))
    for parameter in model.parameters():
        parameter.data.mul_(lively)
    return model.layers["0"].mlp


def inputs_of(config: TrainConfig, batch: int = 3, seq: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, seq, config.model_config.hidden, generator=generator, dtype=torch.float64)
    return x.to(config.torch_dtype).requires_grad_()


def choice_of(scores: list[float], bias: list[float], config: TrainConfig) -> list[int]:
    """The experts that a token with these scores chooses."""
    shape, ranked = config.model_config, [score + more for score, more in zip(scores, bias, strict=True)]
    size = shape.experts // shape.expert_groups
    groups = [range(start, start + size) for start in range(0, shape.experts, size)]
    groups.sort(key=lambda group: -sum(sorted((ranked[i] for i in group), reverse=True)[:2]))
    allowed = [index for group in groups[: shape.groups_per_token] for index in group]
    return sorted(allowed, key=lambda index: (-ranked[index], index))[: shape.top_k]


def written_out(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor, list[int], int]:
    """The output, the auxiliary losses, the load of each expert and how many choices were dropped, by the formulas.

    Every expert works on every token, and its output is multiplied by a gate, which is usually 0.
    """
    config, shape, experts = moe.router.config, moe.router.shape, moe.experts
    logits = x @ moe.router.weight.T  # (batch, seq, experts), as all that follows
    scores = logits.softmax(-1) if shape.gate == "softmax" else 1 / (1 + (-logits).exp())
    chosen = torch.zeros_like(scores)
    for row, marks in zip(scores.flatten(0, 1).tolist(), chosen.flatten(0, 1)):
        marks[choice_of(row, moe.router.bias.tolist(), config)] = 1
    gates = scores * chosen
    gates = gates / (gates.sum(-1, keepdim=True) if shape.normalize_gates else 1) * shape.gate_scale
    equal = shape.top_k * x.shape[1] / shape.experts
    limit = math.ceil(config.capacity_factor * equal) if config.capacity_factor else math.inf
    dropped = chosen * (chosen.cumsum(1) > limit)
    hidden = F.silu(torch.einsum("bsh,efh->bsef", x, experts.gate_proj))
    hidden = hidden * torch.einsum("bsh,efh->bsef", x, experts.up_proj)
    output = torch.einsum("bse,ehf,bsef->bsh", gates * (1 - dropped), experts.down_proj, hidden)
    probabilities = (scores / scores.sum(-1, keepdim=True)).mean(1)
    balance = (chosen.sum(1) / equal * probabilities).sum() * (config.aux_coef if config.balance == "aux" else 0)
    z = config.z_coef * logits.exp().sum(-1).log().square().mean(1).sum()
    output = output + (moe.shared(x) if moe.shared else 0)
    return output, (balance + z) / config.global_batch, chosen.sum((0, 1)).int().tolist(), int(dropped.sum())
