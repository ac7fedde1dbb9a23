"""Stages that are nobody's model, run by torch.distributed.pipelining and by our executor; and PyTorch's own schedules.

PyTorch's part is imported inside functions: it takes more than a second, and the fork server imports it once for all
ranks (`PRELOAD`).
"""

import functools
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.group import Group
from common.parameter import attach_specs
from common.weights.initialisation import values_from
from step03_zero.zero import Zero
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.schedules.further.csv_files import read_csv
from step05_pipeline.weight_gradients import defer_linear_layers
from step07_expert_parallel.overlap import OverlappedPipeline

PRELOAD = ("torch.distributed.pipelining",)
ROWS, WIDTH = 2, 5  # of a micro-batch
THEIRS = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")  # Schedule...


class Block(nn.Module):
    """A stage whose backward needs its output, with a bias, and another width in between."""

    def __init__(self, number: int):
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 + number % 3)
        self.second = nn.Linear(4 + number % 3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def model_of(stages: int) -> nn.ModuleList:
    """The same on every rank."""
    torch.manual_seed(stages)
    return nn.ModuleList(Block(number) for number in range(stages)).double()


def batch_of(micro_batches: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, each (micro_batches * ROWS, WIDTH)."""
    random = torch.Generator().manual_seed(micro_batches)
    return tuple(torch.randn(2, micro_batches * ROWS, WIDTH, dtype=torch.float64, generator=random))


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


@functools.cache
def expected(stages: int, micro_batches: int) -> dict[str, Tensor]:
    """The gradients of one process, which knows of no micro-batch."""
    model, (x, target) = model_of(stages), batch_of(micro_batches)
    loss_of(nn.Sequential(*model)(x), target).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest error of any of these gradients, relative to the largest element of that gradient."""
    return max(((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in found)


def held_by(rank: int, schedule: Schedule) -> list[int]:
    """The numbers of the stages that a rank holds, in the order of its chunks."""
    return [schedule.stage_of(rank, chunk)[1] for chunk in range(schedule.chunks(rank))]


def error_of_theirs(path: Path, schedule: Schedule) -> float:
    """PyTorch's runtime reads the file and takes a step. Of this rank's stages, the largest error of a gradient."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    model, (x, target) = model_of(schedule.stages), batch_of(schedule.micro_batches)
    stages = []
    for number in held_by(dist.get_rank(), schedule):
        taken, made = (torch.empty(ROWS, WIDTH, dtype=torch.float64, requires_grad=each) for each in (number > 0, True))
        place = number, schedule.stages, torch.device("cpu")
        stages.append(pipelining.PipelineStage(model[number], *place, input_args=taken, output_args=made))
        # Only NCCL needs these first messages: in a V, PyTorch 2.11 lets a rank send one to itself, and gloo cannot
        stages[-1]._get_init_p2p_neighbors_ops = list
    runtime = _PipelineScheduleRuntime(stages, schedule.micro_batches, loss_fn=loss_of, scale_grads=False)
    runtime._load_csv(str(path))
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))
    runtime.step(*[x] * first, **{"target": target} if last else {})
    mine = [f"{stage.stage_index}." for stage in stages]
    found = {name: each.grad for name, each in model.named_parameters() if name.startswith(tuple(mine))}
    return worst(found, expected(schedule.stages, schedule.micro_batches))


def groups() -> SimpleNamespace:
    """What our executor asks of a mesh: a pipeline of all ranks, each of which has no copy anywhere."""
    world = Group.of(dist.group.WORLD, "activations")
    back, alone = Group.of(dist.new_group(list(world.ranks)), "gradients"), Group("alone", (world.rank,), 0)
    device = torch.device("cpu")
    return SimpleNamespace(device=device, shard=alone, replica=alone, activations=world, gradients=back)


def error_of_ours(schedule: Schedule, mesh: SimpleNamespace, kind: type[Pipeline] | None = None) -> float:
    """Our executor takes a step. Of this rank's stages, the largest error of a gradient."""
    model, (x, target) = model_of(schedule.stages), batch_of(schedule.micro_batches)
    attach_specs(model)  # with the names in the whole model
    values = values_from({name: each.detach().clone() for name, each in model.named_parameters()})
    stages = [model[number] for number in held_by(mesh.activations.rank, schedule)]
    for stage in stages if schedule.splits_backward else ():
        defer_linear_layers(stage)
    zeros = [Zero(stage, [[stage]], values, mesh, 0, dtype=torch.float64) for stage in stages]
    kind = kind or (OverlappedPipeline if schedule.overlapped else Pipeline)
    like = torch.empty(ROWS, WIDTH, dtype=torch.float64)
    pipeline = kind(schedule, stages, zeros, mesh.activations, mesh.gradients, like)
    inputs, targets = x.split(ROWS), target.split(ROWS)

    def forward(stage: nn.Module, index: int, received: Tensor | None) -> Tensor:
        y = stage(inputs[index] if received is None else received)
        return loss_of(y, targets[index]) if stage is model[-1] else y

    pipeline.run(forward)
    shards, found = [shard for zero in zeros for shard in zero.shards], {}
    for shard, gradient in zip(shards, pipeline.finish(), strict=True):
        ((_, part),) = shard.spec.boxes(gradient)
        found[shard.spec.name] = part
    return worst(found, expected(schedule.stages, schedule.micro_batches))


def write_theirs(name: str, ranks: int, micro_batches: int, stages: int, path: Path) -> None:
    """The file of `ScheduleNAME` as PyTorch makes it, for any rank: no stage is run, so there need not be any."""
    from torch.distributed import pipelining

    held = {"group_size": ranks, "group_rank": 0, "num_stages": stages * ranks, "submod": None}
    schedule = getattr(pipelining.schedules, f"Schedule{name}")
    made = schedule([SimpleNamespace(**held) for _ in range(stages)], micro_batches, loss_fn=loss_of)
    made._dump_csv(str(path), format="compute_only")


def theirs(name: str, ranks: int, micro_batches: int, stages: int, folder: Path) -> Schedule:
    """The same, as our own reader understands it."""
    path = Path(folder, f"{name}-{ranks}-{micro_batches}-{stages}.csv")
    write_theirs(name, ranks, micro_batches, stages, path)
    return read_csv(path)
