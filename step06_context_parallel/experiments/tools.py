"""What the experiments of this step share: shapes, and an attention layer to look into."""

import torch

from common.experiments.training_step import checked
from common.process_groups import Mesh
from step06_context_parallel.attention_block import NaiveKernels
from step06_context_parallel.context_parallel import attention

# Grouped queries: 8 heads share 4 K/V heads, so that Ulysses can divide them by 4
SHAPE = {"layers": 2, "hidden": 256, "ffn": 768, "heads": 8, "kv_heads": 4, "data": "synthetic", "warmup": 1}
SHAPE |= {"seq_len": 256, "micro_batch": 2, "global_batch": 2}

MODES = {"ring": {}, "allgather": {"cp_mode": "allgather"}, "ulysses": {"cp_mode": "ulysses"}}
WIDTHS = {"float32": 4, "bfloat16": 2}  # bytes of an activation; sums of gradients have 4


class AttentionLayer:
    """The attention core of one layer on these ranks, with random queries, keys and values.

    Args:
        kernels: what computes its blocks, if not PyTorch.
    """

    def __init__(self, mesh: Mesh, kernels: NaiveKernels | None = None, **flags):
        self.config, self.mesh = checked(mesh, **flags)
        self.kernels, model, dtype = kernels, self.config.model_config, self.config.torch_dtype
        generator = torch.Generator().manual_seed(mesh.rank)

        def random(heads: int) -> torch.Tensor:  # (batch, heads, seq/cp, d)
            shape = self.config.micro_batch, heads, self.config.rank_seq_len, model.head_width
            return torch.randn(shape, generator=generator).to(dtype)

        self.q, self.k, self.v = (
            random(heads).requires_grad_() for heads in (model.heads, model.kv_heads, model.kv_heads)
        )
        self.gradient, self.out = random(model.heads), None

    def forward(self) -> None:
        self.out = attention(self.q, self.k, self.v, config=self.config, cp=self.mesh.cp, kernels=self.kernels)

    def backward(self) -> None:
        self.q.grad = self.k.grad = self.v.grad = None
        self.out.backward(self.gradient)
        self.out = None

    def both(self) -> None:
        self.forward()
        self.backward()
