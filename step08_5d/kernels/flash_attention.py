"""Attention without stored scores: FlashAttention-2 (Dao, arXiv:2307.08691), as a block of step 6's ring attention.

The naive attention writes n x m scores to memory, reads them for the softmax, writes the probabilities and reads those
for the product with v. Here a program keeps a tile of queries and walks along the keys. From one tile of keys to the
next it carries, for each query, the largest score so far, the sum of exponentials and the weighted sum of values, both
relative to that largest score. When a larger one comes, both are rescaled: the *online softmax* (Milakov and
Gimelshein, arXiv:1805.02867). The backward computes the scores once more, from q, k and the log-sum-exp.

For n queries and m keys, h query heads and g K/V heads of width d, in each of b samples:
  FLOPs   forward 4 b h n m d, and a causal block half of that. The backward has 14 b h n m d: one kernel computes dq,
          another dk and dv, and both need the probabilities and their gradients, so that 4 of the 14 are done twice.
          In return every sum has one owner and one order: no atomics, and two runs agree bit for bit
  bytes   at least those of q, k, v and out, (2 h n + 2 g m) b d numbers, and of the log-sum-exp. In the backward also
          those of the gradient, dq, dk and dv. Every tile of queries reads k and v again, but from the L2 cache
Tiles that lie entirely in the future are skipped, and those entirely in the past need no mask. The query heads of a
group read the same K/V head, which is never repeated in memory.

Programs start in order, the heads of a tile first. In a causal block some tiles have up to n / ROWS times the work of
others, and those go first, in all heads: what comes last is short. (Head by head, a long one would start last: with
4,096 tokens and 8 heads of keys, 37 % of an H100 would be idle in the kernel of dk and dv, *predicted*.)
"""

import torch
from torch import Tensor

from common.layers import at_least_float32
from step06_context_parallel.attention_block import KERNELS
from step08_5d.kernels.launching import HAS_TRITON, capability, ceil_div, next_power_of_two, tl, triton, wide_type
from step08_5d.kernels.tiles import load_rows, multiply_add, store_rows

WIDEST_HEAD = 256
LOG2_E = tl.constexpr(1.4426950408889634) if HAS_TRITON else None  # GPUs compute 2^x: exp(x) = 2^(x log2 e)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The same as `attend`, with stored scores."""
    return KERNELS["naive"].attend(q, k, v, causal)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def visible(rows, columns, keys, CAUSAL: tl.constexpr):
    """Which scores of a tile (rows, columns) count: those of keys that exist and, if causal, do not come later."""
    inside = columns < keys
    return (columns <= rows) & inside if CAUSAL else inside


@triton.jit
def _rescaling(before, now):
    """What turns sums relative to the largest score `before` into sums relative to `now` (both are times log2 e)."""
    return tl.exp2(before - now)


