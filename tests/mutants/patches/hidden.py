"""Known-wrong uses of collectives in flight, and sums in 16 bits: they train the same on gloo, or nearly the same."""

from tests.mutants.patches.mutants import Mutants

# gloo forgives most of them: it has sent a small tensor before `launch` returns, or runs its groups independently
ASYNCHRONY = Mutants(r"""
@ step02_data_parallel.data_parallel:DataParallel.finish
# The last bucket is small and was launched long ago, so surely it has arrived
last bucket not waited for: bucket.work.wait() => bucket is self.buckets[-1] or …
@ step02_data_parallel.data_parallel:DataParallel._launch_next
bucket waited for at once: bucket.work = collectives.all_reduce(bucket.flat, self.group, async_op=overlapping) =>
    …; bucket.work.wait()
@ step03_zero.zero:Zero._before_forward
# The wait is off by one, so a region may run while its weights are still being gathered
weights of the previous region waited for: in self.regions[index].units: =>
    in [unit for each in self.regions[max(0, index - 1) : index + (index + 1 == len(self.regions))]
    for unit in each.units]:
@ step03_zero.zero:Zero._complete
sum over replicas waited for: async_op=self.mode != "naive") => …; unit.summing.wait()
@ step05_pipeline.pipeline:Pipeline._send
output freed while it is sent: self.step.pending_sends[direction] = tensor, work =>
    …; tensor.untyped_storage().resize_(0)
@ step04_tensor_parallel.tensor_parallel:multiply_and_scatter
# In the ring, the buffer of the sum that is being sent takes the next summand, to save memory
partial sum changed while it is sent: total = summand((left - hop) % group.size) =>
    total.copy_(summand((left - hop) % group.size))
@ step03_zero.zero:Zero.accumulate
# With replicas, too, a reduce-scatter that seems complete is finished early. That launches the sum over replicas,
# which on another rank may come after the next reduce-scatter
launches in the order of completion: if unit.replicas.size == 1 and => if
@ step06_context_parallel.ring_attention:pass_on
# The ring has one receive buffer: what arrives next replaces what is being sent, and computed with
receive buffer overwritten while it is read: [(torch.empty_like(each), (cp.rank - 1) % cp.size) for each in like] =>
    [(each, (cp.rank - 1) % cp.size) for each in (kv if hop and kv else map(torch.empty_like, like))]
@ step06_context_parallel.ring_attention:pass_on_sums
# The buffers in which sums travel are set to zero for the next hop as soon as they have been launched
sums changed while they travel: return arriving, collectives.exchange(sends, receives, cp, async_op=True) =>
    work = collectives.exchange(sends, receives, cp, async_op=True); torch._foreach_zero_(sums); return arriving, work
@ step07_expert_parallel.expert_parallel:TokenDispatcher.arrive
# Tokens are sorted by expert while they are on their way, and the wait comes after that
tokens used before they arrive: _Permute.apply(self.there.finish(rows), self.order) =>
    self.there.finish(_Permute.apply(rows, self.order))
@ step07_expert_parallel.expert_parallel:AllToAll.wait
gradients of tokens not waited for: work.wait() => pass
""")

# Sums have the type of what is added up
NARROW = Mutants(r"""
@ step06_context_parallel.ring_attention:RingAttention.backward
gradients of a ring's keys in bfloat16: torch.zeros_like(each, dtype=lse.dtype) => torch.zeros_like(each)
gradients of a ring's keys in bfloat16: torch.empty_like(each, dtype=lse.dtype) => torch.empty_like(each)
@ step06_context_parallel.all_gather_attention:AllGatherAttention.backward
gradients of gathered keys in bfloat16: torch.zeros_like(each, dtype=lse.dtype) => torch.zeros_like(each)
gradients of gathered keys in bfloat16: torch.empty_like(each, dtype=lse.dtype) => torch.empty_like(each)
@ step06_context_parallel.attention_block:MergedAttention.__init__
blocks merged in bfloat16: self.lse = self.out.new_full(q.shape[:-1], -math.inf) => …; self.out = self.out.to(q.dtype)
@ step06_context_parallel.attention_block:AttentionGradients.__init__
gradients of queries in bfloat16: dtype=lse.dtype => dtype=q.dtype
@ step07_expert_parallel.moe:_Combine.forward
experts combined in bfloat16: ctx.save_for_backward(rows, gates) => gates = gates.to(rows.dtype); …
""")

# In one of these files, "at least float32" means the type that there is
WIDENING = "common.layers", "common.model", "step01_single_gpu.mixed_precision", "step04_tensor_parallel.vocab_parallel"
WIDENING += "step06_context_parallel.attention_block", "step07_expert_parallel.moe", "step07_expert_parallel.router"
WIDENING += "step08_5d.kernels.cross_entropy", "step08_5d.kernels.linear_cross_entropy"
for module in WIDENING:
    NARROW.replaces(f"narrow {module.split('.')[-1]}", f"{module}:at_least_float32")(lambda dtype: dtype)
