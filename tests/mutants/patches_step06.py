"""Known-wrong variants of context parallelism. The suite must reject every one of them.

The first train something else; those below train the same, and send, keep, compute or wait for more than they have to.
"""

import torch

import step06_context_parallel.train as step06
from step01_single_gpu.data.batches import Batches
from step03_zero.unit import Unit
from step06_context_parallel import attention_block, context_parallel, ring_attention, ulysses_attention
from step06_context_parallel.all_gather_attention import AllGatherAttention
from step06_context_parallel.attention_block import AttentionGradients, MergedAttention
from step06_context_parallel.layouts import Layout
from step06_context_parallel.ring_attention import RingAttention
from tests.mutants import Mutants
from tests.mutants.patches_step03 import REPLICAS

MUTANTS = Mutants()
edits, replaces = MUTANTS.edits, MUTANTS.replaces
PART, COUNTED = "targets[:, mine], mine)", "torch.arange(len(mine))"

# ---- wrong results ---------------------------------------------------------------------------------------------------

# Rotary embeddings get the positions of a contiguous part, whatever the split; or every rank counts its own tokens
contiguous = f"targets[:, mine], {COUNTED} + mesh.cp.rank * len(mine))"
edits("positions not permuted", step06, "take_part", (PART, contiguous))
edits("positions from zero", step06, "take_part", (PART, f"targets[:, mine], {COUNTED})"))
# Every rank shifts its own tokens: the last one of a chunk gets no label from the next chunk
edits("boundary labels lost", step06, "take_part", (PART, "tokens[:, mine].roll(-1, 1), mine)"))
# Each rank's loss is the mean over its own tokens, and gradients are summed: they are cp times too large
own_mean = "self.seq_len", "self.seq_len // torch.distributed.get_world_size()"
edits("loss averaged over a rank's tokens", Batches, "target_tokens", own_mean)
# Gradients are not reduced, because there are no other samples to reduce over: --dp is 1
edits("gradients not reduced over cp", Unit, "sum_over_replicas", (REPLICAS, "collectives.Work()"))
# What was there before keeps its weight, although the sum of exponentials has grown
edits("merged without rescaling", attention_block, "merge", (".mul_((lse_so_far - total).exp().unsqueeze(-1))", ""))
# The backward of a block takes its own output and log-sum-exp, not those of the whole row
case = "if isinstance(fused, Kernels):"
own = f"out, lse = attend(q, k, v, causal, fused)\n    {case}"
edits("statistics of the block", attention_block, "attend_backward", (case, own))
# Queries see the future within their own chunk
for each in (MergedAttention, AttentionGradients):
    edits("causal block taken for full", each, "add", ("block.causal", "False"))
# The last rank that adds to the sums keeps them: they belong to the next one
begin = "source, next_source = "
keep = f"if hop == cp.size - 1:\n        torch._foreach_copy_(home, sums)\n        return [], Work()\n    {begin}"
edits("dK/dV one hop short", ring_attention, "pass_on_sums", (begin, keep))
# Every rank keeps the gradients of its own keys that its own queries have, and drops those of other keys
mine = "collectives.reduce_scatter(total, parts, cp)", "total.copy_(parts[cp.rank])"
edits("dK/dV of the own queries only", AllGatherAttention, "backward", mine)
# The whole sequence stays in the order of the ranks, which the causal mask takes for that of the tokens
replaces("Ulysses in rank order", ulysses_attention, "_places")(lambda layout, device: torch.arange(layout.seq_len))
# Documents are masked among the tokens of a rank, and not between ranks
starts = "enumerate(seen(rank, source)):", "enumerate(seen(rank, source, documents if source == rank else every)):"
every = "every = [(0,)] * len(documents)\n    def seen(of, source, documents=documents)"
edits("documents of one rank", Layout, "plan", ("def seen(of: int, source: int)", every), starts)

# ---- right results at a higher price ---------------------------------------------------------------------------------

# Each query head has its own copy of the keys and values before they travel
layout = "layout = Layout("
repeat = f"k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))\n    {layout}"
edits("K/V repeated before they are sent", context_parallel, "attention", (layout, repeat))
# The next keys and values have arrived before a block is computed
for function in ("pass_on", "pass_on_sums"):
    edits("ring waits before it computes", ring_attention, function, ("cp, async_op=True", "cp"))
# Every rank passes on all keys, although no query further on may see them
edits("keys travel all the way", Layout, "plan", ("tuple(reach))", "(self.ranks - 1,) * self.ranks)"))
# A list keeps what has arrived until the layer is done
arrived = "kv = kv_arriving\n", "kv = kv_arriving; kept = [*(kept if hop else ()), *kv]\n"
for direction in ("forward", "backward"):
    edits("all keys of a ring kept", RingAttention, direction, arrived)
# In the backward, a causal block costs what a full one does, as it would under a mask: a result that nobody needs
parts = "parts = attend_backward("
twice = f"attend_backward(gradient, q, k, v, out, lse, False, self.fused); {parts}"
edits("causal blocks in squares", AttentionGradients, "add", (parts, twice))
