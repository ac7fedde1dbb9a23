"""What pipeline parallelism costs: bubbles, messages and their bytes, what a rank keeps, when a message hides.

p ranks, m micro-batches, v stages on each rank; F, I, W: times of a p-th of the model for one micro-batch, B = I + W;
b sequences of s tokens a micro-batch, h the hidden width, beta the bytes of an activation.
"""

from collections.abc import Callable

import torch

from common.costs.vocabulary import Message
from common.counts import count_flops, count_parameters
from common.model_config import ModelConfig
from step01_single_gpu.cost import layer_activations, saved_activations, total_bytes
from step05_pipeline.schedules.actions import Schedule

# ---- bubbles ---------------------------------------------------------------------------------------------------------


def bubble_ratio(p: int, m: int, v: int = 1) -> float:
    """r = bubble / ideal of AFAB and 1F1B (v = 1) and of interleaved schedules; for v > 1 only from m = p on."""
    return (p - 1) / (v * m)


def smallest_ratio(p: int, m: int) -> float:
    """With whole backwards no order of work has less: one micro-batch alone takes p (F + B)."""
    return max(0.0, p / m - 1)


def efficiency(r: float) -> float:
    """Share of a step in which a rank works. The bubble is measured in the ideal time, so it is not 1 - r."""
    return 1 / (1 + r)


# Idle time of a rank in a step of at least 2p micro-batches, of equal stages without communication time. For zb-h2 and
# zbv: within a rank, from its first start to its last end.
BUBBLES: dict[str, Callable[[int, float, float, float], float]] = {
    "afab": lambda p, F, B, W: (p - 1) * (F + B),  # Huang et al., arXiv:1811.06965
    "1f1b": lambda p, F, B, W: (p - 1) * (F + B),  # Narayanan et al., arXiv:2006.09503
    "interleaved": lambda p, F, B, W: (p - 1) * (F + B) / 2,  # v = 2; Narayanan et al., arXiv:2104.04473
    "zb-h1": lambda p, F, B, W: (p - 1) * (F + B - 2 * W),  # Qi et al., arXiv:2401.10241, table 2
    "zb-h2": lambda p, F, B, W: (p - 1) * (F + B - 3 * W),  # the same; no less than 0
    "dualpipe": lambda p, F, B, W: (p / 2 - 1) * (F + B - 2 * W),  # if F = I; F and B one after the other
    "dualpipev": lambda p, F, B, W: (p - 1) * (F + B - 2 * W) / 2,  # DualPipe's for 2p ranks, of half the work each
}


def dualpipe_bubble(p: int, both: float, B: float, W: float) -> float:
    """DeepSeek's, for an F and a B of the other direction that run as one and take `both` (DualPipe's own README).

    Of the ranks in the middle, which wait longest; of all ranks, where `both` is F + B.
    """
    return (p / 2 - 1) * (both + B - 3 * W)


# ---- messages --------------------------------------------------------------------------------------------------------


def number_of_messages(p: int, m: int, v: int = 1, placement: str = "looped") -> int:
    """Of all ranks in a step, forward and backward: one for each pair of neighboring stages on different ranks."""
    borders = {"looped": p * v - 1, "v": 2 * (p - 1), "bidirectional": p - 1}[placement]
    return 2 * m * borders if p > 1 else 0


def messages(p: int, m: int, size: float, v: int = 1, placement: str = "looped") -> list[Message]:
    """What a rank of a pipeline sends between stages in a step, on average over ranks; hidden if there is slack.

    Args:
        size: bytes of each, see `message_bytes`.
    """
    each = number_of_messages(p, m, v, placement) / 2 / p
    return [Message(f"pp_{direction}", "send", size, each, direction) for direction in ("forward", "backward")]


def message_bytes(b: int, s: int, h: int, beta: int = 4, tp: int = 1) -> int:
    """Hidden states of a micro-batch, or their gradient; under sequence parallelism a tp-th of them."""
    return b * s * h * beta // tp


