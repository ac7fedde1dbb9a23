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
    output, loads, drops, losses = [], [0] * shape.experts, 0, []
    for sequence in x:
        logits = sequence @ moe.router.weight.T
        scores = logits.softmax(-1) if shape.gate == "softmax" else 1 / (1 + (-logits).exp())
        taken = [0] * shape.experts
        for token, row in zip(sequence, scores):
            chosen = choice_of(row.tolist(), moe.router.bias.tolist(), config)
            total = sum(row[index] for index in chosen) if shape.normalize_gates else 1
            y = moe.shared(token[None])[0] if moe.shared else torch.zeros_like(token)
            for index in range(shape.experts):
                hidden = F.silu(experts.gate_proj[index] @ token) * (experts.up_proj[index] @ token)
                gate = row[index] / total * shape.gate_scale if index in chosen else 0
                if index in chosen:
                    taken[index] += 1
                    limit = math.ceil(config.capacity_factor * shape.top_k * len(sequence) / shape.experts)
                    if config.capacity_factor and taken[index] > limit:
                        gate, drops = 0, drops + 1
                y = y + gate * (experts.down_proj[index] @ hidden)
            output.append(y)
        loads = [load + more for load, more in zip(loads, taken, strict=True)]
        probabilities = (scores / scores.sum(-1, keepdim=True)).mean(0)
        equal = shape.top_k * len(sequence) / shape.experts
        balance = sum(count / equal * p for count, p in zip(taken, probabilities, strict=True))
        losses.append(config.aux_coef * balance if config.balance == "aux" else 0 * balance)
        losses.append(config.z_coef * logits.exp().sum(-1).log().square().mean())
    return torch.stack(output).view_as(x), sum(losses) / config.global_batch, loads, drops
