"""Known-wrong variants that keep in 16 bits what needs 32. They train nearly the same: see test_narrow.py."""

import torch

from common import model
from step01_single_gpu import mixed_precision
from step04_tensor_parallel import vocab_parallel
from step06_context_parallel import all_gather_attention, attention_block, ring_attention
from step06_context_parallel.attention_block import AttentionGradients, MergedAttention
from step07_expert_parallel import moe, router
from step07_expert_parallel.moe import _Combine
from step08_5d.kernels import cross_entropy, linear_cross_entropy
from tests.mutants import Mutants

MUTANTS = Mutants()
combine, init_merged, init_gradients = _Combine.forward, MergedAttention.__init__, AttentionGradients.__init__

# In one of these files, "at least float32" means the type that there is
for module in (
    model,
    mixed_precision,
    vocab_parallel,
    attention_block,
    router,
    moe,
    cross_entropy,
    linear_cross_entropy,
):
    MUTANTS.replaces(f"narrow {module.__name__.split('.')[-1]}", module, "at_least_float32")(lambda dtype: dtype)


class _Torch:
    """PyTorch, in which what is like a tensor also has its type."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros_like(self, tensor, dtype=None):
        return torch.zeros_like(tensor)

    def empty_like(self, tensor, dtype=None):
        return torch.empty_like(tensor)


MUTANTS.replaces("gradients of a ring's keys in bfloat16", ring_attention, "torch")(_Torch())
MUTANTS.replaces("gradients of gathered keys in bfloat16", all_gather_attention, "torch")(_Torch())


@MUTANTS.replaces("blocks merged in bfloat16", MergedAttention, "__init__")
def _(self, q, fused):
    init_merged(self, q, fused)
    self.out = self.out.to(q.dtype)


@MUTANTS.replaces("gradients of queries in bfloat16", AttentionGradients, "__init__")
def _(self, gradient, q, *rest):
    init_gradients(self, gradient, q, *rest)
    self.dq = self.dq.to(q.dtype)


@MUTANTS.replaces("experts combined in bfloat16", _Combine, "forward")
@staticmethod
def _(ctx, rows, gates, choices):
    return combine(ctx, rows, gates.to(rows.dtype), choices)
