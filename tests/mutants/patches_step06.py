"""Known-wrong variants of context parallelism. The suite must reject every one of them.

The first train something else; those below train the same, and send, keep, compute or wait for more than they have to.
"""

from types import SimpleNamespace

import torch

import step06_context_parallel.train as step06
from common import collectives
from common.collectives import Work
from common.data.batches import Batches
from step03_zero.unit import Unit
from step06_context_parallel import (
    all_gather_attention,
    attention_block,
    context_parallel,
    ring_attention,
    ulysses_attention,
)
from step06_context_parallel.attention_block import AttentionGradients
from step06_context_parallel.layouts import Layout
from tests.mutants import Mutants

MUTANTS = Mutants()
take_part, plan, attention = step06.take_part, Layout.plan, context_parallel.attention
attend, attend_backward = attention_block.attend, attention_block.attend_backward
pass_on, pass_on_sums, add = ring_attention.pass_on, ring_attention.pass_on_sums, AttentionGradients.add

# ---- wrong results ---------------------------------------------------------------------------------------------------


@MUTANTS.replaces("positions not permuted", step06, "take_part")
def _(tokens, targets, config, mesh, end):
    """Rotary embeddings get the positions of a contiguous part, whatever the split."""
    mine, labels, positions, *documents = take_part(tokens, targets, config, mesh, end)
    return mine, labels, torch.arange(len(positions)) + mesh.cp.rank * len(positions), *documents


@MUTANTS.replaces("positions from zero", step06, "take_part")
def _(tokens, targets, config, mesh, end):
    """Every rank counts its own tokens."""
    mine, labels, positions, *documents = take_part(tokens, targets, config, mesh, end)
    return mine, labels, torch.arange(len(positions)), *documents


@MUTANTS.replaces("boundary labels lost", step06, "take_part")
def _(tokens, targets, config, mesh, end):
    """Every rank shifts its own tokens: the last one of a chunk gets no label from the next chunk."""
    mine, _, *rest = take_part(tokens, targets, config, mesh, end)
    return mine, mine.roll(-1, 1), *rest


@MUTANTS.replaces("loss averaged over a rank's tokens", Batches, "target_tokens")
@property
def _(self):
    """Each rank's loss is the mean over its own tokens, and gradients are summed: they are cp times too large."""
    return self.global_batch * self.seq_len // torch.distributed.get_world_size()


# Gradients are not reduced, because there are no other samples to reduce over: --dp is 1
@MUTANTS.replaces("gradients not reduced over cp", Unit, "sum_over_replicas")
def _(self, async_op):
    self.summing = Work()


@MUTANTS.replaces("merged without rescaling", attention_block, "merge")
def _(out_so_far, lse_so_far, out, lse, fused):
    """What was there before keeps its weight, although the sum of exponentials has grown."""
    total = torch.logaddexp(lse_so_far, lse)
    out_so_far.add_(out * (lse - total).exp().unsqueeze(-1))
    lse_so_far.copy_(total)


@MUTANTS.replaces("statistics of the block", attention_block, "attend_backward")
def _(gradient, q, k, v, out, lse, *rest):
    """The backward of a block takes its own output and log-sum-exp, not those of the whole row."""
    return attend_backward(gradient, q, k, v, *attend(q, k, v, *rest), *rest)


@MUTANTS.replaces("causal block taken for full", attention_block, "attend")
def _(q, k, v, causal, fused):
    """Queries see the future within their own chunk."""
    return attend(q, k, v, False, fused)


@MUTANTS.replaces("causal block taken for full", attention_block, "attend_backward")
def _(gradient, q, k, v, out, lse, causal, fused):
    return attend_backward(gradient, q, k, v, out, lse, False, fused)


@MUTANTS.replaces("dK/dV one hop short", ring_attention, "pass_on_sums")
def _(sums, home, hop, plan, cp):
    """The last rank that adds to the sums keeps them: they belong to the next one."""
    if hop < cp.size - 1:
        return pass_on_sums(sums, home, hop, plan, cp)
    for mine, total in zip(home, sums, strict=True):
        mine.copy_(total)
    return [], Work()


@MUTANTS.replaces("dK/dV of the own queries only", all_gather_attention, "collectives")
class _:
    """Every rank keeps the gradients of its own keys that its own queries have, and drops those of other keys."""

    all_gather = staticmethod(collectives.all_gather)

    @staticmethod
    def reduce_scatter(output, parts, group):
        output.copy_(parts[group.rank])


@MUTANTS.replaces("Ulysses in rank order", ulysses_attention, "_places")
def _(layout, device):
    """The whole sequence stays in the order of the ranks, which the causal mask takes for that of the tokens."""
    return torch.arange(layout.seq_len)


@MUTANTS.replaces("documents of one rank", Layout, "plan")
def _(self, rank):
    """Documents are masked among the tokens of a rank, and not between ranks."""
    whole, mine = plan(self._replace(documents=None), rank), plan(self, rank)
    return whole._replace(blocks=(*whole.blocks[:rank], mine.blocks[rank], *whole.blocks[rank + 1 :]))


# ---- right results at a higher price ---------------------------------------------------------------------------------


@MUTANTS.replaces("K/V repeated before they are sent", context_parallel, "attention")
def _(q, k, v, *documents, **options):
    """Each query head has its own copy of the keys and values before they travel."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    return attention(q, k, v, *documents, **options)


# The next keys and values have arrived before a block is computed
at_once = SimpleNamespace(exchange=lambda sends, receives, cp, async_op: collectives.exchange(sends, receives, cp))
MUTANTS.replaces("ring waits before it computes", ring_attention, "collectives")(at_once)


@MUTANTS.replaces("keys travel all the way", Layout, "plan")
def _(self, rank):
    """Every rank passes on all keys, although no query further on may see them."""
    return plan(self, rank)._replace(reach=(self.ranks - 1,) * self.ranks)


everything = []  # that arrived since the first block of a layer


@MUTANTS.replaces("all keys of a ring kept", ring_attention, "pass_on")
def _(kv, hop, plan, cp, like):
    """A list keeps what has arrived until the next layer."""
    if hop == 0:
        everything.clear()
    arriving, work = pass_on(kv, hop, plan, cp, like)
    everything.extend(arriving)
    return arriving, work


@MUTANTS.replaces("causal blocks in squares", AttentionGradients, "add")
def _(self, block, k, v, dk, dv):
    """In the backward, a causal block costs what a full one does, as it would under a mask."""
    gradient, q, out, lse = map(block.rows_of, (self.gradient, self.q, self.out, self.lse))
    keys = block.columns_of(k), block.columns_of(v)
    attention_block.attend_backward(gradient, q, *keys, out, lse, False, self.fused)  # a result that nobody needs
    add(self, block, k, v, dk, dv)
