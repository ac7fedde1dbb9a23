"""Rotary position embedding (Su et al., arXiv:2104.09864) of the queries and the keys in one launch.

Elements i and i + d/2 of a head are the coordinates of a point, which is turned by the angle of its position:

    first' = first * cos - second * sin,   second' = second * cos + first * sin

The backward turns the gradient back, by the same angle in the other direction. It needs no q and no k, so the two
tables, which all layers share, are all that is kept for it.

The kernel reads and writes each element once: 4 bytes in bfloat16, forward as well as backward, which is the least
possible. Eager operations move 36 bytes per element in the forward and 46 in the backward (a test counts them): half a
dozen intermediate results are written and read again, most of them in float32. (The reference is `rotate` of
common/model.py.)
"""

import torch

from step08_5d.kernels.launching import next_power_of_two, tl, triton, warps_for


@triton.jit
def _rotate_heads(x, out, head_stride, heads, half, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr):
    """All heads of one token; `x` and `out` point to its first head."""
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    offsets = head.to(tl.int64) * head_stride + pair
    first = tl.load(x + offsets, mask=inside, other=0.0).to(cos.dtype)
    second = tl.load(x + offsets + half, mask=inside, other=0.0).to(cos.dtype)
    tl.store(out + offsets, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + offsets + half, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_kernel(
    q, k, q_out, k_out, cos, sin, q_strides, k_strides, seq, q_heads, k_heads, half,
    INVERSE: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A program handles one token: its angles are read once, for all heads of q and of k."""
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // seq, token % seq
    pair = tl.arange(0, HALF)[None, :]
    row = position * 2 * half + pair  # both halves of a table's row are the same
    c = tl.load(cos + row, mask=pair < half, other=0.0)
    s = tl.load(sin + row, mask=pair < half, other=0.0)
    if INVERSE:
        s = -s
    place = batch * q_strides[0] + position * q_strides[2]
    _rotate_heads(q + place, q_out + place, q_strides[1], q_heads, half, c, s, Q_HEADS, HALF)
    place = batch * k_strides[0] + position * k_strides[2]
    _rotate_heads(k + place, k_out + place, k_strides[1], k_heads, half, c, s, K_HEADS, HALF)


def _with_room(x):
    """x and an empty tensor with the same strides.

    In the model x is a transposed view of what a linear layer wrote, (batch, seq, heads, d): the heads of a token lie
    side by side. Making that contiguous would move all bytes once more, so the kernel takes the strides as they are.
    """
    out = torch.empty_like(x)  # has the strides of x if x has no gaps
    if out.stride() != x.stride() or x.stride(-1) != 1:
        x = x.contiguous()
        out = torch.empty_like(x)
    return x, out


def _launch(q, k, cos, sin, inverse: bool):
    (q, q_out), (k, k_out) = _with_room(q), _with_room(k)
    batch, q_heads, seq, width = q.shape
    k_heads, blocks = k.shape[1], [next_power_of_two(n) for n in (q_heads, k.shape[1], width // 2)]
    if batch * seq:
        _rotary_kernel[batch * seq,](
            q, k, q_out, k_out, cos.contiguous(), sin.contiguous(), q.stride(), k.stride(), seq, q_heads, k_heads,
            width // 2, inverse, *blocks, num_warps=warps_for(blocks[0] * blocks[2]),
        )  # fmt: skip
    return q_out, k_out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _launch(q, k, cos, sin, inverse=False)

    @staticmethod
    def backward(ctx, dq, dk):
        return *_launch(dq, dk, *ctx.saved_tensors, inverse=True), None, None


def rotary(q, k, cos, sin):
    """q (batch, heads, seq, d), k (batch, kv_heads, seq, d), cos and sin (seq, d) of `rope_tables` -> q and k, turned.

    They are computed in the type of the tables.
    """
    return _Rotary.apply(q, k, cos, sin)
