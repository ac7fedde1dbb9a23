"""What the experiments of this step share: shapes, colours, an attention layer and a training step to look into."""

import functools
from collections.abc import Callable

import torch

from common.config import TrainConfig
from common.data.batches import load_batches
from common.experiments.figures import SERIES
from common.process_groups import Degrees, Mesh, build_mesh
from common.reductions import gradient_norm, sum_extra_groups
from step06_context_parallel.context_parallel import attention, take_part
from step06_context_parallel.train import build

# Grouped queries: 8 heads share 4 K/V heads, so that Ulysses can divide them by 4
SHAPE = {"layers": 2, "hidden": 256, "ffn": 768, "heads": 8, "kv_heads": 4, "data": "synthetic", "warmup": 1}
SHAPE |= {"seq_len": 256, "micro_batch": 2, "global_batch": 2}

RANK_COLOURS = SERIES  # of a rank's tokens, wherever its keys and values are
MODES = {"ring": {}, "allgather": {"cp_mode": "allgather"}, "ulysses": {"cp_mode": "ulysses"}}
mesh_of = functools.cache(build_mesh)  # all cases of one layout use the same groups


def checked(mesh: Mesh, **flags) -> tuple[TrainConfig, Mesh]:
    """The configuration with these flags on the ranks of `mesh`, and its groups."""
    config = TrainConfig(device="cpu", **flags)
    config.resolve_and_check(mesh.world.size)
    return config, mesh_of(Degrees.of(config), mesh.device, config.model_config.kv_heads)


class AttentionLayer:
    """The attention core of one layer on these ranks, with random queries, keys and values."""

    def __init__(self, mesh: Mesh, **flags):
        self.config, self.mesh = checked(mesh, **flags)
        model, dtype = self.config.model_config, self.config.torch_dtype
        generator = torch.Generator().manual_seed(mesh.rank)

        def random(heads: int) -> torch.Tensor:  # (batch, heads, seq/cp, d)
            shape = self.config.micro_batch, heads, self.config.rank_seq_len, model.head_width
            return torch.randn(shape, generator=generator).to(dtype)

        self.q, self.k, self.v = (
            random(heads).requires_grad_() for heads in (model.heads, model.kv_heads, model.kv_heads)
        )
        self.gradient, self.out = random(model.heads), None

    def forward(self) -> None:
        self.out = attention(self.q, self.k, self.v, config=self.config, cp=self.mesh.cp)

    def backward(self) -> None:
        self.q.grad = self.k.grad = self.v.grad = None
        self.out.backward(self.gradient)
        self.out = None


class Run:
    """train.py's model and gradients on these ranks, without its record and its update."""

    def __init__(self, mesh: Mesh, **flags):
        self.config, mesh = checked(mesh, **flags)
        self.batches = load_batches(self.config, mesh)
        self.pipeline, optimizer = build(self.config, mesh)
        self.mesh, self.shards = self.pipeline.mesh, optimizer.parameters

    def micro_batch(self, index: int) -> tuple:
        """This rank's part of a micro-batch, as train.py takes it."""
        place = self.mesh.dp.rank, self.mesh.dp.size
        whole = self.batches.micro_batch(0, index, self.config.micro_batch, *place)
        return take_part(*whole, self.config, self.mesh, self.batches.corpus.end)

    def accumulate(self) -> None:
        """Forward and backward of all micro-batches."""
        self.pipeline.run(self.micro_batch, self.batches.target_tokens)

    def gradients(self) -> list[torch.Tensor]:
        """The finished gradients, one for each of `shards`."""
        self.accumulate()
        gradients = self.pipeline.finish()
        sum_extra_groups(self.shards, gradients, self.mesh)
        gradient_norm(self.shards, gradients, self.mesh.world)
        return gradients


def on_every_case(mesh: Mesh, done: Callable, function: Callable, cases: list[dict]) -> list:
    """On a rank: `function(mesh, flags)` for each of the flags in `cases`."""
    results = []
    for flags in cases:
        results.append(function(mesh, flags))
        done()
    return results
