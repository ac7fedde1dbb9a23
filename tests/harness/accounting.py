"""What a rank sends in a whole run of a step's train(): by the log of collectives, and by the kernel's own counters."""

import importlib
from typing import NamedTuple

import torch

from common import collectives
from common.config import TrainConfig
from common.launching.command_line import STEP_NAMES
from common.process_groups import Mesh
from tests.harness.observing import configure, mesh_of, sent_so_far


class Log(NamedTuple):
    """One run of one rank."""

    config: TrainConfig
    mesh: Mesh
    updated: list[torch.Tensor]  # what train() returns
    calls: list[collectives.Call]
    sockets: int | None  # bytes that they have sent; None where the system does not count them

    @property
    def sent(self) -> int:
        """Bytes that the log says."""
        return sum(call.bytes for call in self.calls)

    @property
    def rows(self) -> list[tuple]:
        """(phase, group, op, elements, bytes) of each call, in order."""
        return [(call.phase, call.group, call.op, call.elements, call.bytes) for call in self.calls]


def log(step: int, flags: str) -> Log:
    """Train under these flags on this rank."""
    train = importlib.import_module(f"{STEP_NAMES[step - 1]}.train").train
    config = configure(step, flags)
    mesh = mesh_of(config)
    before = sent_so_far(mesh)
    with collectives.record() as calls:
        updated = train(config, mesh)
    return Log(config, mesh, updated, calls, None if before is None else sent_so_far(mesh) - before)


def fill_buckets(sizes: list[int], limit: float) -> list[list[int]]:
    """Return the indices of the parameters in each bucket of at most `limit` bytes, in the order of the backward.

    What step 2 does, once more: tests compare the two.

    Args:
        sizes: bytes of each parameter's gradient, in forward order. A larger one has a bucket to itself.
    """
    buckets, room = [], 0.0
    for index in reversed(range(len(sizes))):
        if not buckets or sizes[index] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets
