"""A dry run: what one rank of any world holds, sends and computes in a step, by the very code that would train it.

Step 8's own `build` and `train_step` run on fake tensors, which have shapes and no memory, over a fake process group,
whose collectives return at once. So one process plays any of 16,384 ranks: flags are refused as in a real run, and
every tensor, message and product is counted. Tokens choose experts in turn: all experts are equally busy.

What a GPU would do differently: the fused kernels keep less than the operations that they replace, which is what is
counted here.
"""

import math
import os
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

from common.config import TrainConfig
from common.costs.vocabulary import KINDS, Message, added
from common.drawing.tables import print_table
from common.errors import UsageError
from common.launching.command_line import parse
from common.launching.run_mesh import degrees_of, mesh_of
from common.process_groups import GROUP_NAMES, Degrees, coordinates
from common.tracing.tracer import Tracer
from step01_single_gpu.mixed_precision import Optimizer
from step05_pipeline.pipeline import Pipeline
from step06_context_parallel.sequence_layouts import rank_order
from step07_expert_parallel.moe import MoE
from step08_5d import config as step08
from step08_5d import train as step08_train
from step08_5d.planning.dry_run.fake_allocations import FakeAllocations


class DryRun(NamedTuple):
    """What a rank does in one step; sizes in bytes."""

    config: TrainConfig
    place: dict[str, int]  # of the rank in the grid
    layers: list[int]  # that it holds
    actions: list[str]  # of its schedule
    at_peak: dict[str, float]  # by kind, when the most is held; "activations" are all that has no other kind
    between: dict[str, float]  # by kind, between two steps
    peak: int
    sent: dict[tuple[str, str], tuple[float, float]]  # by group and operation: how many, and the bytes of all
    flops: float  # of products and attention
    operations: int  # that compute or copy something


def configuration(argv: list[str], world: int) -> TrainConfig:
    """The configuration that these flags of step 8 describe in a world of that many ranks.

    Raises UsageError as a real run does, and for what cannot be played without numbers.
    """
    config = parse(8, [*argv, "--device", "cpu"])
    config.resolve_and_check(world)
    step08.check(config)
    if config.mask_documents:
        raise UsageError("--mask-documents depends on the text, of which a dry run has none")
    if config.init_from:
        raise UsageError("--init-from: a dry run has no weights; --model takes the shape of a folder, too")
    return config


def dry_run(config: TrainConfig, rank: int, progress: bool = False, like_gloo: bool = False) -> DryRun:
    """Play one step of a rank. This process must have no process group yet.

    Args:
        config: see `configuration`.
        progress: show a bar on a terminal.
        like_gloo: hold what gloo needs beside the messages (its reduce-scatter receives all parts before it adds them
            up), as runs on a CPU do. NCCL needs nothing of the kind.

    Raises UsageError if the world has no such rank.
    """
    world = degrees_of(config).world
    if not 0 <= rank < world:
        raise UsageError(f"--rank {rank}: the world has the ranks 0 to {world - 1}")
    seen = {}

    def look() -> None:
        if parts:
            seen["at peak"] = by_kind(*parts, allocations)

    parts, allocations = [], FakeAllocations(look)
    with _rank_of_a_fake_world(rank, world), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # all of them are 0: no copies
        mesh = mesh_of(config, torch.device("cpu"))
        if like_gloo:
            groups = {name: replace(getattr(mesh, name), backend="gloo") for name in GROUP_NAMES}
            mesh = replace(mesh, **groups)
        with FakeTensorMode(allow_non_fake_inputs=True), allocations:
            mesh = step08_train.place_stages(mesh, step08_train.schedule_of(config).placement, config.timeout)
            pipeline, optimizer, statistics = step08_train.build(config, mesh)
            _choose_in_turn(pipeline, config)
            optimizer.slices()  # makes the moments, which otherwise come with the first update
            parts += [pipeline, optimizer]
            allocations.start_over()
            pipeline.program = tqdm(pipeline.program, disable=None if progress else True)
            with allocations.record() as calls:
                batches, tracer = _batches(config), Tracer()
                arguments = pipeline, optimizer, statistics, batches, config, mesh, tracer
                step08_train.train_step(0, *arguments)
            between = by_kind(pipeline, optimizer, allocations)
    rank_order.cache_clear()  # of fake tensors
    return DryRun(
        config,
        coordinates(rank, mesh.degrees),
        sorted(int(index) for stage in pipeline.stages for index in stage.layers),
        [str(action) for action in pipeline.schedule.actions[pipeline.rank]],
        seen["at peak"],
        between,
        allocations.peak,
        added([Message(call.group, call.op, call.bytes, 1) for call in calls if call.op != "receive"]),
        *(allocations.flops, allocations.number),
    )


