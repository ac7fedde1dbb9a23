"""The start of torch.distributed, and the mesh: every named group of ranks that talk to each other.

The ranks form a grid of shape (dp, pp, cp, tp), numbered row by row as in Llama 3's 4D layout (arXiv:2407.21783,
section 3.3.2). So tensor parallelism stays inside a node, and every group is a slice of the grid.
"""

import json
import math
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.config import TrainConfig
from common.errors import CommunicationError, UsageError, communication_errors, first_line

AXES = ("dp", "pp", "cp", "tp")  # of the grid, outermost first
NCCL_SETTINGS = {  # environment variables; the user's own values win
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # communicators run in the order of issue, which is the same on all ranks
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # without it, queued matmuls delay a gather that should overlap them
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # or the watchdog sleeps a minute before it ends a rank
}

# Which pipeline ranks hold which stage: one row per copy of the model, row[stage] = pipeline rank.
Placement = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Degrees:
    """How many ways each dimension splits. The world has tp * cp * pp * dp ranks; `TrainConfig` checks that.

    `ep` divides the ranks of one pipeline stage a second time, for experts. `zero_replicas` is the number of copies of
    the model among the dp * cp ranks; each copy is sharded over dp * cp / zero_replicas of them.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    zero_replicas: int = 1

    @classmethod
    def of(cls, config: TrainConfig) -> "Degrees":
        """Return the degrees of a checked configuration. Without ZeRO every data-parallel rank holds a copy."""
        replicas = config.zero_replicas if config.zero else config.dp * config.cp
        return cls(tp=config.tp, cp=config.cp, pp=config.pp, dp=config.dp, zero_replicas=replicas)

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `ranks` are global, in order; `rank` is this process's index among them.

    A group of one rank has no `handle`, and every collective over it returns at once.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = None
    backend: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all ranks: degrees, device, and its group of every name."""

    degrees: Degrees
    device: torch.device
    world: Group  # all ranks
    tp: Group  # the ranks that share every layer
    kv_replica: Group  # tensor ranks with a copy of the same K/V head
    cp: Group  # the ranks that share a sequence
    pp_forward: Group  # the stages of a pipeline; activations
    pp_backward: Group  # the same ranks; gradients of activations
    dp: Group  # the ranks that read other samples
    dp_cp: Group  # the ranks that see other tokens: gradients are summed over them
    shard: Group  # the part of dp_cp that together holds one copy of the model (ZeRO)
    replica: Group  # the part of dp_cp that holds the same shard of different copies
    ep: Group  # the ranks that divide the experts among them
    edp: Group  # the ranks that hold the same experts
    embed: Group  # pipeline ranks with the first or the last stage
    mirror: Group  # pipeline ranks with copies of the same stages

    @property
    def rank(self) -> int:
        return self.world.rank


GROUP_NAMES = tuple(field.name for field in fields(Mesh) if field.type is Group)


def coordinates(rank: int, degrees: Degrees) -> dict[str, int]:
    """Return the position of `rank` on each axis of the grid."""
    result = {}
    for axis in reversed(AXES):
        rank, result[axis] = divmod(rank, getattr(degrees, axis))
    return result


