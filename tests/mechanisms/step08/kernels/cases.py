"""Every kernel of step 8 beside its formula in PyTorch.

The tests of this folder and the part `kernels` of `python -m tests.gpu_check` go through `KERNELS`. To add a kernel,
add a function that returns a `Case` for sizes of its choice, and a line to that table.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from common.group import Group
from common.layers import at_least_float32, rotate
from common.model import cross_entropy_sum, rope_tables, silu_and_multiply
from common.model_config import ModelConfig
from step08_5d.kernels import (
    adamw,
    cross_entropy,
    linear_cross_entropy,
    rms_norm,
    rotary,
    swiglu,
)
from tests.mechanisms.step08.kernels.case import BOTH, DEVICE, Case, Kernel, Maker
from tests.mechanisms.step08.kernels.cases_of_products import (
    attention,
    attention_block,
    grouped,
    grouped_sums,
    merging,
)
from tests.mechanisms.step08.kernels.narrow_cases import NARROW_KERNELS

EPS, ALONE = 1e-5, Group("tp", (0,), 0)
ADAMW = {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-5}


def norm(make: Maker, *shape: int) -> Case:
    x, weight = make(*shape), 1 + 0.3 * make(shape[-1])
    return Case(
        lambda x, weight: rms_norm.rms_norm(x, weight, EPS),
        lambda x, weight: rms_norm.rms_norm_reference(x, weight, EPS),
        [x, weight],
        work={"forward": 2 * x.nbytes, "backward": 3 * x.nbytes},
    )


def add_norm(make: Maker, *shape: int) -> Case:
    x, residual, weight = make(*shape), make(*shape), 1 + 0.3 * make(shape[-1])
    return Case(
        lambda x, residual, weight: rms_norm.add_rms_norm(x, residual, weight, EPS),
        lambda x, residual, weight: rms_norm.add_rms_norm_reference(x, residual, weight, EPS),
        [x, residual, weight],
        slack=2,  # since the sum is rounded first
        work={"forward": 4 * x.nbytes, "backward": 4 * x.nbytes},
    )


def tables(seq: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions that a rank of a split sequence might have."""
    config = ModelConfig(vocab=8, hidden=width, layers=1, heads=1, kv_heads=1, ffn=8, tie_embeddings=True)
    return rope_tables(config, torch.arange(seq, device=DEVICE) * 3 + 1, dtype)


def rotation(make: Maker, batch: int, heads: int, kv_heads: int, seq: int, width: int) -> Case:
    """q and k as the model has them: views of (batch, seq, heads * width)."""
    q, k = (make(batch, seq, each, width).transpose(1, 2) for each in (heads, kv_heads))
    work = dict.fromkeys(("forward", "backward"), 2 * (q.nbytes + k.nbytes))
    return Case(rotary.rotary, rotate, [q, k], tables(seq, width, make.dtype), work=work)


def activation(make: Maker, *shape: int) -> Case:
    gate, up = 3 * make(*shape), 3 * make(*shape)
    work = {"forward": 3 * gate.nbytes, "backward": 5 * gate.nbytes}
    return Case(swiglu.swiglu, silu_and_multiply, [gate, up], work=work)


def row_statistics(make: Maker, columns: int, scale: float = 1.0) -> Case:
    """37 columns of a larger matrix, of which only the first `columns` belong to tokens, as one rank of several has.

    Targets: the first column, the last, one in another block, one before and one behind this rank's columns.
    """
    targets = torch.tensor([0, 36, 20, -3, 40], device=make.device)

    def both(statistics: Callable, to_gradient: Callable) -> Callable:
        def call(logits, gradient):
            logits = logits[:, :37]
            largest, total, chosen = statistics(logits, targets, columns)
            of_all = largest.nan_to_num(neginf=0.0), total + 1  # as if other ranks had added to them
            to_gradient(logits, targets, columns, *of_all, gradient.to(total.dtype))
            return largest.nan_to_num(neginf=-100.0), total, chosen.nan_to_num(neginf=-100.0), logits

        return call

    ours = both(cross_entropy.row_statistics, cross_entropy.logits_to_gradient)
    reference = both(cross_entropy.row_statistics_reference, cross_entropy.logits_to_gradient_reference)
    return Case(ours, reference, [make(5, 40) * scale, make(5)], gradients=False, slack=8)


class CrossEntropy(torch.autograd.Function):
    """The loss without the head: the kernels of `linear_cross_entropy`, one after the other. It overwrites logits."""

    @staticmethod
    def forward(ctx, logits, targets, vocab, fused):  # (tokens, vocab), (tokens,)
        losses, (local, columns, largest, total) = cross_entropy.token_losses(logits, targets, vocab, ALONE, fused)
        ctx.save_for_backward(logits, local, largest, total, targets != cross_entropy.IGNORED)
        ctx.columns, ctx.fused = columns, fused
        return losses.sum()

    @staticmethod
    def backward(ctx, gradient):
        logits, local, largest, total, counts = ctx.saved_tensors
        fused, plain = cross_entropy.logits_to_gradient, cross_entropy.logits_to_gradient_reference
        (fused if ctx.fused else plain)(logits, local, ctx.columns, largest, total, gradient * counts)
        torch.autograd.graph.increment_version(logits)  # a second backward is an error instead of wrong
        return logits, None, None, None


def loss(make: Maker, samples: int, seq: int, vocab: int, fused: bool = True) -> Case:
    """With tokens that do not count."""
    logits, targets = make(samples, seq, vocab), make.integers(vocab, samples, seq)
    targets[:, 1::5] = cross_entropy.IGNORED
    return Case(
        lambda logits, targets: CrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), vocab, fused),
        cross_entropy_sum,
        [logits],
        (targets,),
        work={BOTH: 3 * logits.nbytes},
    )