def hide_ratio(h: int, layers: float, peak: float, bandwidth: float, beta: int = 2) -> float:
    """A message's time over that of the forward that it could hide behind, of the next stage's layers of 16 h^2.

    beta b s h / bandwidth over 32 b s h^2 layers / peak: b and s cancel. The playbook's appendix A3 has no beta.

    Args:
        peak: FLOP/s. bandwidth: bytes/s.
    """
    return beta * peak / (32 * h * layers * bandwidth)


def hide_ratio_of(model: ModelConfig, s: int, layers: float, peak: float, bandwidth: float, beta: int = 2) -> float:
    """The same with the FLOPs of this model's layers, attention cores included."""
    flops = count_flops(model, s)
    return beta * s * model.hidden / bandwidth * peak * model.layers / layers / (flops.linear + flops.attention_core)


# ---- memory ----------------------------------------------------------------------------------------------------------


def stage_parameters(model: ModelConfig, first: int, last: int) -> int:
    """Of the stage with the layers [first, last), which are dense, with what belongs to the ends of the model."""
    count = count_parameters(model)
    norms = 2 * model.hidden + (model.latent.q_rank + model.latent.kv_rank if model.latent else 0)
    result = (last - first) * (count.attention + count.dense_mlp + norms)
    if first == 0:
        result += count.embedding
    if last == model.layers:
        result += model.hidden + (0 if model.tie_embeddings and first == 0 else count.embedding)
    return result


def stage_activations(model: ModelConfig, first: int, last: int, b: int, s: int, dtype: torch.dtype) -> int:
    """Bytes that a stage keeps of one micro-batch from F to B or I (fused attention, no recomputation)."""
    whole = saved_activations(model, b, s, dtype)
    result = (last - first) * total_bytes(layer_activations(model, b, s, dtype, "fused", "none"))
    result += sum(each.bytes for each in whole if each.name in ("cos", "sin"))
    if first == 0:
        result += sum(each.bytes for each in whole if each.name == "tokens")
    if last == model.layers:
        result += total_bytes(whole, "head") + b * s * (4 * model.vocab + 8 + 1)
    return result


def stage_store(model: ModelConfig, first: int, last: int, b: int, s: int, dtype: torch.dtype) -> int:
    """Bytes that a stage keeps of one micro-batch from I to W: inputs and output gradients of its linear layers."""
    inputs, gradients = _attention_operands(model)
    inputs += model.hidden + model.ffn  # gate and up share theirs
    gradients += 2 * model.ffn + model.hidden
    head = (model.hidden + model.vocab) if last == model.layers else 0
    return b * s * dtype.itemsize * ((last - first) * (inputs + gradients) + head)


def _attention_operands(model: ModelConfig) -> tuple[int, int]:
    """Of one layer's attention and one token: numbers in the inputs of linear layers, and in their output gradients.

    Layers that share an input keep it once. The latent that is expanded is a part of a tensor, all of which is kept.
    """
    latent, queries = model.latent, model.heads * model.head_width
    out = model.heads * model.value_width  # what o_proj gets
    if latent is None:
        return model.hidden + out, queries + 2 * model.kv_heads * model.head_width + model.hidden
    inputs = model.hidden + latent.q_rank + latent.shared_width + out
    gradients = latent.q_rank + queries + latent.shared_width + model.heads * latent.pair_width + model.hidden
    return inputs, gradients


def peak_kept(schedule: Schedule, rank: int, kept: list[int], stored: list[int]) -> int:
    """Most bytes that a rank keeps at the end of any of its actions.

    Args:
        kept, stored: of each stage, bytes of one micro-batch from F to B or I, and from I to W.
    """
    now = peak = 0
    for action in schedule.actions[rank]:
        _, stage = schedule.stage_of(rank, action.chunk)
        now += {"F": kept[stage], "B": -kept[stage], "I": stored[stage] - kept[stage], "W": -stored[stage]}[action.kind]
        peak = max(peak, now)
    return peak
