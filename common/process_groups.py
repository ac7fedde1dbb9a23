"""The mesh: every named group of ranks that talk to each other.

The ranks form a grid of shape (dp, pp, cp, tp), numbered row by row as in Llama 3's 4D layout (arXiv:2407.21783,
section 3.3.2). So tensor parallelism stays inside a node, and every group is a slice of the grid. `--order` turns the
grid round: a rank gets another place in it and other groups, but only the rounding of sums depends on that.
"""

import math
from dataclasses import dataclass, fields, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from common.errors import UsageError, communication_errors
from common.group import Group
from common.link import Line, Link
from common.start import environment, meet

AXES = ("dp", "pp", "cp", "tp")  # of the grid, outermost first, unless --order turns it round

# Which pipeline ranks hold which stage: one row per copy of the model, row[stage] = pipeline rank.
Placement = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Degrees:
    """How many ways each dimension splits. The world has tp * cp * pp * dp ranks; `TrainConfig` checks that.

    `ep` divides the ranks of one pipeline stage a second time, for `experts`. `zero_replicas` is the number of copies
    of the model among the dp * cp ranks; each copy is sharded over dp * cp / zero_replicas of them. Both take ranks in
    ascending order, whatever the order of the `axes`, so that the nearest ones of a stage share experts or a copy.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    zero_replicas: int = 1
    experts: bool = False
    axes: tuple[str, ...] = AXES

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_replicas(self) -> int:
        """Copies of an expert: one per holder without sharding, else as many as of the model, or a divisor of that."""
        holders = self.dp * self.cp * self.tp // self.ep
        return holders if self.zero_replicas == self.dp * self.cp else math.gcd(holders, self.zero_replicas)


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
    expert_shard: Group  # the part of edp that together holds one copy of them
    expert_replica: Group  # the part of edp that holds the same shard of different copies
    embed: Group  # pipeline ranks with the first or the last stage
    mirror: Group  # pipeline ranks with copies of the same stages

    @property
    def rank(self) -> int:
        return self.world.rank

    def with_link(self, link: Link | None) -> "Mesh":
        """Return this mesh with a simulated link for every group, or without one."""
        groups = {name: getattr(self, name) for name in GROUP_NAMES}
        return replace(self, **{name: replace(group, line=link and Line(link)) for name, group in groups.items()})


GROUP_NAMES = tuple(each.name for each in fields(Mesh) if each.type is Group)
DIMENSION_OF = {name: name for name in (*AXES, "ep")}  # what a group belongs to. (`world` belongs to none.)
DIMENSION_OF |= dict.fromkeys(("pp_forward", "pp_backward", "embed", "mirror"), "pp")
DIMENSION_OF |= dict.fromkeys(("dp_cp", "shard", "replica", "edp", "expert_shard", "expert_replica"), "dp")
DIMENSION_OF |= {"kv_replica": "tp"}


def coordinates(rank: int, degrees: Degrees) -> dict[str, int]:
    """Return the position of `rank` on each axis of the grid."""
    result = {}
    for axis in reversed(degrees.axes):
        rank, result[axis] = divmod(rank, getattr(degrees, axis))
    return result


def all_groups(degrees: Degrees, kv_heads: int | None = None, placement: Placement | None = None) -> dict[str, list]:
    """Return the groups of all ranks: under each name a list of tuples of ranks, which together are the whole world.

    Args:
        kv_heads: number of K/V heads; with more tensor ranks than that, `kv_replica` joins those that share a head.
        placement: of the stages (default: stage i on rank i). `embed` joins the ranks that hold the first or the last
            stage, `mirror` those that hold copies of the same stages.
    """
    grid = np.arange(degrees.world).reshape([getattr(degrees, axis) for axis in degrees.axes])

    def along(*axes: str) -> np.ndarray:
        """(groups, members): ranks that differ in `axes` only. These axes merge into one, all others into rows."""
        moved = sorted(degrees.axes.index(axis) for axis in axes)
        return np.moveaxis(grid, moved, range(-len(axes), 0)).reshape(-1, math.prod(grid.shape[axis] for axis in moved))

    same_head = max(1, degrees.tp // kv_heads) if kv_heads else 1
    zero = along("dp", "cp").reshape(degrees.pp * degrees.tp, degrees.zero_replicas, -1)  # neighbors share a copy
    experts = along("dp", "cp", "tp").reshape(degrees.pp, -1, degrees.ep)
    holders = experts.swapaxes(1, 2)  # of the same experts
    expert_zero = holders.reshape(degrees.pp * degrees.ep, degrees.expert_replicas, -1)
    groups = {
        "world": grid.reshape(1, -1),
        "tp": along("tp"),
        "kv_replica": along("tp").reshape(-1, same_head),
        "cp": along("cp"),
        "pp_forward": along("pp"),
        "pp_backward": along("pp"),
        "dp": along("dp"),
        "dp_cp": along("dp", "cp"),
        "shard": zero.reshape(-1, zero.shape[-1]),
        "replica": zero.swapaxes(1, 2).reshape(-1, zero.shape[1]),
        "ep": experts.reshape(-1, degrees.ep),
        "edp": holders.reshape(-1, holders.shape[-1]),
        "expert_shard": expert_zero.reshape(-1, expert_zero.shape[-1]),
        "expert_replica": expert_zero.swapaxes(1, 2).reshape(-1, expert_zero.shape[1]),
    }
    result = {name: [tuple(ranks) for ranks in rows.tolist()] for name, rows in groups.items()}
    placement = placement or (tuple(range(degrees.pp)),)
    ends = {rank for row in placement for rank in (row[0], row[-1])}
    holders = [set(ranks) for ranks in zip(*placement, strict=True)]  # of each stage
    for name, linked in ("embed", [ends]), ("mirror", holders):
        parts = {tuple(sorted({rank}.union(*(each for each in linked if rank in each)))) for rank in range(degrees.pp)}
        result[name] = [tuple(ranks) for part in sorted(parts) for ranks in along("pp")[:, part].tolist()]
    return result


def build_mesh(degrees: Degrees, device: torch.device, kv_heads: int | None = None, timeout: float = 600.0) -> Mesh:
    """Return the mesh of this rank. All ranks call it together.

    Groups of a mesh with the same members share a communicator, except `pp_forward` and `pp_backward`: on one NCCL
    communicator an early receive of one direction would hold up the sends of the other.
    """
    tp, cp, pp, dp, world_size = degrees.tp, degrees.cp, degrees.pp, degrees.dp, environment().world_size
    if degrees.world != world_size:
        raise UsageError(f"tp {tp} x cp {cp} x pp {pp} x dp {dp} is not {world_size} ranks")
    groups = create_groups(degrees, device, all_groups(degrees, kv_heads), timeout)
    return Mesh(degrees=degrees, device=device, **groups)


def separate(group: Group, timeout: float) -> Group:
    """Return `group` with a gloo communicator of its own, for a thread that communicates while training does."""
    if group.size == 1:
        return group
    handle = dist.new_group(group.ranks, timeout=timedelta(seconds=timeout), backend="gloo")
    return replace(group, handle=handle, backend="gloo")


def create_groups(degrees: Degrees, device: torch.device, groups: dict[str, list], timeout: float) -> dict[str, Group]:
    """Return this rank's group of each name. Only the members of a group connect and wait for each other.

    To others it is a number that they count, as torch names groups by it: all ranks must give the same `groups`. (With
    `use_local_synchronization` a rank would count its own alone, and hang with one that is in more or fewer of them.)
    Only the world has gloo beside NCCL, for what is on the CPU: more gloo meshes would cost time and file descriptors.
    """
    (rank, world_size, _), limit = environment(), timedelta(seconds=timeout)
    unused = () if degrees.experts else ("edp", "expert_shard", "expert_replica")
    handles = {("shared", tuple(range(world_size))): dist.group.WORLD}
    backend = "" if world_size == 1 else "nccl" if "nccl" in dist.get_backend() else dist.get_backend()
    connect = {"device_id": device} if backend == "nccl" else {}  # now, and not at its first use
    result = {}
    for name, divided in groups.items():
        channel = name if name.startswith("pp_") else "shared"
        for ranks in divided:
            if len(ranks) > 1 and (channel, ranks) not in handles and name not in unused:
                options = dist.ProcessGroupNCCL.Options() if backend == "nccl" and channel != "shared" else None
                if options:
                    options.config.max_ctas = 4  # multiprocessors that an early receive may occupy while it waits
                    options._timeout = limit  # or torch warns that this is not the `timeout` below
                with communication_errors():
                    handles[channel, ranks] = dist.new_group(ranks, limit, backend, options, **connect)
            if rank in ranks:
                handle = handles.get((channel, ranks), dist.GroupMember.NON_GROUP_MEMBER if len(ranks) > 1 else None)
                result[name] = Group(name, ranks, ranks.index(rank), handle, backend)
    if world_size > 1:
        meet()
    return result
