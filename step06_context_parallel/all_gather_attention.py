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
from common.latent_attention import Expansion
from step06_context_parallel.attention_block import KERNELS, AttentionGradients, MergedAttention, NaiveKernels
from step06_context_parallel.expansion import Themselves, expander
from step06_context_parallel.sequence_layouts import AttentionPlan, Documents, ScoreBlock, layout_of


class AllGatherAttention(torch.autograd.Function):
    """Attention of q (batch, heads, seq/cp, d) to k and v (batch, kv_heads, seq/cp, d) of all ranks of the group."""

    @staticmethod
    def forward(ctx, q, k, v, plan: AttentionPlan, cp: Group, kernels: NaiveKernels, expansion=None, *_weights):
        k, v, keys = k.contiguous(), v.contiguous(), expander(expansion)
        merged = MergedAttention(q, kernels, keys.value_width(v))
        gathered, gathering = start_gather([k, v], cp)
        for source in own_first(cp):
            held = [k, v] if source == cp.rank else [each[source] for each in gathered]
            held = keys.expand(held) if plan.blocks[source] else []
            for block in plan.blocks[source]:
                merged.add(block, *held)
            for work in gathering:  # behind this rank's own block all has arrived, and later these waits return at once
                work.wait()
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.plan, ctx.cp, ctx.kernels, ctx.expansion = plan, cp, kernels, expansion
        return out

    @staticmethod
    def backward(ctx, gradient):
        (q, k, v, out, lse), plan, cp, keys = ctx.saved_tensors, ctx.plan, ctx.cp, expander(ctx.expansion)
        gradients = AttentionGradients(gradient, q, out, lse, ctx.kernels)
        gathered, gathering = start_gather([k, v], cp)
        sums = [torch.zeros_like(each, dtype=lse.dtype) for each in gathered]  # (cp, batch, kv_heads, seq/cp, d)
        for source in own_first(cp):
            kv = [k, v] if source == cp.rank else [each[source] for each in gathered]
            _add_part(gradients, plan.blocks[source], keys, kv, [each[source] for each in sums])
            for work in gathering:
                work.wait()
        home = [torch.empty_like(each, dtype=lse.dtype) for each in (k, v)]
        for total, parts in zip(home, sums, strict=True):
            collectives.reduce_scatter(total, parts, cp)
        mine = gradients.dq, *home
        return *(each.to(q.dtype) for each in mine), None, None, None, None, *keys.weight_gradients()


def _add_part(gradients: AttentionGradients, blocks: list[ScoreBlock], keys: Themselves, kv: list, sums: list) -> None:
    """Add the gradients that the blocks with one rank's keys cause, to `gradients` and to the sums of what it sent."""
    if not blocks:
        return
    held = keys.expand(kv)
    own = sums if held is kv else [torch.zeros_like(each, dtype=sums[0].dtype) for each in held]
    for block in blocks:
        gradients.add(block, *held, *own)
    if held is not kv:
        for total, part in zip(sums, keys.fold(kv, own), strict=True):
            total += part


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    split: str = "zigzag",
    documents: Documents | None = None,
    causal: bool = True,
    kernels: NaiveKernels = KERNELS["fused"],
    expansion: Expansion | None = None,
) -> Tensor:
    """Attention of q (batch, heads, seq/cp, d) to k and v (batch, kv_heads, seq/cp, d) of all ranks of the group.

    Arguments, result and errors are those of `ring_attention`.
    """
    plan = layout_of(q, k, v, group.size, split, documents, causal, expansion is None).plan(group.rank)
    return AllGatherAttention.apply(q, k, v, plan, group, kernels, expansion, *expander(expansion).weights)


def own_first(cp: Group) -> list[int]:
    """The ranks of the group in the order in which their keys are used: first this one, as its own are at hand."""
    return [(cp.rank - distance) % cp.size for distance in range(cp.size)]


def start_gather(tensors: list[Tensor], cp: Group) -> tuple[list[Tensor], list[Work]]:
    """Start to gather each tensor (...) of all ranks of the group: (cp, ...)."""
    gathered = [each.new_empty(cp.size, *each.shape) for each in tensors]
    works = [collectives.all_gather(*pair, cp, async_op=True) for pair in zip(gathered, tensors, strict=True)]
    return gathered, works