def head_and_loss(
    make: Maker, samples: int, seq: int, hidden: int, vocab: int, fused: bool = True, length: int | None = None
) -> Case:
    """In chunks of so many tokens; some tokens do not count."""
    x, weight = make(samples, seq, hidden), make(vocab, hidden) * hidden**-0.5
    targets = make.integers(vocab, samples, seq)
    targets[:, 2:5] = cross_entropy.IGNORED

    def ours(x, weight, targets):
        whole = linear_cross_entropy.linear_cross_entropy(x, weight, targets, vocab, ALONE, fused, length)
        return whole.to(x.dtype)  # since logits in that type do not tell more

    return Case(
        ours,
        lambda x, weight, targets: cross_entropy_sum(F.linear(x, weight), targets),
        [x, weight],
        (targets,),
        slack=2,
        work={BOTH: 6 * samples * seq * weight.numel()},
        unit="TFLOP/s",
    )


def update(make: Maker, size: int, narrow: bool = True) -> Case:
    """Weights and moments in at least float32, and a copy of the weights, with a gradient of its type if `narrow`."""
    wide = at_least_float32(make.dtype)
    master, exp_avg, exp_avg_sq = (make(size, dtype=wide) for _ in range(3))
    tensors = [master, exp_avg, exp_avg_sq.square(), make(size, dtype=make.dtype if narrow else wide), make(size)]
    settings = tuple(torch.tensor(value, device=make.device) for value in (3.0, 1e-3, 0.7))  # step, lr, factor

    def in_place(function: Callable) -> Callable:
        def call(*arguments):
            function(*arguments, **ADAMW)
            return arguments[0], arguments[1], arguments[2], arguments[4]

        return call

    functions = in_place(adamw.adamw), in_place(adamw.adamw_reference)
    work = {"update": sum(each.nbytes for each in tensors) + 3 * master.nbytes}
    return Case(*functions, tensors, settings, gradients=False, work=work)


# Rows of experts: uneven, the first has none, the last have none, one expert, no rows at all; and on a GPU
ROWS = [5, 37, 16, 1], [0, 20, 0, 0, 17], [33, 2, 0, 0], [19], [0, 0]
ON_GPU = [0, 100, 37, 200, 1, 64, 80, 19]
TOKENS = 8 * 4096
HEADS = [(2, 4, 2, 5, 8), (1, 6, 3, 7, 12), (1, 2, 1, 1, 2), (2, 2, 2, 0, 8)]
# one row; several blocks of rows; more rows than programs; long rows; rows in two parts; no row
NORMS = [(2, 5, 12), (1, 64), (150, 9), (1060, 20), (19, 1030), (3, 8200), (0, 12)]
# fewer and more keys than queries, sequences that end at a tile's end or one behind it, widths to be padded
BLOCKS = [(37, 37, 16, 1, True), (21, 50, 16, 1, False), (50, 16, 24, 2, False), (32, 32, 40, 2, True)]
BLOCKS += [(33, 33, 8, 1, True), (1, 1, 16, 1, True)]
KERNELS = {
    "rms_norm": Kernel(norm, NORMS, (1002, 2048), (TOKENS, 2048)),
    "add_rms_norm": Kernel(add_norm, NORMS, (1002, 2048), (TOKENS, 2048)),
    "rotary": Kernel(rotation, HEADS, (2, 32, 8, 501, 64), (8, 32, 8, 4096, 64)),
    "swiglu": Kernel(activation, [(2, 3, 7), (1,), (5, 1024), (0, 8)], (1002, 8192), (TOKENS, 8192)),
    "row statistics and gradient of the loss": Kernel(row_statistics, [(33,), (0,), (1,), (16,), (37,)]),
    "cross_entropy": Kernel(loss, [(2, 7, 29), (2, 3, 29, False)], (1, 501, 5003), (2, 4096, 49152)),
    "linear_cross_entropy": Kernel(
        head_and_loss,
        [
            *((2, 7, 12, 29, fused, length) for fused in (False, True) for length in (5, 1, 14, 100)),
            *((2, 0, 12, 29, fused) for fused in (False, True)),
        ],
        (1, 501, 2048, 5003),
        (2, 4096, 2048, 49152),
    ),
    "block of attention": Kernel(attention_block, BLOCKS, (777, 777, 96, 1, True)),
    "attention, heads of 64": Kernel(attention, [(1, 2, 1, 20, 16)], (1, 32, 8, 501, 64), (2, 32, 8, 4096, 64)),
    "attention, heads of 128": Kernel(attention, [(1, 2, 1, 20, 24)], (1, 32, 8, 501, 128), (2, 32, 8, 4096, 128)),
    "attention on a rank of tp 4": Kernel(attention, [(1, 5, 1, 20, 16)], (1, 8, 2, 501, 128), (1, 8, 2, 4096, 128)),
    "merge": Kernel(merging, [(50,)], (501,)),
    **{
        f"grouped_matmul{' of gradients' if backward else ''}": Kernel(
            grouped,
            [(rows, 7, 33, backward) for rows in ROWS],
            (ON_GPU, 2048, 4096, backward),
            ([32 * each for each in ON_GPU], 2048, 4096, backward),
        )
        for backward in (False, True)
    },
    **NARROW_KERNELS,
    "grouped_matmul added to sums": Kernel(
        grouped_sums,
        [(rows, 7, 33) for rows in ROWS],
        (ON_GPU, 2048, 4096),
        ([32 * each for each in ON_GPU], 2048, 4096),
    ),
    "adamw": Kernel(update, [(2500,), (0,), (1,), (1024,)], (100_003,), (2**27, False)),
}
