"""The branches for CUDA of attention, grouped products and products that add to a sum, run on the CPU by stand-ins.

PyTorch's CUDA operators take less than its CPU operators of the same name: 16-bit numbers, rows at multiples of 16
bytes, a dense log-sum-exp. Some of this they check, and some they only read as if it were so. A stand-in raises
AssertionError for all of it, and lets the CPU compute. The rules are those of PyTorch's sources:
flash_attn/flash_api.cpp, cuda/GroupedBlas.cpp with GroupedMMUtils.h, and cuda/Blas.cpp.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from step06_context_parallel import attention_block

ON_CUDA = {"common.model", "step06_context_parallel.attention_block", "step07_expert_parallel.experts"}
ON_CUDA |= {"step08_5d.kernels.linear_cross_entropy"}  # modules that take the tensors of the CPU for those of a GPU
HALF = torch.bfloat16, torch.float16
grouped_mm, addmm, attention = F.grouped_mm, torch.addmm, F.scaled_dot_product_attention


def check(holds: bool, operator: str, rule: str) -> None:
    assert holds, f"CUDA's {operator}: {rule}"


def aligned(x: Tensor) -> bool:
    """Whether x and its rows begin at multiples of 16 bytes, where its last axis is dense."""
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    return all(number * x.element_size() % 16 == 0 for number in (x.storage_offset(), *strides))


def check_attention(operator: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, *others: Tensor) -> None:
    """What FlashAttention demands of tensors (batch, heads, tokens, width)."""
    tensors, width = (q, k, v, *others), q.shape[-1]
    check(q.dtype in HALF and {each.dtype for each in tensors} == {q.dtype}, operator, "one type of 16 bits")
    check(width % 8 == 0 and width <= 256, operator, "heads of a multiple of 8, and up to 256, numbers")
    check(all(each.stride(-1) == 1 for each in tensors), operator, "a dense last axis")
    check(all(map(aligned, tensors)), operator, "rows at multiples of 16 bytes")
    check(q.shape[1] % k.shape[1] == 0 and k.shape == v.shape, operator, "K/V heads that divide the query heads")
    check(min(q.numel(), k.numel()) > 0, operator, "tokens")
    check(not causal or q.shape[2] == k.shape[2], operator, "a causal block is a square")


def flash_attention(q, k, v, dropout_p, is_causal):
    check_attention("flash_attention", q, k, v, is_causal)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # CUDA's layout
    return out, lse.contiguous(), None, None, q.shape[2], k.shape[2], None, None, None


def flash_attention_backward(
    grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, offset
):
    operator = "flash_attention_backward"
    check_attention(operator, q, k, v, is_causal, grad_out, out)
    check(grad_out.shape == out.shape == q.shape, operator, "out and its gradient like q")
    check(lse.shape == q.shape[:-1] and lse.is_contiguous(), operator, "a dense log-sum-exp (batch, heads, tokens)")
    check(lse.dtype == torch.float32, operator, "a log-sum-exp in float32")
    check((cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2]), operator, "true lengths")
    check(seed.dtype == offset.dtype == torch.int64, operator, "states of the generator in int64")
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, dropout_p, is_causal
    )


def whole_attention(q, k, v, is_causal=False, enable_gqa=False):
    """`F.scaled_dot_product_attention`. On tensors that no fused kernel takes, CUDA would store all scores."""
    if q.dtype == torch.float32:
        check(q.shape[1] == k.shape[1], "attention in float32", "as many K/V heads as query heads")
    elif q.dtype in HALF:
        check_attention("scaled_dot_product_attention", q, k, v, is_causal)
    return attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)


def transposed(matrix: Tensor) -> bool:
    """Whether the axis before the last is the dense one. One of both must be, with lines at multiples of 16 bytes."""
    (rows, columns), (by_row, by_column) = matrix.shape[-2:], matrix.stride()[-2:]
    check(matrix.data_ptr() % 16 == 0, "grouped_mm", "data at a multiple of 16 bytes")
    by_columns = by_row == 1 and by_column >= max(1, rows)
    check(by_columns or by_column == 1 and by_row >= max(1, columns), "grouped_mm", "one dense axis")
    check((by_column if by_columns else by_row) * matrix.element_size() % 16 == 0, "grouped_mm", "aligned strides")
    return by_columns


def grouped_product(a, b, *, offs):
    check(a.dtype == b.dtype == torch.bfloat16, "grouped_mm", "bfloat16")
    check(offs.dtype == torch.int32 and offs.dim() == 1, "grouped_mm", "one int32 per group")
    check(a.dim() == 2 and b.dim() in (2, 3) and a.numel() > 0, "grouped_mm", "numbers in two or three axes")
    check(b.dim() == 2 or len(b) == len(offs) and a.shape[1] == b.shape[1], "grouped_mm", "shapes that fit")
    check(b.dim() == 3 or a.shape[1] == b.shape[0], "grouped_mm", "shapes that fit")
    for matrix, axis in ((a, -1 if b.dim() == 2 else 0), *([(b, 0)] if b.dim() == 2 else [])):
        transposed(matrix)
        starts = [int(end) * matrix.stride(axis) * matrix.element_size() for end in offs[:-1]]
        check(all(start % 16 == 0 for start in starts), "grouped_mm", "groups that begin at multiples of 16 bytes")
    if b.dim() == 3:
        transposed(b)
    check(all(first <= second for first, second in pairwise([0, *offs.tolist()])), "grouped_mm", "increasing ends")
    return grouped_mm(a, b, offs=offs)


def product_added(total, a, b, *, beta=1, out_dtype=None, out=None):
    """`torch.addmm` with a result wider than its matrices, which the CPU does not have."""
    if out_dtype is None:
        return addmm(total, a, b, beta=beta, out=out)
    check(a.dtype == b.dtype and a.dtype in HALF, "addmm", "matrices of one type of 16 bits")
    check(total.dtype == out_dtype == torch.float32 == out.dtype, "addmm", "a float32 sum")
    return out.copy_(addmm(total, a.float(), b.float(), beta=beta))


STAND_INS = {
    "flash_attention": flash_attention,
    "flash_attention_backward": flash_attention_backward,
    "scaled_dot_product_attention": whole_attention,
    "grouped_mm": grouped_product,
    "addmm": product_added,
}


@contextmanager
def cuda_rules():
    """Within the block, the modules of ON_CUDA find a Hopper, whose operators are stand-ins; yields their calls."""
    calls, is_cuda, prefix = Counter(), torch.Tensor.is_cuda, "_scaled_dot_product_"

    def counted(name):
        def stand_in(*arguments, **options):
            calls[name] += 1
            return STAND_INS[name](*arguments, **options)

        return stand_in

    def found(tensor):
        return sys._getframe(1).f_globals["__name__"] in ON_CUDA or is_cuda.__get__(tensor)

    blocks = {prefix + name: counted(name) for name in STAND_INS if name.startswith("flash")}
    with (
        mock.patch.object(torch.Tensor, "is_cuda", property(found)),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        mock.patch.object(attention_block, "_aten", SimpleNamespace(**blocks)),
        mock.patch.object(F, "scaled_dot_product_attention", counted("scaled_dot_product_attention")),
        mock.patch.object(F, "grouped_mm", counted("grouped_mm")),
        mock.patch.object(torch, "addmm", counted("addmm")),
    ):
        yield calls