@triton.jit
def keys_for(first, keys, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """For a tile of queries: all keys in tiles before the first result are visible, none from the second result on."""
    if CAUSAL:
        unmasked, end = (first + 1) // COLUMNS * COLUMNS, tl.minimum(first + ROWS, keys)
    else:
        unmasked, end = keys // COLUMNS * COLUMNS, keys
    return unmasked, end


@triton.jit
def head_of(tensor, strides, sample, head):
    """A pointer to the first row of one head, in a tensor (batch, heads, rows, d) with these strides."""
    return tensor + tl.cast(sample, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def _forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, group, queries, keys, SCALE: tl.constexpr,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    head, first, sample = tl.program_id(0), (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS, tl.program_id(2)
    k, v = head_of(k, k_strides, sample, head // group), head_of(v, v_strides, sample, head // group)
    q_tile = load_rows(head_of(q, q_strides, sample, head), q_strides[2], first, queries, ROWS, WIDTH, PADDED)
    rows = first + tl.arange(0, ROWS)
    largest = tl.full((ROWS,), -float("inf"), WIDE)
    total = tl.zeros((ROWS,), WIDE)
    values = tl.zeros((ROWS, PADDED), WIDE)
    unmasked, end = keys_for(first, keys, CAUSAL, ROWS, COLUMNS)
    for start in range(0, end, COLUMNS):  # with a loop of its own for masked tiles, Hopper would wait for every product
        k_tile = load_rows(k, k_strides[2], start, keys, COLUMNS, WIDTH, PADDED)
        scores = multiply_add(q_tile, tl.trans(k_tile), tl.zeros((ROWS, COLUMNS), WIDE))
        if start >= unmasked:
            columns = start + tl.arange(0, COLUMNS)
            scores = tl.where(visible(rows[:, None], columns[None, :], keys, CAUSAL), scores, -float("inf"))
        # Never -inf: key 0, in the first tile, is visible to every query
        now = tl.maximum(largest, tl.max(scores, 1) * (SCALE * LOG2_E))
        exponentials = tl.exp2(scores * (SCALE * LOG2_E) - now[:, None])
        rescaling = _rescaling(largest, now)
        total = total * rescaling + tl.sum(exponentials, 1)
        v_tile = load_rows(v, v_strides[2], start, keys, COLUMNS, WIDTH, PADDED)
        values = multiply_add(exponentials.to(v_tile.dtype), v_tile, values * rescaling[:, None])
        largest = now
    out = head_of(out, out_strides, sample, head)
    store_rows(values / total[:, None], out, out_strides[2], first, queries, ROWS, WIDTH, PADDED)
    lse += (sample * tl.num_programs(0) + head).to(tl.int64) * queries
    tl.store(lse + rows, (largest + tl.log2(total)) / LOG2_E, mask=rows < queries)


# ---- launches --------------------------------------------------------------------------------------------------------


# By padded width: queries and keys in a tile, warps of a program, loads of a loop in flight; forward, dq, dk and dv.
# The larger the tile that a program keeps, the less often the rest is read. But the tile must fit into registers and,
# with what is in flight, into shared memory: `python -m step08_5d.kernels.compiled` shows what is left for others, and
# on a GPU `python -m step08_5d.kernels.tune` what is fastest there.
# The products of Hopper and Blackwell read their operands from shared memory, those of other cards from registers
TILES = {
    64: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
    128: ((128, 64, 8, 3), (64, 64, 4, 2), (32, 128, 8, 2)),
    256: ((128, 32, 8, 2), (128, 32, 8, 2), (32, 64, 8, 1)),  # 64 rows of a product at least, or it is an older one
}
TILES_IN_REGISTERS = {  # they have less shared memory, too: sm_86, sm_89 and sm_120 have 99 KiB
    64: ((128, 64, 8, 3), (64, 32, 4, 2), (16, 64, 8, 2)),
    128: ((128, 32, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2)),
    256: ((64, 32, 8, 2), (32, 32, 4, 2), (16, 64, 8, 1)),
}
PRECISE_TILES = {64: 3 * [(32, 32, 4, 2)], 256: 3 * [(16, 16, 4, 1)]}  # of float32 and float64


def table_of(q: Tensor) -> dict[int, tuple]:
    """Return the tiles for tensors like q, on its device."""
    narrow = TILES if capability(q.device) // 10 in (9, 10) else TILES_IN_REGISTERS
    return narrow if q.element_size() == 2 else PRECISE_TILES


def tile_sizes(q: Tensor, kernel: int) -> dict[str, int]:
    """Return the entry for forward (0), dq (1), or dk and dv (2), as arguments of a launch."""
    tiles = table_of(q)
    width = min(each for each in tiles if each >= q.shape[-1])
    return dict(zip(("ROWS", "COLUMNS", "num_warps", "num_stages"), tiles[width][kernel], strict=True))


def constants(q: Tensor, causal: bool) -> dict:
    """What all three kernels know when they are compiled."""
    width = q.shape[-1]
    if width > WIDEST_HEAD:
        raise ValueError(f"the attention kernels take heads of width {WIDEST_HEAD} at most, not {width}")
    padded = max(16, next_power_of_two(width))
    return {"SCALE": width**-0.5, "CAUSAL": causal, "WIDTH": width, "PADDED": padded, "WIDE": wide_type(q.dtype)}


def with_dense_rows(*tensors: Tensor) -> list[Tensor]:
    """The same tensors, copied if the numbers of a row do not lie side by side."""
    return [each if each.stride(-1) == 1 else each.contiguous() for each in tensors]


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return softmax(q k' / sqrt(d)) v (batch, heads, n, d), and the log-sum-exp of the scores (batch, heads, n).

    The log-sum-exp has at least float32. q (batch, heads, n, d), k and v (batch, kv_heads, m, d) may be views; a causal
    block has n = m. Raises ValueError for heads that are too wide.
    """
    q, k, v = with_dense_rows(q, k, v)
    batch, heads, queries, _ = q.shape
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=at_least_float32(q.dtype), device=q.device)
    tile = tile_sizes(q, 0)
    _forward_kernel[heads, ceil_div(queries, tile["ROWS"]), batch](
        *(q, k, v, out, lse),
        *(each.stride() for each in (q, k, v, out)),
        *(heads // k.shape[1], queries, k.shape[2]),
        **constants(q, causal),
        **tile,
    )
    return out, lse
