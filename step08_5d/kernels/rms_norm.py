"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467), alone or together with the addition that comes before it.

    total = x + residual,   normed = total / rms(total) * weight,   rms(t) = sqrt(mean(t^2) + eps)

There is hardly any arithmetic, so moving the bytes takes all the time. For one element in bfloat16, without `weight`:

                              least   eager
    rms_norm, forward             4      36   float32 copies are written and read again
    rms_norm, backward            6      96
    add_rms_norm, forward         8      42
    add_rms_norm, backward        8     102

("Eager" adds up the tensors that every operation of the reference reads and writes; a test counts them.)

The kernels move the least, and partial sums on top: the gradient of the weight is a sum over all rows, so each program
adds up the rows that it handles and stores one row of partial sums, in float32. A program has at least 4 rows
(FEWEST_ROWS), so writing and reading these sums adds no more than 2 bytes to an element: with 4,096 rows 0.5 on an
H100. Atomic additions to a single row would need none, but then the order of the additions, and with it the rounding,
would differ from run to run.
"""

import torch

from common.layers import at_least_float32
from common.layers import rms_norm as rms_norm_reference
from step04_tensor_parallel.linear import hand_over
from step08_5d.kernels.launching import ceil_div, next_power_of_two, processors, tl, triton, warps_for, wide_type

FEWEST_ROWS = 4  # of a program in the backward. With more, few rows would keep few multiprocessors busy


def add_rms_norm_reference(x, residual, weight, eps):
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


@triton.jit
def _forward_kernel(
    x, residual, weight, normed, total, rows, size,
    EPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program handles ROWS whole rows. They stay in registers between the sum of squares and the product."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < size)
    offsets = row.to(tl.int64) * size + column  # int64: rows * size may exceed 2^31
    w = tl.load(weight + column, mask=column < size, other=0.0).to(WIDE)  # issued now, needed after the sum
    y = tl.load(x + offsets, mask=inside, other=0.0).to(WIDE)
    if residual is not None:
        y += tl.load(residual + offsets, mask=inside, other=0.0).to(WIDE)
        stored = y.to(total.dtype.element_ty)
        tl.store(total + offsets, stored, mask=inside)
        y = stored.to(WIDE)  # the backward knows only what was stored, so the norm is that of the rounded sum
    y *= 1 / tl.sqrt(tl.sum(y * y, axis=1, keep_dims=True) / size + EPS)
    tl.store(normed + offsets, (y * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    total, weight, d_normed, d_total, dx, partial_sums, rows, size,
    EPS: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With y = total / rms and g = d_normed * weight: dx = (g - y * mean(g * y)) / rms, d_weight = sum(d_normed * y).

    A program handles every num_programs-th block of rows, so that there are few partial sums. It must read `total`
    anyway, so it computes 1/rms again, and the forward saves nothing of its own. If rows are too long for the registers
    of a multiprocessor, each program computes only a PART of their columns, and reads those once more from its cache.
    """
    column = tl.arange(0, BLOCK)[None, :]
    own = tl.program_id(1) * PART + tl.arange(0, PART)[None, :]
    w = tl.load(weight + own, mask=own < size, other=0.0).to(WIDE)
    d_weight = tl.full((ROWS, PART), 0.0, WIDE)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < size)
        start = row.to(tl.int64) * size
        offsets = start + column
        y = tl.load(total + offsets, mask=inside, other=0.0).to(WIDE)
        d = tl.load(d_normed + offsets, mask=inside, other=0.0).to(WIDE)
        g = d * w if PART == BLOCK else d * tl.load(weight + column, mask=column < size, other=0.0).to(WIDE)
        inverse_rms = 1 / tl.sqrt(tl.sum(y * y, axis=1, keep_dims=True) / size + EPS)
        mean = tl.sum(g * y, axis=1, keep_dims=True) * inverse_rms / size
        if PART < BLOCK:
            inside = (row < rows) & (own < size)
            offsets = start + own
            y = tl.load(total + offsets, mask=inside, other=0.0).to(WIDE)
            d = tl.load(d_normed + offsets, mask=inside, other=0.0).to(WIDE)
            g = d * w
        y *= inverse_rms
        d_weight += d * y
        g = (g - y * mean) * inverse_rms
        if d_total is not None:  # the gradient of x + residual as the residual stream goes on
            stream = tl.load(d_total + offsets, mask=inside, other=0.0).to(WIDE)
            g += stream
        tl.store(dx + offsets, g.to(dx.dtype.element_ty), mask=inside)
    sums = partial_sums + tl.program_id(0) * size + own
    tl.store(sums, tl.sum(d_weight, axis=0, keep_dims=True), mask=own < size)


def _blocks(size: int, elements: int) -> dict[str, int]:
    """Whole rows, several of them as long as they have together no more than so many elements."""
    block = next_power_of_two(size)
    rows = max(1, elements // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps_for(rows * block)}


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        x, size = x.contiguous(), x.shape[-1]
        residual = None if residual is None else residual.contiguous()
        normed, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        blocks, wide = _blocks(size, 1024), wide_type(x.dtype)
        if x.numel():
            grid, rows = (ceil_div(x.numel() // size, blocks["ROWS"]),), x.numel() // size
            _forward_kernel[grid](x, residual, weight, normed, total, rows, size, eps, wide, **blocks)
        ctx.save_for_backward(total)
        ctx.weight, ctx.eps = weight, eps
        ctx.set_materialize_grads(False)  # no zeros in memory for an output that nobody used
        return normed if residual is None else (normed, total)

    @staticmethod
    def backward(ctx, d_normed, d_total=None):
        if d_normed is None:
            return d_total, d_total, None, None
        (total,), weight, d_normed = ctx.saved_tensors, ctx.weight, d_normed.contiguous()
        d_total = None if d_total is None else d_total.contiguous()
        dx, size = torch.empty_like(total), total.shape[-1]
        blocks, wide, rows = _blocks(size, 4096), wide_type(total.dtype), total.numel() // size
        # As many programs as live at once: with 64 of 65,536 registers for a thread, these are 32 warps
        part, at_once = min(blocks["BLOCK"], 8192), processors(total.device) * 32 // blocks["num_warps"]
        parts = blocks["BLOCK"] // part
        programs = min(ceil_div(rows, max(blocks["ROWS"], FEWEST_ROWS)), ceil_div(at_once, parts))
        sums = torch.empty(programs, size, dtype=at_least_float32(total.dtype), device=total.device)
        if programs:
            _backward_kernel[programs, parts](
                total, weight, d_normed, d_total, dx, sums, rows, size, ctx.eps, wide, part, **blocks
            )  # fmt: skip
        total = sums.sum(0)
        d_weight = hand_over(weight, total, total, lambda done, _: done)  # whoever takes it gets it unrounded
        d_weight = d_weight.to(weight.dtype) if d_weight is not None else None
        return dx, dx if ctx.needs_input_grad[1] else None, d_weight, None


def rms_norm(x, weight, eps):
    """x (..., size), weight (size,) of one type -> (..., size)."""
    return _AddRMSNorm.apply(x, None, weight, eps)


def add_rms_norm(x, residual, weight, eps):
    """x and residual (..., size), weight (size,) of one type -> rms_norm(x + residual), x + residual."""
    return _AddRMSNorm.apply(x, residual, weight, eps)
