"""What the experiments of this step share: its schedules, a pipeline on local ranks that can be looked into."""

import functools
from collections.abc import Callable

import torch

from common.config import TrainConfig
from common.data.batches import load_batches
from common.process_groups import Degrees, Mesh, Placement, place_stages
from common.reductions import gradient_norm, sum_extra_groups
from common.tracing.tracer import Tracer
from step01_single_gpu.recompute import apply_recompute
from step03_zero.zero import Zero
from step04_tensor_parallel.experiments.tools import mesh_of
from step04_tensor_parallel.tensor_parallel import apply_tensor_parallel
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.simulator import Costs
from step05_pipeline.schedules.standard import SCHEDULES, Schedule, build
from step05_pipeline.stages import build_stages, schedule_of, share_parameters, split_backward

# In the order of the lesson; all that are registered are in it
ORDER = ("naive", "afab", "1f1b", "interleaved", "breadth-first", "llama3", "zb-h1", "zb-h2", "zbv")
ORDER += ("dualpipe", "dualpipev")
ONE_STAGE = tuple(name for name in ORDER if SCHEDULES[name].chunks == 1)  # on each rank, of one copy of the model

# Eight layers that are alike and a head that is small beside them: stages of the same length
SHAPE = {"layers": 8, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 256, "data": "synthetic"}
SHAPE |= {"seq_len": 32, "micro_batch": 1, "warmup": 1}


def pipeline_of(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> tuple[Schedule, Costs]:
    """A schedule and the costs with which schedules can be compared: those of a p-th of the model are F = I = W = 1."""
    schedule = build(name, ranks, micro_batches, chunks)
    unit = schedule.ranks / schedule.stages
    return schedule, Costs(F=unit, I=unit, W=unit)


@functools.cache  # groups once for all cases of a layout: all ranks run the same cases
def placed(degrees: Degrees, placement: Placement, kv_heads: int) -> Mesh:
    """The mesh of a layout whose stages lie as a schedule says."""
    return place_stages(mesh_of(degrees, torch.device("cpu"), kv_heads), placement)


class Run:
    """train.py's pipeline and gradients on these ranks, without its record and its optimizer.

    Args:
        observer: in the place of the tracer: its `phase(name, action=...)` is around each action.
    """

    def __init__(self, mesh: Mesh, observer=None, **flags):
        self.config = config = TrainConfig(device="cpu", **flags)
        config.resolve_and_check(mesh.world.size)
        self.schedule = schedule_of(config)
        self.mesh = placed(Degrees.of(config), self.schedule.placement, config.model_config.kv_heads)
        self.batches = load_batches(config)
        self.stages = build_stages(config, self.schedule, self.mesh)
        for stage in self.stages:
            apply_tensor_parallel(stage, config, self.mesh)
            apply_recompute(stage, config.recompute)
        split_backward(self.stages, self.schedule, self.mesh)
        share_parameters(self.stages, self.schedule, self.mesh)
        self.zeros = [Zero(stage, config, self.mesh, keep_gathered=config.pp > 1) for stage in self.stages]
        self.shards = [shard for zero in self.zeros for shard in zero.shards]
        observer = observer or Tracer(None, self.mesh, None)
        self.pipeline = Pipeline(self.schedule, self.stages, self.zeros, config, self.mesh, observer)

    def accumulate(self) -> None:
        """Forward and backward of all micro-batches."""

        def micro_batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
            place = (self.mesh.dp.rank, self.mesh.dp.size)
            return self.batches.micro_batch(0, index, self.config.micro_batch, *place)

        self.pipeline.run(micro_batch, self.batches.target_tokens)

    def finish(self) -> list[torch.Tensor]:
        """The finished gradients, one for each of `shards`."""
        summed = [gradient for zero in self.zeros for gradient in zero.finish()]
        sum_extra_groups(self.shards, summed, self.mesh)
        gradient_norm(self.shards, summed, self.mesh.world)
        return summed

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
