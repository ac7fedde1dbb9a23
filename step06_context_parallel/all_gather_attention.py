"""All-gather attention: every rank fetches the keys and values of all ranks at once (Llama 3, arXiv:2407.21783, section
3.3.2).

It is simpler than the ring, and cheap where several query heads share one key/value head. But all keys and values are
in memory at once, and only the first block, that of a rank's own, is computed while the others arrive. In the backward
they are gathered again, and a reduce-scatter sums their gradients.

`ring_attention.py` does the same with messages between neighbors. Compare the two.
"""

import torch
from torch import Tensor

from common import collectives
from common.collectives import Work
from common.group import Group
from step06_context_parallel.attention_block import KERNELS, AttentionGradients, MergedAttention, NaiveKernels
from step06_context_parallel.sequence_layouts import AttentionPlan, Documents, layout_of


class AllGatherAttention(torch.autograd.Function):
    """Attention of q (batch, heads, seq/cp, d) to k and v (batch, kv_heads, seq/cp, d) of all ranks of the group."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, cp: Group, kernels: NaiveKernels):
        k, v = k.contiguous(), v.contiguous()
        merged = MergedAttention(q, kernels)
        gathered, gathering = start_gather([k, v], cp)
        for source in own_first(cp):
            held = [k, v] if source == cp.rank else [each[source] for each in gathered]
            for block in plan.blocks[source]:
                merged.add(block, *held)
            for work in gathering:  # behind this rank's own block all has arrived, and later these waits return at once
                work.wait()
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.plan, ctx.cp, ctx.kernels = plan, cp, kernels
        return out

    @staticmethod
    def backward(ctx, gradient):
        (q, k, v, out, lse), plan, cp = ctx.saved_tensors, ctx.plan, ctx.cp
        gradients = AttentionGradients(gradient, q, out, lse, ctx.kernels)
        gathered, gathering = start_gather([k, v], cp)
        sums = [torch.zeros_like(each, dtype=lse.dtype) for each in gathered]  # (cp, batch, kv_heads, seq/cp, d)
        for source in own_first(cp):
            held = [k, v] if source == cp.rank else [each[source] for each in gathered]
            for block in plan.blocks[source]:
                gradients.add(block, *held, *(each[source] for each in sums))
            for work in gathering:
                work.wait()
        home = [torch.empty_like(each, dtype=lse.dtype) for each in (k, v)]
        for total, parts in zip(home, sums, strict=True):
            collectives.reduce_scatter(total, parts, cp)
        return gradients.dq.to(q.dtype), *(each.to(q.dtype) for each in home), None, None, None


def all_gather_attention(
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

    Arguments, result and errors are those of `ring_attention`.
    """
    plan = layout_of(q, k, v, group.size, split, documents, causal).plan(group.rank)
    return AllGatherAttention.apply(q, k, v, plan, group, kernels)


def own_first(cp: Group) -> list[int]:
    """The ranks of the group in the order in which their keys are used: first this one, as its own are at hand."""
    return [(cp.rank - distance) % cp.size for distance in range(cp.size)]


def start_gather(tensors: list[Tensor], cp: Group) -> tuple[list[Tensor], list[Work]]:
    """Start to gather each tensor (...) of all ranks of the group: (cp, ...)."""
    gathered = [each.new_empty(cp.size, *each.shape) for each in tensors]
    works = [collectives.all_gather(*pair, cp, async_op=True) for pair in zip(gathered, tensors, strict=True)]
    return gathered, works
