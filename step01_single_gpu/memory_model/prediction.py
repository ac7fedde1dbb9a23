"""Bytes that a training step of our model holds, predicted tensor by tensor from the configuration alone.

    python -m step01_single_gpu.memory_model --model llama3-8b --seq-len 4096 --micro-batch 1 --dtype bfloat16

`saved_activations` lists what autograd keeps for the backward; `SavedTensors` measures it, and on the CPU the
two agree to the byte. `states` says what parameters, gradients and optimizer hold; when a step peaks stands in
`peak_memory.py`, and the playbook's formulas for its own GPT in `gpt_memory.py`.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from common.config import TrainConfig
from common.counts import count_parameters
from common.errors import UsageError
from common.model import at_least_float32
from common.model_config import ModelConfig
from step01_single_gpu.memory_model import gpt as gpt_memory


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
    """What one decoder layer keeps, in the order of its forward (dense layers, CPU kernels)."""
    h, d, heads, kv_heads = model.hidden, model.head_width, model.heads, model.kv_heads
    high, tokens = at_least_float32(dtype), (batch, seq)
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
    if recompute == "selective" or attention == "fused":
        result += [heads_of("q", heads), heads_of("k", kv_heads), heads_of("v", kv_heads)]
        if recompute == "none":  # the kernel's own note; its output is the o_proj.input below
            result += [Saved("attention", "logsumexp", (batch, heads, seq), high)]
    else:  # naive: keys and values repeated for each query head
        result += [heads_of("q", heads), heads_of("k", heads), heads_of("v", heads)]
        result += [Saved("scores", "mask", (seq, seq), torch.bool)]
        result += [Saved("scores", "softmax", (batch, heads, seq, seq), high)]
        if dtype != high:
            result += [Saved("scores", "probabilities", (batch, heads, seq, seq), dtype)]
    result += [Saved("attention", "o_proj.input", (*tokens, heads * d), dtype)]

    # ---- MLP ----
    result += [*norm("mlp_norm"), Saved("mlp", "gate_up.input", (*tokens, h), dtype)]
    for name in ("gate", "silu", "up", "down.input"):
        result.append(Saved("mlp", name, (*tokens, model.ffn), dtype))
    return result


def saved_activations(
    model: ModelConfig,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    attention: str = "fused",
    recompute: str = "none",
) -> list[Saved]:
    """What the whole model and its loss keep for one micro-batch, each storage once.

    Args:
        model: a dense model.
        dtype: type of parameters and activations.
        attention: "naive" or "fused" (the CPU's kernel; CUDA's keep a few more bytes, such as generator states).
        recompute: "none", "selective" or "full".
    """
    high, tokens = at_least_float32(dtype), (batch, seq)
    result = [Saved("embedding", "tokens", tokens, torch.int64)]
    tables = (seq, model.head_width)
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
    """Bytes of `tensors`, or of those of the named parts."""
    return sum(saved.bytes for saved in tensors if not parts or saved.part in parts)


class SavedTensors:
    """Counts what autograd keeps inside `with SavedTensors(model) as saved:`; the forward stands in the region.

    Attributes:
        tensors: one of the tensors on every storage that was kept, without the parameters. Several may be views
            of one storage (a linear layer keeps its input as a matrix), so storages are counted, not tensors.
    """

    def __init__(self, model: torch.nn.Module):
        self.tensors: list[torch.Tensor] = []
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._seen:  # holding the tensor keeps its address from being used again
            self._seen.add(address)
            self.tensors.append(tensor.detach())
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)


# ---- parameters, gradients, optimizer ---------------------------------------------------------------------


def states(model: ModelConfig, dtype: torch.dtype, optimizer: str = "adamw") -> dict[str, int]:
    """Bytes of what our step holds besides activations, at its fullest: while the optimizer steps.

    float32 16 N, bfloat16 and float16 18 N: `mixed_precision.GradientSums` drops each narrow gradient as soon as it
    is in the float32 sum, so the playbook's 2 N of narrow gradients shrink to those of one parameter. Between two
    steps gradients are gone; the moments (and a float32 step counter a tensor) come with the first update.
    """
    high, count = at_least_float32(dtype), count_parameters(model).total
    result = {"parameters": count * dtype.itemsize, "gradients": count * high.itemsize}
    result["master weights"] = count * high.itemsize if dtype != high else 0
    result["moments"] = 2 * count * high.itemsize + 4 * tensor_count(model) if optimizer == "adamw" else 0
    return result


def tensor_count(model: ModelConfig) -> int:
    """Parameter tensors: two norms and seven matrices a layer, final norm, embedding, head."""
    return 9 * model.layers + (2 if model.tie_embeddings else 3)


# ---- the calculator ---------------------------------------------------------------------------------------

ROWS = (
    *(
        "parameters",
        "gradients",
        "float32 gradient sums",
        "master weights",
        "moments",
        "attention",
        "scores",
        "mlp",
    ),
    *("norms", "layer inputs", "embedding", "head", "log-probabilities"),
)


def breakdown(config: TrainConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by row of `ROWS` for one micro-batch of `config`: our model, and the playbook's GPT beside it."""
    model, dtype, batch, seq = config.model_config, config.torch_dtype, config.micro_batch, config.seq_len
    ours = states(model, dtype, config.optimizer)
    if dtype != at_least_float32(dtype):  # narrow gradients are dropped as they come; what is held are their sums
        ours["float32 gradient sums"], ours["gradients"] = ours["gradients"], 0
    for saved in saved_activations(model, batch, seq, dtype, config.attention, config.recompute):
        ours[saved.part] = ours.get(saved.part, 0) + saved.bytes
    gpt, mixed = gpt_memory.from_model(model), dtype.itemsize == 2
    theirs = gpt_memory.states(gpt.parameters, mixed)
    for part, size in gpt_memory.layer_activations(gpt, batch, seq, mixed, config.recompute).items():
        theirs[part] = gpt.layers * size
    return ours, theirs | gpt_memory.head_activations(gpt, batch, seq, mixed)