def first_ranks(degrees: Degrees) -> list[int]:
    """The first rank of each pipeline stage."""
    inside = degrees.axes[degrees.axes.index("pp") + 1 :]
    apart = math.prod(getattr(degrees, axis) for axis in inside)
    return [stage * apart for stage in range(degrees.pp)]


@contextmanager
def _rank_of_a_fake_world(rank: int, world: int):
    """Let this process be one rank of a world whose other ranks do not exist."""
    outside = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    if world > 1:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        if world > 1:
            dist.destroy_process_group()
        for name, value in outside.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _batches(config: TrainConfig) -> SimpleNamespace:
    """In place of `Batches`: micro-batches of the right shapes."""

    def micro_batch(*_) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(config.micro_batch, config.seq_len, dtype=torch.int64)
        return tokens, torch.zeros_like(tokens)

    target_tokens = config.global_batch * config.seq_len
    return SimpleNamespace(micro_batch=micro_batch, target_tokens=target_tokens, corpus=SimpleNamespace(end=None))


def _choose_in_turn(pipeline: Pipeline, config: TrainConfig) -> None:
    """Let tokens choose experts without numbers: which they are does not matter, as `equally` says how many rows."""
    split = config.tp if config.sequence_parallel else 1
    rows = config.micro_batch * config.rank_seq_len // split * (config.model_config.top_k or 0)

    def choose(scores: torch.Tensor) -> torch.Tensor:
        return scores.new_zeros(*scores.shape[:-1], config.model_config.top_k, dtype=torch.int64)

    for stage in pipeline.stages:
        for layer in stage.layers.values():
            if isinstance(layer.mlp, MoE):
                layer.mlp.router.choose, layer.mlp.read = choose, partial(equally, rows)


def equally(rows: int, counts: torch.Tensor) -> list:
    """In place of `to_host`: so many rows, divided equally among what `counts` counts, for each of its rows."""
    if counts.dim() > 1:
        return [equally(rows, each) for each in counts]
    number = len(counts)
    return [rows * (index + 1) // number - rows * index // number for index in range(number)]


def by_kind(pipeline: Pipeline, optimizer: Optimizer, allocations: FakeAllocations) -> dict[str, float]:
    """The bytes that are held now: parameters, gradients, optimizer state, communication, all else as activations."""
    units = [unit for zero in pipeline.zero_wrappers for unit in zero.units]
    tensors = {
        "parameters": [each for unit in units for each in (unit.weights, unit.shard)],
        "gradients": [unit.bucket.flat for unit in units if unit.bucket] + [unit.reduced for unit in units],
        "optimizer state": [*optimizer.masters],
    }
    for master in optimizer.masters:
        tensors["optimizer state"] += optimizer.state[master].values()
    result, taken = {}, set()
    for kind in KINDS:  # in float32 a master weight is the parameter itself
        storages = {id(each.untyped_storage()): each.untyped_storage() for each in tensors[kind] if each is not None}
        result[kind] = sum(storage.nbytes() for key, storage in storages.items() if key not in taken)
        taken |= storages.keys()
    result["communication"] = allocations.communication(taken)
    return result | {"activations": allocations.bytes - sum(result.values())}


def show(run: DryRun, rank: int) -> None:
    """Print what a dry run has found."""
    config = run.config
    place = ", ".join(f"{axis} {index} of {getattr(config, axis)}" for axis, index in run.place.items())
    ends = [index for index in run.layers if {index - 1, index + 1} - {*run.layers}]
    ends = sorted(ends + [index for index in ends if not {index - 1, index + 1} & {*run.layers}])  # one alone is both
    layers = " and ".join(f"{first} to {last}" for first, last in zip(ends[::2], ends[1::2]))
    layers = f"layers {layers}" if layers else "no layers"
    print(
        f"dry run of rank {rank}: {place}; {layers}, {config.accumulation_steps} micro-batches of {config.micro_batch}"
    )
    rows = [(kind, f"{size / 1e6:,.1f}", f"{run.between[kind] / 1e6:,.1f}") for kind, size in run.at_peak.items()]
    rows.append(("all", f"{run.peak / 1e6:,.1f}", f"{sum(run.between.values()) / 1e6:,.1f}"))
    print_table("MB held", ("", "at the peak", "between steps"), rows)
    rows = [
        (f"{op} ({group})", f"{number:,.0f}", f"{size / 1e6:,.3f}", f"{size / number / 1e6:,.3f}")
        for (group, op), (number, size) in sorted(run.sent.items(), key=lambda item: -item[1][1])
    ]
    print_table("sent in a step", ("", "messages", "MB of all", "MB of one"), rows)
    print(f"\n{run.flops / 1e12:,.2f} TFLOP of products and attention (those of a recomputation count again)")
    actions = run.actions if len(run.actions) <= 48 else [*run.actions[:32], "...", *run.actions[-16:]]
    print(f"schedule {config.schedule}: {' '.join(actions)}")
