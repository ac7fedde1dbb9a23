"""One training step to look into: what a train.py with a pipeline does on these ranks, without its record."""

import functools
from collections.abc import Callable
from types import ModuleType

import torch

from common.config import TrainConfig
from common.data.batches import load_batches
from common.process_groups import Degrees, Mesh, build_mesh
from common.reductions import gradient_norm, sum_extra_groups
from common.tracing.tracer import Tracer

mesh_of = functools.cache(build_mesh)  # all cases of one layout use the same groups


def checked(mesh: Mesh, **flags) -> tuple[TrainConfig, Mesh]:
    """The configuration with these flags on the ranks of `mesh`, and its groups."""
    config = TrainConfig(device="cpu", **flags)
    config.resolve_and_check(mesh.world.size)
    return config, mesh_of(Degrees.of(config), mesh.device, config.model_config.kv_heads)


class Run:
    """The model, gradients and update of a run, in pieces.

    Args:
        train: the step's train.py, as a module.
        mesh: the groups of `config`; see `checked`.
    """

    def __init__(self, train: ModuleType, config: TrainConfig, mesh: Mesh):
        self.train, self.config = train, config
        self.batches = load_batches(config, mesh)
        self.pipeline, self.optimizer = train.build(config, mesh)
        self.mesh, self.shards = self.pipeline.mesh, self.optimizer.parameters  # with groups of shared parameters
        self.units = [unit for zero in self.pipeline.zero_wrappers for unit in zero.units]
        self.norm = None  # of the whole gradient

    def micro_batch(self, index: int) -> tuple:
        """This rank's part of a micro-batch, as train.py takes it."""
        place = self.mesh.dp.rank, self.mesh.dp.size
        whole = self.batches.micro_batch(0, index, self.config.micro_batch, *place)
        return self.train.take_part(*whole, self.config, self.mesh, self.batches.corpus.end)

    def accumulate(self, tracer: Tracer | None = None) -> None:
        """Forward and backward of all micro-batches."""
        self.pipeline.run(self.micro_batch, self.batches.target_tokens, tracer=tracer)

    def finish(self) -> list[torch.Tensor]:
        """The finished gradients, one for each of `shards`; also the norm of the whole gradient."""
        gradients = self.pipeline.finish()
        sum_extra_groups(self.shards, gradients, self.mesh)
        self.norm = gradient_norm(self.shards, gradients, self.mesh.world)
        return gradients

    def gradients(self, tracer: Tracer | None = None) -> list[torch.Tensor]:
        """Both."""
        self.accumulate(tracer)
        return self.finish()

    def update(self, gradients: list[torch.Tensor]) -> None:
        """Clip, and take an optimizer step."""
        factor = self.train.clip_factor(self.norm, self.config.clip)
        self.optimizer.step(gradients, self.config.learning_rate(0), factor)

    # ---- what this rank holds, in pairs (a tensor whose spec says what it is part of, tensor to count) ----

    def weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters: gathered units, and shards that are no part of one."""
        return [(unit.parameters[0], each) for unit in self.units for each in (unit.weights, unit.shard)]

    def states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The optimizer's state after an update: moments, and master weights that are no parameters."""
        result, weights = [], {unit.shard.untyped_storage().data_ptr() for unit in self.units}
        for shard, master in zip(self.shards, self.optimizer.masters, strict=True):
            result += [(shard, each) for each in self.optimizer.inner.state[master].values() if each.dim()]
            if master.untyped_storage().data_ptr() not in weights:
                result.append((shard, master))
        return result


def on_every_case(mesh: Mesh, done: Callable, function: Callable, cases: list[dict]) -> list:
    """On a rank: `function(mesh, flags)` for each of the flags in `cases`."""
    results = []
    for flags in cases:
        results.append(function(mesh, flags))
        done()
    return results
