"""Known-wrong variants that keep in 16 bits what needs 32. They train nearly the same: see test_narrow.py."""

from common import model
from step01_single_gpu import mixed_precision
from step04_tensor_parallel import vocab_parallel
from step06_context_parallel import attention_block
from step06_context_parallel.all_gather_attention import AllGatherAttention
from step06_context_parallel.attention_block import AttentionGradients, MergedAttention
from step06_context_parallel.ring_attention import RingAttention
from step07_expert_parallel import moe, router
from step08_5d.kernels import cross_entropy, linear_cross_entropy
from tests.mutants import Mutants

MUTANTS = Mutants()

# In one of these files, "at least float32" means the type that there is
WIDENING = model, mixed_precision, vocab_parallel, attention_block, router, moe, cross_entropy, linear_cross_entropy
for module in WIDENING:
    MUTANTS.replaces(f"narrow {module.__name__.split('.')[-1]}", module, "at_least_float32")(lambda dtype: dtype)

# Sums have the type of what is added up
sums = [(f"torch.{like}_like(each, dtype=lse.dtype)", f"torch.{like}_like(each)") for like in ("zeros", "empty")]
MUTANTS.edits("gradients of a ring's keys in bfloat16", RingAttention, "backward", *sums)
MUTANTS.edits("gradients of gathered keys in bfloat16", AllGatherAttention, "backward", *sums)
lse = "self.lse = self.out.new_full(q.shape[:-1], -math.inf)"
narrow = lse, f"{lse}; self.out = self.out.to(q.dtype)"
MUTANTS.edits("blocks merged in bfloat16", MergedAttention, "__init__", narrow)
MUTANTS.edits("gradients of queries in bfloat16", AttentionGradients, "__init__", ("dtype=lse.dtype", "dtype=q.dtype"))
kept = "ctx.save_for_backward(rows, gates)"
narrow = kept, f"gates = gates.to(rows.dtype); {kept}"
MUTANTS.edits("experts combined in bfloat16", moe._Combine, "forward", narrow)
