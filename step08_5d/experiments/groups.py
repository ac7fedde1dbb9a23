"""What the mesh costs at its start, on one rank of a world that is not there."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch.distributed import ProcessGroup, destroy_process_group, init_process_group, new_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.drawing.tables import print_table
from common.process_groups import GROUP_NAMES, Degrees, all_groups, build_mesh

LAYOUTS = {  # zero_replicas: without ZeRO every data-parallel rank holds a copy
    "8 ranks": Degrees(tp=2, cp=2, pp=2, dp=1, zero_replicas=2),
    "1,024 ranks": Degrees(tp=8, cp=2, pp=8, dp=8, zero_replicas=16),
    "16,384 ranks": Degrees(tp=8, cp=4, pp=16, dp=32, zero_replicas=128),
    "16,384 ranks, ZeRO": Degrees(tp=8, cp=4, pp=16, dp=32, zero_replicas=4),
    "16,384 ranks, ZeRO, ep 64": Degrees(tp=8, cp=4, pp=16, dp=32, ep=64, zero_replicas=4, experts=True),
}
KV_HEADS = 8


class Start(NamedTuple):
    """How long one rank took to list all groups and to build its mesh, and how many groups there are."""

    listing: float  # seconds of a core in `all_groups`, which `build_mesh` calls
    building: float  # and in `build_mesh`
    groups: int  # communicators of all ranks, without that of the world
    mine: int  # those of this rank


def groups(quick: bool) -> None:
    """One rank of a large world builds its mesh, of communicators that send nothing: groups counted, seconds taken."""
    rows = []
    for name, degrees in list(LAYOUTS.items())[: 2 if quick else None]:
        starts = [start_of(degrees, rank) for rank in (0, degrees.tp * degrees.cp)]  # of the first and the second stage
        seconds = [f"{min(getattr(each, field) for each in starts):.2f}" for field in ("listing", "building")]
        mine = " or ".join(map(str, sorted({each.mine for each in starts})))
        rows.append((name, f"{starts[0].groups:,}", mine, *seconds))
    header = ("", "communicators", "of one rank", "listing all groups, s of a core", "the whole mesh, s")
    print_table("one rank builds its mesh; the others are not there", header, rows)


def start_of(degrees: Degrees, rank: int) -> Start:
    """Measure the start of one rank."""
    with one_rank_of(degrees.world, rank), mock.patch("torch.distributed.new_group", wraps=new_group) as counted:
        begin = time.process_time()
        all_groups(degrees, KV_HEADS)
        listed = time.process_time()
        mesh = build_mesh(degrees, torch.device("cpu"), KV_HEADS)
        built = time.process_time()
        handles = [getattr(mesh, name).handle for name in GROUP_NAMES]
    mine = {id(handle) for handle in handles if isinstance(handle, ProcessGroup)}  # those of groups that are used
    return Start(listed - begin, built - listed, counted.call_count, len(mine) - 1)


@contextmanager
def one_rank_of(world: int, rank: int) -> Iterator[None]:
    """In this context, the process is a rank of a world whose other ranks do not exist, and nothing is sent."""
    with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0"):
        init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            destroy_process_group()
