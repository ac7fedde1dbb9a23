"""The backward of FlashAttention, and attention as a function for autograd.

From q, k and the log-sum-exp of *all* keys, a tile of probabilities is p = exp(score - lse), whichever block it belongs
to. With it (Dao et al., arXiv:2205.14135, appendix B.2)

    dv = p' d_out      dp = d_out v'      ds = p (dp - delta)      dq = ds k / sqrt(d)      dk = ds' q / sqrt(d)

where delta, one number per query, is the sum of d_out * out. A dq sums over keys, dk and dv over queries, so that one
walk over the tiles cannot keep both in registers. FlashAttention-2 walks along the queries and adds to dq in memory,
with atomics; here each sum has a kernel of its own. FLOPs and bytes are counted in `flash_attention.py`.

A program for dk and dv has a tile of keys, and adds up the query heads that share them. Where K/V heads are few, as on
a rank of tensor parallelism, so would programs be. Then several of them divide the group's heads, and each leaves sums
in float32, 8 d bytes for a key, which are added up in a fixed order. There are no more of them than fill the GPU, so
that all sums together never take more than 5.25 tiles for each multiprocessor: 91 MB on an H100, with 128 keys of
width 128 in a tile. (Llama 3 8B on a rank of tp 4, with 4,096 tokens, has 33.6 MB of them.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from step06_context_parallel.attention_block import KERNELS
from step08_5d.kernels import flash_attention
from step08_5d.kernels.flash_attention import LOG2_E, attend, constants, head_of, keys_for, visible, with_dense_rows
from step08_5d.kernels.launching import ceil_div, processors, tl, triton
from step08_5d.kernels.tiles import load_rows, multiply_add, store_rows


def attend_backward_reference(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `attend_backward`, with stored scores."""
    return KERNELS["naive"].attend_backward(gradient, q, k, v, out, lse, causal)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _query_gradient_kernel(
    gradient, q, k, v, out, lse, delta, dq, gradient_strides, q_strides, k_strides, v_strides, out_strides, dq_strides,
    group, queries, keys, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries and, on the way, `delta`: what the backward of the softmax subtracts from a row."""
    head, first, sample = tl.program_id(0), (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS, tl.program_id(2)
    k, v = head_of(k, k_strides, sample, head // group), head_of(v, v_strides, sample, head // group)
    rows = first + tl.arange(0, ROWS)
    q_tile = load_rows(head_of(q, q_strides, sample, head), q_strides[2], first, queries, ROWS, WIDTH, PADDED)
    gradient = head_of(gradient, gradient_strides, sample, head)
    d_out = load_rows(gradient, gradient_strides[2], first, queries, ROWS, WIDTH, PADDED)
    out_tile = load_rows(head_of(out, out_strides, sample, head), out_strides[2], first, queries, ROWS, WIDTH, PADDED)
    of_row = (sample * tl.num_programs(0) + head).to(tl.int64) * queries + rows
    deltas = tl.sum(d_out.to(WIDE) * out_tile.to(WIDE), 1)
    tl.store(delta + of_row, deltas, mask=rows < queries)
    lses = tl.load(lse + of_row, mask=rows < queries, other=0.0) * LOG2_E
    sums = tl.zeros((ROWS, PADDED), WIDE)
    unmasked, end = keys_for(first, keys, CAUSAL, ROWS, COLUMNS)
    for start in range(0, end, COLUMNS):
        k_tile = load_rows(k, k_strides[2], start, keys, COLUMNS, WIDTH, PADDED)
        v_tile = load_rows(v, v_strides[2], start, keys, COLUMNS, WIDTH, PADDED)
        scores = multiply_add(q_tile, tl.trans(k_tile), tl.zeros((ROWS, COLUMNS), WIDE))
        if start >= unmasked:
            columns = start + tl.arange(0, COLUMNS)
            scores = tl.where(visible(rows[:, None], columns[None, :], keys, CAUSAL), scores, -float("inf"))
        p = tl.exp2(scores * (SCALE * LOG2_E) - lses[:, None])
        dp = multiply_add(d_out, tl.trans(v_tile), tl.zeros((ROWS, COLUMNS), WIDE))
        ds = p * (dp - deltas[:, None])
        sums = multiply_add(ds.to(k_tile.dtype), k_tile, sums)
    store_rows(sums * SCALE, head_of(dq, dq_strides, sample, head), dq_strides[2], first, queries, ROWS, WIDTH, PADDED)


@triton.jit
def _key_gradient_kernel(
    gradient, q, k, v, lse, delta, dk, dv, gradient_strides, q_strides, k_strides, v_strides, dk_strides, dv_strides,
    heads, group, share, queries, keys, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys: it walks along the queries of `share` of the heads that have this K/V head."""
    start, sample = tl.program_id(1) * COLUMNS, tl.program_id(2)  # the first keys are seen by the most queries
    parts = (group + share - 1) // share
    kv_head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    first_head, end_head = kv_head * group + part * share, kv_head * group + tl.minimum((part + 1) * share, group)
    k_tile = load_rows(head_of(k, k_strides, sample, kv_head), k_strides[2], start, keys, COLUMNS, WIDTH, PADDED)
    v_tile = load_rows(head_of(v, v_strides, sample, kv_head), v_strides[2], start, keys, COLUMNS, WIDTH, PADDED)
    columns = start + tl.arange(0, COLUMNS)
    dk_sums, dv_sums = tl.zeros((COLUMNS, PADDED), WIDE), tl.zeros((COLUMNS, PADDED), WIDE)
    # Queries before `begin` see none of these keys, those from `unmasked` on see all
    begin, unmasked = 0, 0
    if CAUSAL:
        begin = start // ROWS * ROWS
        unmasked = tl.minimum(tl.cdiv(start + COLUMNS - 1, ROWS) * ROWS, queries)
    for head in range(first_head, end_head):
        q_head, d_head = head_of(q, q_strides, sample, head), head_of(gradient, gradient_strides, sample, head)
        of_head = (sample * heads + head).to(tl.int64) * queries
        for first in range(begin, queries, ROWS):
            rows = first + tl.arange(0, ROWS)
            q_tile = load_rows(q_head, q_strides[2], first, queries, ROWS, WIDTH, PADDED)
            d_out = load_rows(d_head, gradient_strides[2], first, queries, ROWS, WIDTH, PADDED)
            # An infinite log-sum-exp makes the probabilities of queries that do not exist vanish
            lses = tl.load(lse + of_head + rows, mask=rows < queries, other=float("inf")) * LOG2_E
            deltas = tl.load(delta + of_head + rows, mask=rows < queries, other=0.0)
            # Everything is transposed here, (COLUMNS, ROWS), as the products with d_out and q need it
            scores = multiply_add(k_tile, tl.trans(q_tile), tl.zeros((COLUMNS, ROWS), WIDE))
            if first < unmasked:
                scores = tl.where(visible(rows[None, :], columns[:, None], keys, CAUSAL), scores, -float("inf"))
            p = tl.exp2(scores * (SCALE * LOG2_E) - lses[None, :])
            dv_sums = multiply_add(p.to(d_out.dtype), d_out, dv_sums)
            dp = multiply_add(v_tile, tl.trans(d_out), tl.zeros((COLUMNS, ROWS), WIDE))
            ds = p * (dp - deltas[None, :])
            dk_sums = multiply_add(ds.to(q_tile.dtype), q_tile, dk_sums)
    dk = head_of(dk, dk_strides, sample, tl.program_id(0))
    dv = head_of(dv, dv_strides, sample, tl.program_id(0))
    store_rows(dk_sums * SCALE, dk, dk_strides[2], start, keys, COLUMNS, WIDTH, PADDED)
    store_rows(dv_sums, dv, dv_strides[2], start, keys, COLUMNS, WIDTH, PADDED)


# ---- launches --------------------------------------------------------------------------------------------------------


def heads_of_program(group: int, programs: int, device: torch.device) -> int:
    """Return how many of the `group` query heads of a K/V head one program for dk and dv adds up.

    All of them, if so there are enough `programs`: about two for each multiprocessor, which has room for one at a time,
    since in a causal block they have half of the longest one's work on average.
    """
    parts = ceil_div(7 * processors(device), 4 * max(1, programs))
    return max(1, group // parts)


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's part of the gradients of q, k and v, in their types.

    `gradient`, `out` and `lse` are those of the attention over *all* keys, not of this block: see step 6.
    """
    gradient, q, k, v, out = with_dense_rows(gradient, q, k, v, out)
    lse = lse.contiguous()
    (batch, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k.shape
    delta, dq, dk, dv = (torch.empty_like(each) for each in (lse, q, k, v))
    group = heads // kv_heads
    tile = flash_attention.tile_sizes(q, 1)  # of dq, whose kernel runs first: it leaves `delta` for the other
    _query_gradient_kernel[heads, ceil_div(queries, tile["ROWS"]), batch](
        *(gradient, q, k, v, out, lse, delta, dq),
        *(each.stride() for each in (gradient, q, k, v, out, dq)),
        *(group, queries, keys),
        **constants(q, causal),
        **tile,
    )
    tile = flash_attention.tile_sizes(q, 2)
    tiles = ceil_div(keys, tile["COLUMNS"])
    share = heads_of_program(group, tiles * kv_heads * batch, q.device)
    parts = ceil_div(group, share)
    sums = dk, dv
    if parts > 1:
        sums = torch.empty(2, batch, kv_heads * parts, keys, width, dtype=lse.dtype, device=q.device)
    _key_gradient_kernel[kv_heads * parts, tiles, batch](
        *(gradient, q, k, v, lse, delta, *sums),
        *(each.stride() for each in (gradient, q, k, v, *sums)),
        *(heads, group, share, queries, keys),
        **constants(q, causal),
        **tile,
    )
    if parts > 1:
        for total, parts_of_it in zip((dk, dv), sums.unflatten(2, (kv_heads, parts)), strict=True):
            total.copy_(parts_of_it.sum(2))
    return dq, dk, dv


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, lse = attend(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, gradient):
        return *attend_backward(gradient, *ctx.saved_tensors, ctx.causal), None


def flash_attention_core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, as a `core` of `common.model.Attention`. The kernels want values as wide as keys."""
    narrower = k.shape[-1] - v.shape[-1]
    if not narrower:
        return _FlashAttention.apply(q, k, v, True)
    return _FlashAttention.apply(q, k, F.pad(v, (0, narrower)), True)[..., :-narrower]
