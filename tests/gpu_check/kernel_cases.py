"""What the part `kernels` compares: each kernel of step 8, its formula in PyTorch, and what other libraries have.

To add a kernel, add a function that returns a `Case` to `CASES`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from common.model import (
    at_least_float32,
    cross_entropy_sum,
    fused_attention,
    naive_attention,
    rotate,
    silu_and_multiply,
)
from common.process_groups import Group
from step07_expert_parallel.experts import Counts
from step08_5d.kernels import adamw, cross_entropy, grouped_matmul, linear_cross_entropy, rms_norm, rotary, swiglu
from step08_5d.kernels.flash_attention_backward import flash_attention_core

BOTH = "forward and backward"  # in one call, where a kernel does the work of the backward in the forward
EPS, ALONE = 1e-5, Group("tp", (0,), 0)
ADAMW = {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-5}


@dataclass
class Size:
    """Of what a kernel works on."""

    batch: int
    seq: int
    hidden: int = 2048
    ffn: int = 8192
    heads: int = 32
    kv_heads: int = 8
    width: int = 64
    vocab: int = 49152
    parameters: int = 2**27
    experts: int = 8


# Layers of Llama 3.2 1B. What is timed does not fit into any cache; what is checked fills no tile
TIMED = Size(8, 4096)
CHECKED = Size(2, 501, vocab=5003, parameters=100_003)
TINY = Size(1, 20, 32, 48, 4, 2, 8, 67, 1500, 3)


@dataclass
class Case:
    """Functions that do the same to `inputs`, of which they give gradients, and `settings`.

    work: bytes or FLOPs that a pass needs at least: "backward", BOTH, and any other name is one of the forward. Empty
        if nothing is timed. If no pass has a backward, there are no gradients.
    """

    ours: Callable
    eager: Callable
    inputs: list[Tensor]
    settings: tuple = ()
    work: dict[str, float] = field(default_factory=dict)
    unit: str = "GB/s"
    liger: Callable | None = None
    pytorch: Callable | None = None
    default: bool = False  # on some GPUs we take PyTorch's

    @property
    def has_gradients(self) -> bool:
        return bool({"backward", BOTH} & self.work.keys())


def liger(name: str, **settings) -> Callable | None:
    """A function of Liger Kernel, or None where that is not installed or has none."""
    try:
        function = getattr(importlib.import_module("liger_kernel.transformers.functional"), f"liger_{name}", None)
    except ImportError:
        return None
    return function and (lambda *inputs: function(*inputs, **settings))


class Maker:
    """Makes random tensors of one type on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype, self.generator = device, dtype, torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(shape, device=self.device, dtype=torch.float32, generator=self.generator)
        return made.to(dtype or self.dtype)

    def integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, device=self.device, generator=self.generator)


def norm(make: Maker, size: Size) -> Case:
    x, w = make(size.batch, size.seq, size.hidden), make(size.hidden)
    return Case(
        lambda x, w: rms_norm.rms_norm(x, w, EPS),
        lambda x, w: rms_norm.rms_norm_reference(x, w, EPS),
        [x, w],
        work={"forward": 2 * x.nbytes, "backward": 3 * x.nbytes},
        liger=liger("rms_norm", eps=EPS, in_place=False),
        pytorch=lambda x, w: F.rms_norm(x, w.shape, w, EPS),
    )


def add_norm(make: Maker, size: Size) -> Case:
    x, residual, w = *(make(size.batch, size.seq, size.hidden) for _ in range(2)), make(size.hidden)
    return Case(
        lambda x, residual, w: rms_norm.add_rms_norm(x, residual, w, EPS),
        lambda x, residual, w: rms_norm.add_rms_norm_reference(x, residual, w, EPS),
        [x, residual, w],
        work={"forward": 4 * x.nbytes, "backward": 4 * x.nbytes},
        liger=liger("fused_add_rms_norm", eps=EPS, in_place=False),
    )


