"""Ulysses: an all-to-all turns parts of the sequence with all heads into the whole sequence with some of the heads
(Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509).

Attention treats every head on its own, so that each rank can run it without communication for heads/cp heads. A second
all-to-all brings the outputs back. There can be no more ranks than query heads. Where there are fewer key/value heads
than ranks, they are repeated first. For example, 4 heads and 8 tokens (zigzag) on 2 ranks:

              before                             after
    rank 0    heads 0 1 2 3 of tokens 0 1 6 7    heads 0 1 of tokens 0 1 6 7 2 3 4 5
    rank 1    heads 0 1 2 3 of tokens 2 3 4 5    heads 2 3 of tokens 0 1 6 7 2 3 4 5

The tokens are then in the order of the ranks, and are sorted for the causal mask.
"""

import torch
from torch import Tensor

from common import collectives
from common.group import Group
from step06_context_parallel.attention_block import KERNELS, NaiveKernels
from step06_context_parallel.ring_attention import RingAttention
from step06_context_parallel.sequence_layouts import Documents, layout_of, rank_order


class _AllToAll(torch.autograd.Function):
    """Part j of x (cp, ...) goes to rank j, and rank j's part for this rank comes back in its place."""

    @staticmethod
    def forward(ctx, x: Tensor, cp: Group):
        ctx.cp, received = cp, torch.empty_like(x, memory_format=torch.contiguous_format)
        collectives.all_to_all(received, x.contiguous(), cp)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return _AllToAll.apply(gradient, ctx.cp), None


def heads_to_sequence(x: Tensor, cp: Group) -> Tensor:
    """Give up heads for the whole sequence: (batch, heads, seq/cp, d) -> (batch, heads/cp, seq, d), in rank order."""
    parts = _AllToAll.apply(x.unflatten(1, (cp.size, -1)).movedim(1, 0), cp)  # (cp, batch, heads/cp, seq/cp, d)
    return parts.movedim(0, 2).flatten(2, 3)


def sequence_to_heads(x: Tensor, cp: Group) -> Tensor:
    """The way back: (batch, heads/cp, seq, d) -> (batch, heads, seq/cp, d)."""
    parts = _AllToAll.apply(x.unflatten(2, (cp.size, -1)).movedim(2, 0), cp)  # (cp, batch, heads/cp, seq/cp, d)
    return parts.movedim(0, 1).flatten(1, 2)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    split: str = "zigzag",
    documents: Documents | None = None,
    causal: bool = True,
    kernels: NaiveKernels = KERNELS["fused"],
) -> Tensor:
    """Attention of q (batch, heads, seq/cp, d) to k and v (batch, kv_heads, seq/cp, d) of all ranks of the group.

    Arguments, result and errors are those of `ring_attention`. Also raises ValueError if the ranks do not divide heads.
    """
    layout, heads, kv_heads = layout_of(q, k, v, group.size, split, documents, causal), q.shape[1], k.shape[1]
    if heads % group.size or kv_heads % group.size and group.size % kv_heads:
        raise ValueError(f"Ulysses: {group.size} ranks cannot divide {heads} heads of q and {kv_heads} of k and v")
    plan = layout._replace(ranks=1).plan(0)
    places = rank_order(split, layout.seq_len, group.size, q.device)
    order = places.argsort()
    k, v = (each.repeat_interleave(max(1, group.size // kv_heads), dim=1) for each in (k, v))
    q, k, v = (heads_to_sequence(each, group)[:, :, order] for each in (q, k, v))
    # Now this rank has all keys of its heads: the ring of one rank is attention without messages
    alone = Group(group.name, (group.ranks[group.rank],), 0)
    out = RingAttention.apply(q, k, v, plan, alone, kernels)
    return sequence_to_heads(out[:, :, places], group)
