"""What the experiments of this step share: its schedules, a pipeline on local ranks that can be looked into."""

import functools
from collections.abc import Callable

import torch

from common.config import TrainConfig
from common.data.batches import load_batches
from common.experiments.figures import figure_path
from common.process_groups import Degrees, Mesh, build_mesh
from common.reductions import gradient_norm, sum_extra_groups
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.simulator import Costs, Timeline
from step05_pipeline.schedules.timeline import draw
from step05_pipeline.train import build

# In the order of the lesson; all of the catalogue are in it
ORDER = ("naive", "afab", "1f1b", "interleaved", "breadth-first", "llama3", "zb-h1", "zb-h2", "zbv")
ORDER += ("dualpipe", "dualpipev")
ONE_STAGE = tuple(name for name in ORDER if SCHEDULES[name].chunks == 1)  # on each rank, of one copy of the model

# Eight layers that are alike and a head that is small beside them: stages of the same length
SHAPE = {"layers": 8, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 256, "data": "synthetic"}
SHAPE |= {"seq_len": 32, "micro_batch": 1, "warmup": 1}


def pipeline_of(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> tuple[Schedule, Costs]:
    """A schedule and the costs with which schedules can be compared: those of a p-th of the model are F = I = W = 1."""
    schedule = build_schedule(name, ranks, micro_batches, chunks)
    unit = schedule.ranks / schedule.stages
    return schedule, Costs(F=unit, I=unit, W=unit)


def draw_figure(timelines: dict[str, Timeline], name: str, unit: str) -> None:
    """Draw timelines as NAME.png in the folder of this step's figures, and print where."""
    print(f"  figure: {draw(timelines, figure_path(name), unit)}")


mesh_of = functools.cache(build_mesh)  # groups once for all cases of a layout: all ranks run the same cases


class Run:
    """train.py's pipeline and gradients on these ranks, without its record and its update.

    Args:
        observer: instead of the tracer: its `phase(name, action=...)` is around each action.
    """

    def __init__(self, mesh: Mesh, observer=None, **flags):
        self.config = config = TrainConfig(device="cpu", **flags)
        config.resolve_and_check(mesh.world.size)
        self.observer, self.batches = observer, load_batches(config, mesh)
        mesh = mesh_of(Degrees.of(config), torch.device("cpu"), config.model_config.kv_heads)
        self.pipeline, optimizer = build(config, mesh)
        self.mesh, self.shards = self.pipeline.mesh, optimizer.parameters

    def accumulate(self) -> None:
        """Forward and backward of all micro-batches."""

        def micro_batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
            place = (self.mesh.dp.rank, self.mesh.dp.size)
            return self.batches.micro_batch(0, index, self.config.micro_batch, *place)

        self.pipeline.run(micro_batch, self.batches.target_tokens, tracer=self.observer)

    def finish(self) -> list[torch.Tensor]:
        """The finished gradients, one for each of `shards`."""
        gradients = self.pipeline.finish()
        sum_extra_groups(self.shards, gradients, self.mesh)
        gradient_norm(self.shards, gradients, self.mesh.world)
        return gradients

    def gradients(self) -> list[torch.Tensor]:
        """Both."""
        self.accumulate()
        return self.finish()


def on_every_case(mesh: Mesh, done: Callable, function: Callable, cases: list[dict]) -> list:
    """On a rank: `function(mesh, flags)` for each of the flags in `cases`."""
    results = []
    for flags in cases:
        results.append(function(mesh, flags))
        done()
    return results
