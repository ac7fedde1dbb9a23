"""One training step to look into: what a train.py does on these ranks, without its record."""

import functools
from collections.abc import Callable, Iterable
from types import ModuleType

import torch

from common.config import TrainConfig
from common.launching.run_mesh import degrees_of
from common.process_groups import Mesh, build_mesh
from common.tracing.tracer import Tracer

groups_of = functools.cache(build_mesh)  # all cases of one layout use the same groups


def checked(mesh: Mesh, **flags) -> tuple[TrainConfig, Mesh]:
    """The configuration with these flags on the ranks of `mesh`, and its groups."""
    config = TrainConfig(device="cpu", **flags)
    config.resolve_and_check(mesh.world.size)
    found = groups_of(degrees_of(config), mesh.device, config.model_config.kv_heads)
    return config, found.with_link(config.link_model)


class KeptGradients:
    """In place of an optimizer: a step leaves its gradients here, one for each of `parameters`, and updates nothing."""

    def __init__(self, optimizer):
        self.parameters, self.buffers, self.scaler = optimizer.parameters, optimizer.buffers, optimizer.scaler
        self.gradients: list[torch.Tensor] = []

    def step(self, gradients: list[torch.Tensor], *_, **__) -> None:
        self.gradients = list(gradients)


class Training:
    """What a train.py builds, and its `train_step`, without a record: the same in all steps.

    Args:
        train: the step's train.py, as a module.
        mesh: the groups of `config`; see `checked`.
        batches: what micro-batches are read from, step 1's `Batches`; by default those of `config`.
    """

    def __init__(self, train: ModuleType, config: TrainConfig, mesh: Mesh, batches=None):
        self.train, self.config, self.numbers = train, config, {}  # what the last step said of itself
        if hasattr(train, "place_stages"):  # as `train.train` does
            mesh = train.place_stages(mesh, train.schedule_of(config).placement, config.timeout)
        self.mesh = mesh
        self.batches, self.parts = batches or train.load_batches(config, mesh), train.build(config, mesh)
        self.optimizer = next(part for part in self.parts if hasattr(part, "masters"))
        self.shards = self.optimizer.parameters
        zeros = getattr(self.parts[0], "zero_wrappers", self.parts)  # those of a pipeline, or one of the parts
        self.units = [unit for zero in zeros for unit in getattr(zero, "units", [])]

    def take(self, step: int = 0, tracer: Tracer | None = None) -> dict[str, float]:
        """Take a step. Returns loss, grad_norm and what else the step says of itself.

        `tracer` may be anything with `phase(name, **arguments)`, a context manager around each phase of the step.
        """
        return self._take(step, self.parts, tracer)

    def gradients(self, step: int = 0, tracer: Tracer | None = None) -> list[torch.Tensor]:
        """Return the finished gradients of a step, one for each of the optimizer's parameters. Nothing is updated."""
        keeper = KeptGradients(self.optimizer)
        self._take(step, [keeper if part is self.optimizer else part for part in self.parts], tracer)
        return keeper.gradients

    def update(self, gradients: list[torch.Tensor]) -> None:
        """Take an optimizer step with these gradients, as they are."""
        self.optimizer.step(gradients, self.config.learning_rate(0))

    def _take(self, step: int, parts: Iterable, tracer: Tracer | None) -> dict[str, float]:
        tracer = tracer or Tracer()
        numbers = self.train.train_step(step, *parts, self.batches, self.config, self.mesh, tracer)
        self.numbers = {name: number.item() for name, number in numbers.items()}
        return self.numbers

    # ---- what this rank holds, in pairs (a tensor whose spec says what it is part of, tensor to count) ----

    def weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters: gathered units, and shards that are no part of one."""
        pairs = [(unit.parameters[0], each) for unit in self.units for each in (unit.weights, unit.shard)]
        return pairs or [(shard, shard) for shard in self.shards]

    def states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The optimizer's state after an update: moments, and master weights that are no parameters."""
        result, weights = [], {each.untyped_storage().data_ptr() for _, each in self.weights()}
        for shard, master in zip(self.shards, self.optimizer.masters, strict=True):
            result += [(shard, each) for each in self.optimizer.state[master].values() if each.dim()]
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