def all_groups(degrees: Degrees, kv_heads: int | None = None, placement: Placement | None = None) -> dict[str, list]:
    """Return the groups of all ranks: under each name a list of tuples of ranks, which together are the whole world.

    Args:
        kv_heads: number of K/V heads; with more tensor ranks than that, `kv_replica` joins those that share a head.
        placement: of the stages (default: stage i on rank i). `embed` joins the ranks that hold the first or the last
            stage, `mirror` those that hold copies of the same stages.
    """
    grid = torch.arange(degrees.world).reshape([getattr(degrees, axis) for axis in AXES])

    def along(*axes: str) -> torch.Tensor:
        """(groups, members): ranks that differ in `axes` only."""
        moved = [AXES.index(axis) for axis in axes]
        return grid.movedim(moved, list(range(-len(axes), 0))).flatten(-len(axes)).flatten(0, -2)

    same_head = max(1, degrees.tp // kv_heads) if kv_heads else 1
    zero = along("dp", "cp").unflatten(1, (degrees.zero_replicas, -1))  # neighbours share a copy of the model
    experts = along("dp", "cp", "tp").unflatten(1, (-1, degrees.ep))
    groups = {
        "world": grid.reshape(1, -1),
        "tp": along("tp"),
        "kv_replica": along("tp").unflatten(1, (-1, same_head)).flatten(0, 1),
        "cp": along("cp"),
        "pp_forward": along("pp"),
        "pp_backward": along("pp"),
        "dp": along("dp"),
        "dp_cp": along("dp", "cp"),
        "shard": zero.flatten(0, 1),
        "replica": zero.transpose(1, 2).flatten(0, 1),
        "ep": experts.flatten(0, 1),
        "edp": experts.transpose(1, 2).flatten(0, 1),
    }
    result = {name: [tuple(ranks) for ranks in rows.tolist()] for name, rows in groups.items()}
    placement = placement or (tuple(range(degrees.pp)),)
    ends = {rank for row in placement for rank in (row[0], row[-1])}
    holders = [set(ranks) for ranks in zip(*placement, strict=True)]  # of each stage
    for name, linked in ("embed", [ends]), ("mirror", holders):
        parts = {tuple(sorted({rank}.union(*(each for each in linked if rank in each)))) for rank in range(degrees.pp)}
        result[name] = [tuple(ranks) for part in sorted(parts) for ranks in along("pp")[:, part].tolist()]
    return result


class Environment(NamedTuple):
    """This process among those that torchrun started. Plain `python train.py` is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int


def environment() -> Environment:
    """Return what torchrun has set in this process's environment variables."""
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    return Environment(*(int(os.environ.get(name, default)) for name, default in defaults.items()))


def choose_backend(places: list[tuple[str, str | None]], gpu: str = "GPU") -> tuple[str, str]:
    """Return the backend of a run, and a line that says how many ranks run on which devices.

    NCCL needs a GPU for each rank. Ranks that share a GPU use gloo, and so do ranks on the CPU.

    Args:
        places: of each rank, its node and the uuid of its GPU or None.
        gpu: the name of the GPUs, for the line.

    Raises UsageError if some ranks have a GPU and others have none.
    """
    gpus, nodes = {place for place in places if place[1]}, len({node for node, _ in places})
    blind = [rank for rank, (_, uuid) in enumerate(places) if not uuid]
    if gpus and blind:
        raise UsageError(f"rank {blind[0]} sees no GPU, but others do; with --device cpu all ranks use the CPU")
    backend = "NCCL" if len(gpus) == len(places) else "gloo"
    where = f"one {gpu} each" if backend == "NCCL" else f"sharing {len(gpus)} {gpu}" if gpus else "on the CPU"
    return backend.lower(), f"{len(places)} ranks on {nodes} node{'s' * (nodes > 1)}, {where}, {backend}"


def init_distributed(device: str = "auto", timeout: float = 600.0, init_method: str = "env://") -> torch.device:
    """Choose this rank's device and start torch.distributed, which a world of one rank does without.

    If a launcher such as torchrun has started the ranks, rank 0 prints on which devices. Raises UsageError for
    `--device cuda` without CUDA and as `choose_backend` does, and CommunicationError if the ranks do not find each
    other within `timeout` seconds.
    """
    rank, world_size, local_rank = environment()
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch sees no CUDA device here")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    chosen = torch.device("cuda", local_rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(chosen)
    if world_size == 1:
        return chosen
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    gpu = torch.cuda.get_device_properties(chosen) if use_cuda else None
    place = os.environ.get("NCCL_HOSTID", platform.node()), str(gpu.uuid) if gpu else None  # NCCL's idea of a node
    limit, keys = timedelta(seconds=timeout), [f"place of rank {each}" for each in range(world_size)]
    try:
        store, *_ = next(dist.rendezvous(init_method, rank, world_size, timeout=limit))
        if dist.is_torchelastic_launched():
            store = _store_of_this_start(store, rank, timeout)
        store.set_timeout(limit)
        store.set(keys[rank], json.dumps(place))
        places = [tuple(json.loads(each)) for each in store.multi_get(keys)]  # waits for all ranks
        backend, line = choose_backend(places, gpu.name if gpu else "")
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": chosen} if backend == "nccl" else {"backend": "gloo"}
        dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=limit, **options)
        meet()
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(f"rendezvous of {world_size} ranks failed: {first_line(error)}") from error
    if rank == 0 and init_method == "env://":
        print(line, flush=True)
    return chosen


