"""Known-wrong uses of collectives in flight: what each gets wrong, and then how.

gloo forgives most of them: it has sent a small tensor before `launch` returns, or runs its groups independently.
"""

import torch
import torch.nn.functional as F

from common import collectives
from common.collectives import Work
from step02_data_parallel.data_parallel import DataParallel
from step03_zero.zero import Zero
from step04_tensor_parallel import tensor_parallel
from step05_pipeline.pipeline import Pipeline
from step06_context_parallel import ring_attention
from step07_expert_parallel import expert_parallel
from step07_expert_parallel.expert_parallel import AllToAll, Journey
from tests.mutants import Mutants

MUTANTS = Mutants()
finish, accumulate, send = DataParallel.finish, Zero.accumulate, Pipeline._send
pass_on, pass_on_sums = ring_attention.pass_on, ring_attention.pass_on_sums


@MUTANTS.replaces("last bucket not waited for", DataParallel, "finish")
def _(self):
    """The last bucket is small and was launched long ago, so surely it has arrived."""
    while self.next_bucket < len(self.buckets):
        self._launch_next()
    self.buckets[-1].work = Work()
    return finish(self)


@MUTANTS.replaces("weights of the previous region waited for", Zero, "_before_forward")
def _(self, index, *_):
    """The wait is off by one, so a region may run while its weights are still being gathered."""
    last = index + 1 == len(self.regions)
    for region in self.regions[max(0, index - 1) : index + last]:
        for unit in region.units:
            unit.fetch().wait()


@MUTANTS.replaces("output freed while it is sent", Pipeline, "_send")
def _(self, transfer):
    """The memory of an output is released when its send has been launched."""
    send(self, transfer)
    tensor, _ = self.step.pending_sends[transfer.output.direction]
    tensor.untyped_storage().resize_(0)


@MUTANTS.replaces("partial sum changed while it is sent", tensor_parallel, "multiply_and_scatter")
def _(x, weight, group):
    """In the ring, the buffer of the sum that is being sent takes the next summand, to save memory."""
    part = x.shape[1] // group.size
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    total = F.linear(x[:, left * part : (left + 1) * part], weight)
    for hop in range(1, group.size):
        target, received = (left - hop) % group.size, torch.empty_like(total)
        work = collectives.exchange([(total, right)], [(received, left)], group, async_op=True)
        total.copy_(F.linear(x[:, target * part : (target + 1) * part], weight))
        work.wait()
        total += received
    return total


@MUTANTS.replaces("launches in the order of completion", Zero, "accumulate")
def _(self, parameter, gradient):
    """With replicas, too, a reduce-scatter that seems complete is finished early. That launches the sum over replicas,
    which on another rank may come after the next reduce-scatter.
    """
    accumulate(self, parameter, gradient)
    if self.in_flight and self.in_flight[0].scattering.is_completed():
        self._complete()


@MUTANTS.replaces("receive buffer overwritten while it is read", ring_attention, "pass_on")
def _(kv, hop, plan, cp, like):
    """The ring has one receive buffer: what arrives next replaces what is being sent, and computed with."""
    if hop == 0 or not kv:
        return pass_on(kv, hop, plan, cp, like)
    sends = [(each, (cp.rank + 1) % cp.size) for each in kv if hop < plan.reach[(cp.rank - hop) % cp.size]]
    receives = [(each, (cp.rank - 1) % cp.size) for each in kv if hop < plan.reach[(cp.rank - hop - 1) % cp.size]]
    return kv[: len(receives)], collectives.exchange(sends, receives, cp, async_op=True)


@MUTANTS.replaces("sums changed while they travel", ring_attention, "pass_on_sums")
def _(sums, home, hop, plan, cp):
    """The buffers in which sums travel are set to zero for the next hop as soon as they have been launched."""
    arriving, work = pass_on_sums(sums, home, hop, plan, cp)
    for total in sums:
        total.zero_()
    return arriving, work


@MUTANTS.replaces("tokens used before they arrive", Journey, "arrive")
def _(self, rows):
    """Tokens are sorted by expert while they are on their way, and the wait comes after that."""
    return self.there.finish(expert_parallel._Permute.apply(rows, self.order)), self.counts


@MUTANTS.replaces("gradients of tokens not waited for", AllToAll, "wait")
def _(self):
    """The shared experts' backward takes longer than any all-to-all."""
    (result, _), self.in_flight = self.in_flight, None
    return result
