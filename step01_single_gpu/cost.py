"""What one process's training step costs: bytes that it holds, tensor by tensor, and operations. It sends nothing.

`saved_activations` lists what autograd keeps for the backward; on the CPU `common.measure.saved_tensors` counts the
same to the byte. `states` says how much parameters, gradients and optimizer hold. When a step needs the most memory is
the business of `memory_model.peak`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from common.counts import attention_parts, count_flops, count_parameters
from common.model_config import ModelConfig

# ---- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """One tensor that autograd keeps from the forward for the backward."""

    part: str  # attention, scores, mlp, norms, layer inputs, embedding, head, log-probabilities
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def layer_activations(
    model: ModelConfig, batch: int, seq: int, dtype: torch.dtype, attention: str, recompute: str
) -> list[Saved]:
    """List what one decoder layer keeps, in the order of its forward (dense layers, CPU kernels)."""
    h, d, heads, kv_heads = model.hidden, model.head_width, model.heads, model.kv_heads
    high, tokens = torch.promote_types(dtype, torch.float32), (batch, seq)
    if recompute == "full":
        return [Saved("layer inputs", "input", (*tokens, h), dtype)]

    def norm(name: str) -> list[Saved]:
        return [
            Saved("norms", f"{name}.input", (*tokens, h), high),  # float32: the residual stream itself
            Saved("norms", f"{name}.rsqrt", (*tokens, 1), high),
            Saved("norms", f"{name}.normalised", (*tokens, h), dtype),  # for the gradient of the gain
        ]

    def heads_of(name: str, count: int) -> Saved:
        return Saved("attention", name, (batch, count, seq, d), dtype)

    # ---- attention. The rotation is linear in q and k and keeps nothing of them ----
    result = [*norm("attention_norm"), Saved("attention", "qkv.input", (*tokens, h), dtype)]
    if model.latent:
        result += _latent_activations(model, batch, seq, dtype, attention, recompute)
    elif recompute == "selective" or attention == "fused":
        result += [heads_of("q", heads), heads_of("k", kv_heads), heads_of("v", kv_heads)]
        if recompute == "none":  # the kernel's own statistics; its output is the o_proj.input below
            result += [Saved("attention", "logsumexp", (batch, heads, seq), high)]
    else:  # naive: keys and values repeated for each query head
        result += [heads_of("q", heads), heads_of("k", heads), heads_of("v", heads)]
        result += [Saved("scores", "mask", (seq, seq), torch.bool)]
        result += [Saved("scores", "softmax", (batch, heads, seq, seq), high)]
        if dtype != high:
            result += [Saved("scores", "probabilities", (batch, heads, seq, seq), dtype)]
    result += [Saved("attention", "o_proj.input", (*tokens, heads * model.value_width), dtype)]

    # ---- MLP ----
    result += [*norm("mlp_norm"), Saved("mlp", "gate_up.input", (*tokens, h), dtype)]
    for name in ("gate", "silu", "up", "down.input"):
        result.append(Saved("mlp", name, (*tokens, model.ffn), dtype))
    return result


def _latent_activations(
    model: ModelConfig, batch: int, seq: int, dtype: torch.dtype, attention: str, recompute: str
) -> list[Saved]:
    """List what latent attention keeps between the input of its projections and that of `o_proj`.

    A narrow part of a wider tensor keeps all of it: the latent beside the key, values beside the plain parts of keys.
    """
    latent, heads, high, tokens = model.latent, model.heads, torch.promote_types(dtype, torch.float32), (batch, seq)

    def heads_of(name: str, width: int) -> Saved:
        return Saved("attention", name, (batch, heads, seq, width), dtype)

    def norm(name: str, width: int, input_width: int) -> list[Saved]:
        return [
            Saved("attention", f"{name}.input", (*tokens, input_width if dtype == high else width), high),
            Saved("attention", f"{name}.rsqrt", (*tokens, 1), high),
            Saved("attention", f"{name}.normalised", (*tokens, width), dtype),
        ]

    result = []
    if latent.q_rank:
        result += norm("q_a_norm", latent.q_rank, latent.q_rank)
        result += [Saved("attention", "q_b_proj.input", (*tokens, latent.q_rank), dtype)]
    result += norm("kv_a_norm", latent.kv_rank, latent.shared_width)
    result += [Saved("attention", "kv_b_proj.input", (*tokens, latent.shared_width), dtype)]
    result += [heads_of("q", latent.key_width)]
    if recompute == "selective":
        return [*result, Saved("attention", "rotated key", (batch, 1, seq, latent.rope_dim), dtype)]
    result += [heads_of("k", latent.key_width)]
    if attention == "naive":
        result += [heads_of("v", latent.value_dim), Saved("scores", "mask", (seq, seq), torch.bool)]
        result += [Saved("scores", "softmax", (batch, heads, seq, seq), high)]
        narrow = [Saved("scores", "probabilities", (batch, heads, seq, seq), dtype)]
        return result + narrow * (dtype != high)
    # The kernel wants values as wide as keys. Its output is in the order of q, of which `o_proj` gets a copy
    widened = latent.value_dim < latent.key_width
    result += [heads_of("v", latent.key_width if widened else latent.pair_width), heads_of("out", latent.key_width)]
    return [*result, Saved("attention", "logsumexp", (batch, heads, seq), high)]


def saved_activations(
    model: ModelConfig, batch: int, seq: int, dtype: torch.dtype, attention: str = "fused", recompute: str = "none"
) -> list[Saved]:
    """List what the whole (dense) model and its loss keep for one micro-batch, each storage once.

    "fused" attention is the CPU's kernel; CUDA's kernels keep a few more bytes, such as the states of generators.
    """
    high, tokens = torch.promote_types(dtype, torch.float32), (batch, seq)
    result = [Saved("embedding", "tokens", tokens, torch.int64)]
    tables = (seq, model.rotary_width)
    result += [Saved("embedding", "cos", tables, high), Saved("embedding", "sin", tables, high)]
    for index in range(model.layers):
        for saved in layer_activations(model, batch, seq, dtype, attention, recompute):
            result.append(Saved(saved.part, f"layers.{index}.{saved.name}", saved.shape, saved.dtype))
    result += [
        Saved("head", "norm.input", (*tokens, model.hidden), high),
        Saved("head", "norm.rsqrt", (*tokens, 1), high),
        Saved("head", "norm.normalised", (*tokens, model.hidden), dtype),
        Saved("head", "head.input", (*tokens, model.hidden), dtype),
        # the logits themselves are not kept: the backward of the loss needs only their log-softmax
        Saved("log-probabilities", "log_softmax", (batch * seq, model.vocab), high),
        Saved("log-probabilities", "targets", (batch * seq,), torch.int64),
        Saved("log-probabilities", "total_weight", (), high),
    ]
    return result


def total_bytes(tensors: Iterable[Saved], *parts: str) -> int:
    """Return the bytes of all `tensors`, or of those that belong to the named parts."""
    return sum(saved.bytes for saved in tensors if not parts or saved.part in parts)


# ---- parameters, gradients, optimizer --------------------------------------------------------------------------------


def states(model: ModelConfig, dtype: torch.dtype, optimizer: str = "adamw") -> dict[str, int]:
    """Return the bytes that our step holds besides activations while the optimizer runs, when they are most.

    For Psi parameters they are 16 Psi in float32, 18 Psi in bfloat16 and float16: `GradientSums` drops each narrow
    gradient as soon as it has been added to the float32 sum, so the playbook's 2 Psi of narrow gradients shrink to
    those of one parameter tensor. Gradients are gone between two steps. The first update creates the moments, with a
    float32 step counter per tensor.
    """
    count = count_parameters(model).total
    result = {part: count * size for part, size in bytes_per_parameter(dtype, optimizer).items()}
    result["moments"] += 4 * tensor_count(model) if optimizer == "adamw" else 0
    return result


def bytes_per_parameter(dtype: torch.dtype, optimizer: str = "adamw") -> dict[str, int]:
    """Return how many bytes of each kind one parameter needs."""
    high = torch.promote_types(dtype, torch.float32)
    result = {"parameters": dtype.itemsize, "gradients": high.itemsize}
    result["master weights"] = high.itemsize if dtype != high else 0
    return result | {"moments": 2 * high.itemsize if optimizer == "adamw" else 0}


def tensor_count(model: ModelConfig) -> int:
    """Count the parameter tensors: two norms and seven matrices per layer, final norm, embedding, head."""
    layer = 5 + len(attention_parts(model))
    if model.latent:  # norms of its latents
        layer += 1 + (model.latent.q_rank > 0)
    return layer * model.layers + (2 if model.tie_embeddings else 3)


# ---- in the words of common/costs/vocabulary.py ----------------------------------------------------------------------


def held(
    model: ModelConfig, batch: int, seq: int, dtype: torch.dtype, attention: str = "fused", recompute: str = "none"
) -> dict[str, int]:
    """Bytes by kind, each when it is most, of a step with micro-batches of `batch` sequences, trained with AdamW."""
    each = states(model, dtype)
    return {
        "parameters": each["parameters"],
        "gradients": each["gradients"],
        "optimizer state": each["master weights"] + each["moments"],
        "activations": total_bytes(saved_activations(model, batch, seq, dtype, attention, recompute)),
    }


def operations(model: ModelConfig, seq: int, sequences: int, recompute: str = "none") -> dict[str, int]:
    """FLOPs of a step of so many sequences. What is recomputed runs in the backward."""
    flops = count_flops(model, seq)
    again = flops.hardware(recompute) - flops.model
    return {"forward": sequences * flops.forward, "backward": sequences * (2 * flops.forward + again)}
