"""Cases of the kernels that multiply matrices: attention in blocks, and experts. See `cases.py`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from common.layers import at_least_float32
from common.model import fused_attention, naive_attention
from step07_expert_parallel.experts import Counts
from step08_5d.kernels import flash_attention_backward as attention_backward
from step08_5d.kernels import grouped_matmul, merge
from step08_5d.kernels.flash_attention import attend, attend_reference
from tests.mechanisms.step08.kernels.case import Case, Maker


def attention_block(
    make: Maker, queries: int, keys: int, width: int, kv_heads: int, causal: bool, scale: float = 1.0
) -> Case:
    """As ring attention calls it: output, log-sum-exp and gradients of a block."""

    def block(forward: Callable, backward: Callable) -> Callable:
        def call(q, k, v, gradient):
            out, lse = forward(q, k, v, causal)
            return out, lse, *backward(gradient, q, k, v, out, lse, causal)

        return call

    shapes = (queries, 2), (keys, kv_heads), (keys, kv_heads), (queries, 2)
    q, k, v, gradient = (make(2, length, heads, width).transpose(1, 2) for length, heads in shapes)
    ours = block(attend, attention_backward.attend_backward)
    reference = block(attend_reference, attention_backward.attend_backward_reference)
    return Case(ours, reference, [q * scale, k * scale, v, gradient], gradients=False)


def attention(make: Maker, batch: int, heads: int, kv_heads: int, seq: int, width: int) -> Case:
    """The model's. The backward counts as 2.5 times the forward, and our kernels do 3.5 times as much."""
    q, k, v = (make(batch, seq, each, width).transpose(1, 2) for each in (heads, kv_heads, kv_heads))
    work = {"forward": 2.0 * q.numel() * seq, "backward": 5.0 * q.numel() * seq}
    functions = attention_backward.flash_attention_core, naive_attention
    return Case(*functions, [q, k, v], (), True, 4, work, "TFLOP/s", pytorch=fused_attention)


def merging(make: Maker, queries: int) -> Case:
    """Two blocks of some rows in the middle, none of them for other rows."""

    def merged(function: Callable) -> Callable:
        def call(*tensors):
            out, lse = torch.zeros_like(tensors[0], dtype=tensors[1].dtype), torch.full_like(tensors[1], -torch.inf)
            for block in (tensors[:2], tensors[2:]):
                function(*(each[:, :, 5:-8] for each in (out, lse, *block)))
            return out, lse.nan_to_num(neginf=-100.0)

        return call

    wide, blocks = at_least_float32(make.dtype), []
    for _ in range(2):
        blocks += [make(2, queries, 3, 24).transpose(1, 2), 9 * make(2, 3, queries, dtype=wide)]
    return Case(merged(merge.merge), merged(merge.merge_reference), blocks, gradients=False)


def grouped(make: Maker, rows: list[int], inner: int, outer: int, backward: bool = False) -> Case:
    """Rows of x, some for each expert, times the experts' matrices, which are stored transposed; or the gradients of
    both for a y."""
    x, y, matrices = make(sum(rows), inner), make(sum(rows), outer), make(len(rows), outer, inner)

    def calls(multiply: Callable, transposed: Callable) -> Callable:
        if backward:
            return lambda x, y, w, counts: (multiply(y, w, counts), transposed(y, x, counts))
        return lambda x, y, w, counts: multiply(x, w.mT, counts)

    def of_pytorch(x, w, counts):
        return F.grouped_mm(x, w, offs=counts.ends)

    return Case(
        calls(grouped_matmul.multiply, grouped_matmul.multiply_transposed),
        calls(grouped_matmul.multiply_reference, grouped_matmul.multiply_transposed_reference),
        [x, y, matrices],
        (Counts(torch.tensor(rows, device=make.device)),),
        gradients=False,
        slack=4,
        work={"gradients" if backward else "forward": (2 + 2 * backward) * len(x) * inner * outer},
        unit="TFLOP/s",
        pytorch=calls(of_pytorch, lambda y, x, counts: of_pytorch(y.mT, x, counts)),
    )


def grouped_sums(make: Maker, rows: list[int], inner: int, outer: int) -> Case:
    """Gradients of the experts' matrices, in place of what sums in at least float32 have, and added to others."""
    x, y, counts = make(sum(rows), inner), make(sum(rows), outer), Counts(torch.tensor(rows, device=make.device))
    sums = [make(len(rows), outer, inner, dtype=at_least_float32(make.dtype)) for _ in range(2)]

    def ours(x, y, total, other, counts):
        grouped_matmul.multiply_transposed(y, x, counts, total, first=False)
        return total, grouped_matmul.multiply_transposed(y, x, counts, other.fill_(torch.nan), first=True)

    def reference(x, y, total, other, counts):
        first, second = (grouped_matmul.multiply_transposed_reference(y, x, counts) for _ in range(2))
        return total + first, second

    work = {"sums": 4 * len(x) * inner * outer}
    return Case(ours, reference, [x, y, *sums], (counts,), gradients=False, slack=4, work=work, unit="TFLOP/s")