def _store_of_this_start(launcher: dist.Store, rank: int, timeout: float) -> dist.Store:
    """Return a store that rank 0 serves, after it has posted its port in the store of torchrun.

    torchrun's own store survives a restart, and so do the addresses of dead ranks in it, and NCCL's note that a rank
    timed out, which would end the new ranks too. Its restart count could not tell old from new: after a failure on one
    of two nodes, the nodes count differently. But a dead rank's port refuses the connection.
    """
    if rank == 0:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
        launcher.set("port of rank 0", str(store.port))
        return store
    for _ in range(math.ceil(timeout)):  # each attempt may take a second
        with suppress(dist.DistNetworkError):
            port = int(launcher.get("port of rank 0"))
            return dist.TCPStore(os.environ["MASTER_ADDR"], port, timeout=timedelta(seconds=1))
    raise RuntimeError("rank 0 does not answer")


def build_mesh(degrees: Degrees, device: torch.device, kv_heads: int | None = None, timeout: float = 600.0) -> Mesh:
    """Return the mesh of this rank. All ranks call it together, since all take part in creating each group.

    Groups of a mesh with the same members share a communicator, except `pp_forward` and `pp_backward`: on one NCCL
    communicator an early receive of one direction would hold up the sends of the other.
    """
    tp, cp, pp, dp, world_size = degrees.tp, degrees.cp, degrees.pp, degrees.dp, environment().world_size
    if degrees.world != world_size:
        raise UsageError(f"tp {tp} x cp {cp} x pp {pp} x dp {dp} is not {world_size} ranks")
    return Mesh(degrees=degrees, device=device, **_create(degrees, all_groups(degrees, kv_heads), timeout))


def place_stages(mesh: Mesh, placement: Placement, timeout: float = 600.0) -> Mesh:
    """Return `mesh` with the groups `embed` and `mirror` of this placement. All ranks call it together."""
    if placement == (tuple(range(mesh.degrees.pp)),):  # that of `build_mesh`
        return mesh
    groups = all_groups(mesh.degrees, placement=placement)
    return replace(mesh, **_create(mesh.degrees, {name: groups[name] for name in ("embed", "mirror")}, timeout))


def separate(group: Group, timeout: float) -> Group:
    """Return `group` with a gloo communicator of its own, for a thread that communicates while training does."""
    if group.size == 1:
        return group
    handle = dist.new_group(group.ranks, timeout=timedelta(seconds=timeout), backend="gloo")
    return replace(group, handle=handle, backend="gloo")


def _create(degrees: Degrees, groups: dict[str, list], timeout: float) -> dict[str, Group]:
    """Return this rank's group of each name. All ranks give the same `groups`, and create them in the same order.

    Only the world has gloo beside NCCL, for what is on the CPU: another gloo mesh per group would cost time and file
    descriptors.
    """
    (rank, world_size, _), limit = environment(), timedelta(seconds=timeout)
    unused = ("edp",) if degrees.ep == 1 else ()  # without experts nothing is sent over it
    handles = {("shared", tuple(range(world_size))): dist.group.WORLD}
    backend = "" if world_size == 1 else "gloo" if dist.get_backend() == "gloo" else "nccl"
    result = {}
    for name, divided in groups.items():
        channel = name if name.startswith("pp_") else "shared"
        for ranks in divided:
            if len(ranks) > 1 and (channel, ranks) not in handles and name not in unused:
                options = None
                if backend == "nccl" and channel != "shared":
                    options = dist.ProcessGroupNCCL.Options()
                    options.config.max_ctas = 4  # multiprocessors that an early receive may occupy while it waits
                    options._timeout = limit  # or torch warns that this is not the `timeout` below
                with communication_errors():
                    handles[channel, ranks] = dist.new_group(ranks, limit, backend, options)
            if rank in ranks:
                handle = handles.get((channel, ranks), dist.GroupMember.NON_GROUP_MEMBER if len(ranks) > 1 else None)
                result[name] = Group(name, ranks, ranks.index(rank), handle, backend)
    if world_size > 1:
        meet()
    return result


def meet() -> None:
    """Return when all ranks have called this. gloo's `new_group` returns when this rank's own connections are made: if
    the rank ended right then, it would look like a crash to others, which are still making theirs.
    """
    with communication_errors():
        dist.all_reduce(torch.zeros(1))  # on the CPU, where gloo connects the ranks
