"""What the tests share that watch a step's real train() from outside, on one of the ranks that `run_ranks` starts."""

import importlib
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from common.collectives import barrier
from common.config import TrainConfig
from common.experiments import tcp_bytes
from common.launching import run_mesh
from common.launching.command_line import STEP_NAMES, parse
from common.process_groups import Mesh
from common.start import environment


def configure(step: int, flags: str, world: int | None = None) -> TrainConfig:
    """Return the configuration of a step's train.py under these flags on `world` ranks, or on those that there are."""
    config = parse(step, flags.split())
    config.resolve_and_check(world or environment().world_size)
    importlib.import_module(f"{STEP_NAMES[step - 1]}.config").check(config)
    return config


def mesh_of(config: TrainConfig) -> Mesh:
    """Return this rank's place among the ranks of `config`."""
    return run_mesh.mesh_of(config, torch.device("cpu"))


def place() -> tuple[int, int]:
    """Return this rank's number and that of all ranks, for a sketch, which wants a process group on one rank, too."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def observe_each(observe: Callable[[str], object], cases: list[str]) -> list:
    """Return `observe(flags)` of every case in turn on this rank."""
    return [observe(flags) for flags in cases]


def watching(owner: object, name: str, note: Callable):
    """Return a context in which `note` is called, with its arguments, before every call of this function."""
    real = getattr(owner, name)

    def watched(*args, **options):
        note(*args, **options)
        return real(*args, **options)

    return mock.patch.object(owner, name, watched)


def sent_so_far(mesh: Mesh) -> int | None:
    """Return the bytes that this rank's sockets have sent, counted while no rank has anything else to send."""
    barrier(mesh.world)
    sent = tcp_bytes.sent_by_me()
    barrier(mesh.world)  # a rank that ends closes sockets that others still read
    return sent
