"""Known-wrong variants that keep in 16 bits what needs 32. They train nearly the same: see test_narrow.py."""

from tests.mutants import Mutants

# Sums have the type of what is added up
MUTANTS = Mutants(r"""
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
WIDENING = "common.model", "step01_single_gpu.mixed_precision", "step04_tensor_parallel.vocab_parallel"
WIDENING += "step06_context_parallel.attention_block", "step07_expert_parallel.moe", "step07_expert_parallel.router"
WIDENING += "step08_5d.kernels.cross_entropy", "step08_5d.kernels.linear_cross_entropy"
for module in WIDENING:
    MUTANTS.replaces(f"narrow {module.split('.')[-1]}", f"{module}:at_least_float32")(lambda dtype: dtype)