def rotation(make: Maker, size: Size) -> Case:
    q, k = (make(size.batch, size.seq, heads, size.width).transpose(1, 2) for heads in (size.heads, size.kv_heads))
    angles = make(size.seq, size.width // 2, dtype=at_least_float32(make.dtype)).repeat(1, 2)
    theirs, work = liger("rope"), 2 * (q.nbytes + k.nbytes)
    in_place = theirs and (lambda q, k, cos, sin: theirs(q, k, cos[None].to(q.dtype), sin[None].to(q.dtype)))
    work = {"forward": work, "backward": work}
    return Case(rotary.rotary, rotate, [q, k], (angles.cos(), angles.sin()), work, liger=in_place)


def activation(make: Maker, size: Size) -> Case:
    gate, up = (make(size.batch, size.seq, size.ffn) for _ in range(2))
    work = {"forward": 3 * gate.nbytes, "backward": 5 * gate.nbytes}
    return Case(swiglu.swiglu, silu_and_multiply, [gate, up], work=work, liger=liger("swiglu"))


def loss(make: Maker, size: Size) -> Case:
    rows = max(1, size.batch // 4)
    logits, targets = make(rows, size.seq, size.vocab), make.integers(size.vocab, rows, size.seq)
    theirs = liger("cross_entropy", reduction="sum")
    return Case(
        lambda logits, targets: cross_entropy.cross_entropy_sum(logits, targets, size.vocab, ALONE, True),
        cross_entropy_sum,
        [logits],
        (targets,),
        {BOTH: 3 * logits.nbytes},
        liger=theirs and (lambda logits, targets: theirs(logits.flatten(0, 1), targets.flatten())),
    )


def head_and_loss(make: Maker, size: Size) -> Case:
    rows = max(1, size.batch // 4)
    x, w = make(rows, size.seq, size.hidden), make(size.vocab, size.hidden) * size.hidden**-0.5
    theirs = liger("fused_linear_cross_entropy", reduction="sum")
    return Case(
        lambda x, w, t: linear_cross_entropy.linear_cross_entropy(x, w, t, size.vocab, ALONE, True),
        lambda x, w, t: cross_entropy_sum(F.linear(x, w), t),
        [x, w],
        (make.integers(size.vocab, rows, size.seq),),
        {BOTH: 6 * rows * size.seq * w.numel()},
        "TFLOP/s",
        liger=theirs and (lambda x, w, t: theirs(x.flatten(0, 1), w, t.flatten())),
    )


def attention(times: int) -> Callable[[Maker, Size], Case]:
    """Heads of so many times the width; the backward counts as 2.5 times the forward (our kernels do 3.5 times)."""

    def case(make: Maker, size: Size) -> Case:
        batch, width = max(1, size.batch // 4), times * size.width
        shapes = [(batch, size.seq, heads, width) for heads in (size.heads, size.kv_heads, size.kv_heads)]
        q, k, v = (make(*shape).transpose(1, 2) for shape in shapes)
        flops = 2 * q.numel() * size.seq
        work = {"forward": flops, "backward": 2.5 * flops}
        functions = flash_attention_core, naive_attention
        return Case(*functions, [q, k, v], (), work, "TFLOP/s", pytorch=fused_attention, default=True)

    return case


def experts(make: Maker, size: Size) -> tuple[Tensor, Tensor, Tensor, Counts]:
    """Rows of x and of a gradient, the experts' matrices, and uneven counts: the first expert has no row."""
    rows, width = size.batch * size.seq // 2, size.ffn // 2
    ends = make.integers(rows, size.experts - 1).sort().values
    ends[0] = 0
    ends = torch.cat((ends.new_zeros(1), ends, ends.new_full((1,), rows)))
    matrices = make(size.experts, width, size.hidden)  # as they are stored
    return make(rows, size.hidden), make(rows, width), matrices, Counts(ends.diff())


def grouped(make: Maker, size: Size) -> Case:
    x, _, matrices, counts = experts(make, size)
    work = {"forward": 2 * len(x) * matrices[0].numel()}
    return Case(
        lambda x, w, counts: grouped_matmul.multiply(x, w.mT, counts),
        lambda x, w, counts: grouped_matmul.multiply_reference(x, w.mT, counts),
        [x, matrices],
        (counts,),
        work,
        "TFLOP/s",
        pytorch=lambda x, w, counts: F.grouped_mm(x, w.mT, offs=counts.ends),
        default=True,
    )


def grouped_gradients(make: Maker, size: Size) -> Case:
    """What the backward of `grouped` computes: the gradient of x, and that of the matrices."""
    x, y, matrices, counts = experts(make, size)

    def both(multiply, transposed):
        return lambda x, y, w, counts: (multiply(y, w, counts), transposed(y, x, counts))

    def mm(x, w, counts):
        return F.grouped_mm(x, w, offs=counts.ends)

    return Case(
        both(grouped_matmul.multiply, grouped_matmul.multiply_transposed),
        both(grouped_matmul.multiply_reference, grouped_matmul.multiply_transposed_reference),
        [x, y, matrices],
        (counts,),
        {"products": 4 * len(x) * matrices[0].numel()},
        "TFLOP/s",
        pytorch=both(mm, lambda y, x, counts: mm(y.mT, x, counts)),
        default=True,
    )


def update(make: Maker, size: Size) -> Case:
    """Master weights and moments in float32, and a copy of the weights in the narrow type."""
    master, exp_avg, exp_avg_sq, gradient = (make(size.parameters, dtype=torch.float32) for _ in range(4))
    tensors = [master, exp_avg, exp_avg_sq.square_(), gradient, torch.zeros_like(master, dtype=make.dtype)]
    settings = tuple(torch.tensor(value, device=make.device) for value in (3.0, 1e-3, 0.7))  # step, lr, factor

    def in_place(function):
        def call(*arguments):
            function(*arguments, **ADAMW)
            return arguments[0], arguments[1], arguments[2], arguments[4]

        return call

    inner = torch.optim.AdamW([torch.zeros_like(master)], fused=True)
    inner.grad_scale = 1 / settings[2]

    def pytorch(master, exp_avg, exp_avg_sq, gradient, copy, *_):
        (theirs,) = inner.param_groups[0]["params"]
        theirs.grad = gradient
        inner.step()
        copy.copy_(theirs)

    work = {"update": sum(each.nbytes for each in tensors) + 3 * master.nbytes}
    functions = in_place(adamw.adamw), in_place(adamw.adamw_reference)
    return Case(*functions, tensors, settings, work, pytorch=pytorch)


# ---- operators of PyTorch that no CPU run executes, or that few people use -------------------------------------------


def wide_sum(make: Maker, size: Size) -> Case:
    """How gradients of weights are added up: narrow matrices, and a sum in float32 that holds anything before."""
    total, a, b = make(size.hidden, size.hidden, dtype=torch.float32), make(301, size.hidden), make(301, size.hidden)

    def ours(total, a, b):
        total = torch.full_like(total, torch.nan)
        linear_cross_entropy.add_product(total, a, b, first=True)
        linear_cross_entropy.add_product(total, a, b)
        return total

    return Case(ours, lambda total, a, b: 2 * (a.T @ b), [total, a, b])


def bags(make: Maker, size: Size) -> Case:
    """How step 7 adds up what the experts return."""
    rows, gates = make(2 * size.seq, size.hidden), make(2 * size.seq)
    places = torch.randperm(2 * size.seq, device=make.device, generator=make.generator)
    starts = torch.arange(0, 2 * size.seq, 2, device=make.device)

    def ours(rows, gates, places, starts):
        return F.embedding_bag(places, rows, starts, per_sample_weights=gates, mode="sum")

    def eager(rows, gates, places, starts):
        return (rows[places] * gates[:, None]).unflatten(0, (-1, 2)).sum(1)

    return Case(ours, eager, [rows, gates], (places, starts))


CASES: dict[str, Callable[[Maker, Size], Case]] = {
    "rms_norm": norm,
    "add_rms_norm": add_norm,
    "rotary": rotation,
    "swiglu": activation,
    "cross_entropy": loss,
    "linear_cross_entropy": head_and_loss,
    "flash_attention, heads of 64": attention(1),
    "flash_attention, heads of 128": attention(2),
    "grouped_matmul": grouped,
    "grouped_matmul of gradients": grouped_gradients,
    "adamw": update,
    "torch.addmm with out_dtype": wide_sum,
    "torch.embedding_bag": bags,
}
