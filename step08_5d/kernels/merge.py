"""The attention to one more block of keys, merged into that of the blocks before it: one pass over the output.

    total = log(exp(lse_so_far) + exp(lse))
    out_so_far = exp(lse_so_far - total) * out_so_far + exp(lse - total) * out,   lse_so_far = total

For one element of the output, float32 so far and bfloat16 of the block, that is at least 10 bytes: 4 and 2 are read, 4
are written. Eager operations move 27 (a test counts them).
"""

from torch import Tensor

from step06_context_parallel.attention_block import KERNELS
from step08_5d.kernels.flash_attention import head_of
from step08_5d.kernels.launching import ceil_div, next_power_of_two, tl, triton, warps_for, wide_type
from step08_5d.kernels.tiles import load_rows, store_rows


def merge_reference(out_so_far: Tensor, lse_so_far: Tensor, out: Tensor, lse: Tensor) -> None:
    """The same as `merge`, in several passes."""
    KERNELS["naive"].merge(out_so_far, lse_so_far, out, lse)


@triton.jit
def _merge_kernel(
    out_so_far, lse_so_far, out, lse, so_far_strides, lse_so_far_strides, out_strides, lse_strides, heads, queries,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program handles some queries of one head."""
    first = tl.program_id(0) * ROWS
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = first + tl.arange(0, ROWS)
    inside = rows < queries
    out_so_far = head_of(out_so_far, so_far_strides, sample, head)
    lse_so_far = head_of(lse_so_far, lse_so_far_strides, sample, head) + rows
    before = tl.load(lse_so_far, mask=inside, other=0.0)
    added = tl.load(head_of(lse, lse_strides, sample, head) + rows, mask=inside, other=0.0)
    largest = tl.maximum(before, added)
    total = largest + tl.log(tl.exp(before - largest) + tl.exp(added - largest))
    kept = load_rows(out_so_far, so_far_strides[2], first, queries, ROWS, WIDTH, PADDED)
    block = load_rows(head_of(out, out_strides, sample, head), out_strides[2], first, queries, ROWS, WIDTH, PADDED)
    merged = kept * tl.exp(before - total)[:, None] + block.to(WIDE) * tl.exp(added - total)[:, None]
    store_rows(merged, out_so_far, so_far_strides[2], first, queries, ROWS, WIDTH, PADDED)
    tl.store(lse_so_far, total, mask=inside)


def merge(out_so_far: Tensor, lse_so_far: Tensor, out: Tensor, lse: Tensor) -> None:
    """Add a block's output (batch, heads, n, d) and log-sum-exp (batch, heads, n) to those so far, in place.

    Those so far have at least float32, and before the first block they are 0 and -inf. All may be views, as long as the
    last dimension is dense.
    """
    batch, heads, queries, width = out.shape
    padded = next_power_of_two(width)
    rows = max(1, 2048 // padded)
    if any(each.stride(-1) != 1 for each in (out_so_far, lse_so_far, out, lse)):
        raise ValueError("the last dimension of what is merged is dense")
    _merge_kernel[ceil_div(queries, rows), batch * heads](
        *(out_so_far, lse_so_far, out, lse, *(each.stride() for each in (out_so_far, lse_so_far, out, lse))),
        *(heads, queries, width, padded, rows, wide_type(out_so_far.dtype)),
        num_warps=warps_for(rows * padded),
    )
