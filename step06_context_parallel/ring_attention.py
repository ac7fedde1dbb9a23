"""Ring attention: keys and values travel round the ranks, and each rank computes with those it has (Liu et al.,
arXiv:2310.01889).

Every rank keeps its queries. In hop h it computes with the keys and values of the rank h places before it, while the
next ones arrive in a second buffer. In the backward they travel again, and the sums of their gradients follow one hop
behind: each rank adds its part to the sums that have arrived and passes them on, and the last one sends them home.
What no rank further on needs is not passed on; `AttentionPlan.reach` says how far.

In latent attention something smaller travels, of which each rank makes keys and values: see `expansion.py`. Below, `kv`
is what travels, by default K and V themselves.

`all_gather_attention.py` does the same with one collective instead of the ring. Compare the two.
"""

import torch
from torch import Tensor

from common import collectives
from common.collectives import Work
from common.group import Group
from common.latent_attention import Expansion
from step06_context_parallel.attention_block import KERNELS, AttentionGradients, MergedAttention, NaiveKernels
from step06_context_parallel.expansion import expander
from step06_context_parallel.sequence_layouts import AttentionPlan, Documents, layout_of


class RingAttention(torch.autograd.Function):
    """Attention of q (batch, heads, seq/cp, d) to k and v (batch, kv_heads, seq/cp, d) of all ranks of the group."""

    @staticmethod
    def forward(ctx, q, k, v, plan: AttentionPlan, cp: Group, kernels: NaiveKernels, expansion=None, *_weights):
        k, v, keys = k.contiguous(), v.contiguous(), expander(expansion)
        merged, kv = MergedAttention(q, kernels, keys.value_width(v)), [k, v]
        for hop in range(cp.size):
            kv_arriving, kv_work = pass_on(kv, hop, plan, cp, like=[k, v])
            held = keys.expand(kv)
            for block in plan.blocks[source_of(hop, cp)]:
                merged.add(block, *held)
            kv_work.wait()
            kv = kv_arriving
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.plan, ctx.cp, ctx.kernels, ctx.expansion = plan, cp, kernels, expansion
        return out

    @staticmethod
    def backward(ctx, gradient):
        (q, k, v, out, lse), plan, cp, keys = ctx.saved_tensors, ctx.plan, ctx.cp, expander(ctx.expansion)
        gradients, kv = AttentionGradients(gradient, q, out, lse, ctx.kernels), [k, v]
        home = [torch.empty_like(each, dtype=lse.dtype) for each in kv]  # dk and dv, when all ranks have added theirs
        sums_arriving, sums_work = [], Work()  # nothing is in flight yet
        for hop in range(cp.size):
            kv_arriving, kv_work = pass_on(kv, hop, plan, cp, like=[k, v])
            held = keys.expand(kv)
            sums = [torch.zeros_like(each, dtype=lse.dtype) for each in held]
            for block in plan.blocks[source_of(hop, cp)]:
                gradients.add(block, *held, *sums)
            sums = keys.fold(kv, sums)
            sums_work.wait()
            add_up(sums, sums_arriving)
            sums_arriving, sums_work = pass_on_sums(sums, home, hop, plan, cp)
            kv_work.wait()
            kv = kv_arriving
        sums_work.wait()
        mine = gradients.dq, *home
        return *(each.to(q.dtype) for each in mine), None, None, None, None, *keys.weight_gradients()


def ring_attention(
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

    Every rank calls it with the queries, keys and values of its own tokens (see `token_positions`), and gets what these
    queries see, of the shape of q.

    Args:
        group: the ranks that share the sequences; `Group.of` makes it of any process group.
        split: which tokens a rank holds: zigzag, contiguous or striped.
        documents: of each sample, the positions in the whole sequence at which documents begin; the first is 0. Queries
            see only their own document.
        causal: queries see no key that comes after them.
        kernels: what computes one block.
        expansion: of latent attention. Then `k` are latents, and `v` rotated keys.

    Raises ValueError if shapes or types do not fit each other, or the split does not fit the sequence.
    """
    plan = layout_of(q, k, v, group.size, split, documents, causal, expansion is None).plan(group.rank)
    return RingAttention.apply(q, k, v, plan, group, kernels, expansion, *expander(expansion).weights)


def source_of(hop: int, cp: Group) -> int:
    """The rank whose keys and values this rank has in this hop."""
    return (cp.rank - hop) % cp.size


def pass_on(
    kv: list[Tensor], hop: int, plan: AttentionPlan, cp: Group, like: list[Tensor]
) -> tuple[list[Tensor], Work]:
    """Start to send the keys and values of this hop to the next rank, and to receive those of the next hop.

    Either may have no need to travel further. Returns the two tensors that arrive (or none), of the shapes of `like`,
    and the work to wait for.
    """
    sends, receives = [], []
    if hop < plan.reach[source_of(hop, cp)]:
        sends = [(each, (cp.rank + 1) % cp.size) for each in kv]
    if hop < plan.reach[source_of(hop + 1, cp)]:
        receives = [(torch.empty_like(each), (cp.rank - 1) % cp.size) for each in like]
    return [each for each, _ in receives], collectives.exchange(sends, receives, cp, async_op=True)


def add_up(sums: list[Tensor], arrived: list[Tensor]) -> None:
    """Add what has arrived, if anything has. In a function of its own, none of it outlives the hop in a variable."""
    for total, others in zip(sums, arrived, strict=bool(arrived)):
        total += others


def pass_on_sums(
    sums: list[Tensor], home: list[Tensor], hop: int, plan: AttentionPlan, cp: Group
) -> tuple[list[Tensor], Work]:
    """Start to send the sums of this hop to the next rank that adds to them or, after the last one, home.

    In the same way those of the next hop arrive, which are returned, and those of this rank's own keys and values, in
    `home`. Where keys were not passed on this far, there are no sums either: the list is empty. With 4 ranks, if all
    need all keys (a reach of 3), "dN to r" is: the sums for rank N's keys and values go to rank r.

               rank 0             rank 1             rank 2             rank 3
        hop 0  d0 to 1            d1 to 2            d2 to 3            d3 to 0
        hop 1  d3 to 1            d0 to 2            d1 to 3            d2 to 0
        hop 2  d2 to 1            d3 to 2            d0 to 3            d1 to 0
        hop 3  d1 to 1: home      d2 to 2: home      d3 to 3: home      d0 to 0: home

    With a reach of 1 (contiguous parts, short documents), hop 1 is the last one: "d3 to 3", "d0 to 0" and so on.
    """
    source, next_source = source_of(hop, cp), source_of(hop + 1, cp)
    to = (cp.rank + 1) % cp.size if hop < plan.reach[source] else source
    if to == cp.rank:  # in hop 0, if no other rank uses this rank's keys: the sums are complete, and at home
        for total, own in zip(home, sums, strict=True):
            total.copy_(own)
    sends = [(each, to) for each in sums if to != cp.rank]
    arriving = [torch.empty_like(each) for each in home] if hop < plan.reach[next_source] else []
    receives = [(each, (cp.rank - 1) % cp.size) for each in arriving]
    if hop > 0 and hop == plan.reach[cp.rank]:
        receives += [(each, (cp.rank + hop) % cp.size) for each in home]
    return arriving, collectives.exchange(sends, receives, cp, async_op=True)