def print_table(config: TrainConfig) -> None:
    """The memory-breakdown calculator."""
    from step01_single_gpu.memory_model.peak import predict_peak

    model, dtype = config.model_config, config.torch_dtype
    ours, theirs = breakdown(config)
    count, gpt = count_parameters(model).total, gpt_memory.from_model(model)
    print(
        f"{config.model}: {config.micro_batch} x {config.seq_len} tokens a micro-batch, {config.dtype}, "
        f"{config.attention} attention, recompute {config.recompute}"
    )
    print(f"{'':26}{'this project':>16}{'playbook (GPT)':>16}")
    print(f"{'number of parameters':26}{count:16,}{gpt.parameters:16,}")

    def line(name: str, *sizes: int) -> None:
        print(f"{name:26}" + "".join(f"{_gib(size):>16}" for size in sizes))

    for row in ROWS:
        if ours.get(row) or theirs.get(row):
            line(row, ours.get(row, 0), theirs.get(row, 0))
    held = sum(ours.get(row, 0) for row in ROWS[:5]), sum(theirs.get(row, 0) for row in ROWS[:5])
    line("all but activations", *held)
    print(f"{'  bytes a parameter':26}{held[0] / count:16.2f}{held[1] / gpt.parameters:16.2f}")
    line("activations", *(sum(column.get(row, 0) for row in ROWS[5:]) for column in (ours, theirs)))
    line("sum", sum(ours.values()), sum(theirs.values()))
    shape = (model, config.micro_batch, config.seq_len, dtype, config.attention, config.recompute)
    peak = predict_peak(*shape, config.optimizer, config.accumulation_steps)
    print(f"\npeak of a step in this project: {_gib(peak.peak)} (from the second step on)")
    line("  start of the backward", peak.loss)
    line("  worst layer of it", peak.layers)
    line("  optimizer step", peak.update)
    line("  between two steps", peak.idle)


def _gib(size: int) -> str:
    """Readable bytes, in binary units."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def main(argv: list[str] | None = None) -> int:
    """`python -m step01_single_gpu.memory_model`, with the flags of train.py."""
    from common.command_line import parse

    try:
        config = parse(1, sys.argv[1:] if argv is None else argv)
        micro_batch = max(1, config.micro_batch)
        config.global_batch = -(-config.global_batch // micro_batch) * micro_batch  # any micro-batch may be asked for
        config.resolve_and_check(1)
        print_table(config)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
