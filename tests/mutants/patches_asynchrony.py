"""Known-wrong uses of collectives in flight: what each gets wrong, and then how.

gloo forgives most of them: it has sent a small tensor before `launch` returns, or runs its groups independently.
"""

from step02_data_parallel.data_parallel import DataParallel
from step03_zero.zero import Zero
from step04_tensor_parallel import tensor_parallel
from step05_pipeline.pipeline import Pipeline
from step06_context_parallel import ring_attention
from step07_expert_parallel.expert_parallel import AllToAll, Journey
from tests.mutants import Mutants

MUTANTS = Mutants()
edits = MUTANTS.edits

# The last bucket is small and was launched long ago, so surely it has arrived
but_last = "bucket.work.wait()", "bucket is self.buckets[-1] or bucket.work.wait()"
edits("last bucket not waited for", DataParallel, "finish", but_last)
# The wait is off by one, so a region may run while its weights are still being gathered
before = "max(0, index - 1) : index + (index + 1 == len(self.regions))"
units = "in self.regions[index].units:", f"in [unit for each in self.regions[{before}] for unit in each.units]:"
edits("weights of the previous region waited for", Zero, "_before_forward", units)
# The memory of an output is released when its send has been launched
sent = "self.step.pending_sends[direction] = tensor, work"
edits("output freed while it is sent", Pipeline, "_send", (sent, f"{sent}; tensor.untyped_storage().resize_(0)"))
# In the ring, the buffer of the sum that is being sent takes the next summand, to save memory
summand = "summand((left - hop) % group.size)"
in_place = f"total = {summand}", f"total.copy_({summand})"
edits("partial sum changed while it is sent", tensor_parallel, "multiply_and_scatter", in_place)
# With replicas, too, a reduce-scatter that seems complete is finished early. That launches the sum over replicas,
# which on another rank may come after the next reduce-scatter
always = "if unit.replicas.size == 1 and ", "if "
edits("launches in the order of completion", Zero, "accumulate", always)
# The ring has one receive buffer: what arrives next replaces what is being sent, and computed with
name = "receive buffer overwritten while it is read"
own = "[(each, (cp.rank - 1) % cp.size) for each in (kv if hop and kv else map(torch.empty_like, (like, like)))]"
new = "[(torch.empty_like(like), (cp.rank - 1) % cp.size) for _ in range(2)]"
edits(name, ring_attention, "pass_on", (new, own))
# The buffers in which sums travel are set to zero for the next hop as soon as they have been launched
launch = "collectives.exchange(sends, receives, cp, async_op=True)"
zeroed = f"return arriving, {launch}", f"work = {launch}\n    torch._foreach_zero_(sums)\n    return arriving, work"
edits("sums changed while they travel", ring_attention, "pass_on_sums", zeroed)
# Tokens are sorted by expert while they are on their way, and the wait comes after that
sort = "_Permute.apply(self.there.finish(rows), self.order)", "self.there.finish(_Permute.apply(rows, self.order))"
edits("tokens used before they arrive", Journey, "arrive", sort)
# The shared experts' backward takes longer than any all-to-all
edits("gradients of tokens not waited for", AllToAll, "wait", ("work.wait()", "pass"))
