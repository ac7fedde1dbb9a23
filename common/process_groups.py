"""The start of torch.distributed, and the mesh: every named group of ranks that talk to each other.

Ranks are laid out innermost first as (tp, cp, pp, dp), as in Llama 3's 4D layout (arXiv:2407.21783, section 3.3.2):
tensor parallelism inside a node, data parallelism across nodes. The ranks of one pipeline stage are folded a second
time into (ep, edp) for experts.
"""

import itertools
import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.config import TrainConfig
from common.errors import CommunicationError, UsageError, first_line


@dataclass(frozen=True)
class Degrees:
    """How many ways each dimension splits.

    `ep` folds the ranks of one pipeline stage, and `zero_replicas` divides the ranks over which ZeRO shards into groups
    that hold copies: they are no factors of `world`.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    zero_replicas: int = 1

    @classmethod
    def of(cls, config: TrainConfig) -> "Degrees":
        """The degrees of a validated configuration. Without ZeRO all data-parallel ranks hold copies."""
        replicas = config.zero_replicas if config.zero else config.dp
        return cls(tp=config.tp, pp=config.pp, dp=config.dp, zero_replicas=replicas)

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def check(self) -> None:
        """Raise UsageError for degrees that make no mesh."""
        for name, value in vars(self).items():
            if value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value} must be at least 1")
        stage = self.tp * self.cp * self.dp
        if stage % self.ep:
            raise UsageError(f"--ep {self.ep} does not divide the {stage} ranks (dp x cp x tp) of a pipeline stage")
        if self.dp * self.cp % self.zero_replicas:
            raise UsageError(f"--zero-replicas {self.zero_replicas} does not divide dp x cp = {self.dp * self.cp}")


@dataclass(frozen=True)
class Group:
    """Ranks that share something: `ranks` are global, in order; `rank` is this process's index among them.

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


# What a pipeline schedule puts where: one row a copy of the model, row[stage] = pipeline rank.
Placement = tuple[tuple[int, ...], ...]

GROUP_NAMES = (
    *("world", "tp", "kv_replica", "cp", "pp_forward", "pp_backward", "dp", "dp_cp", "shard", "replica"),
    *("ep", "edp", "embed", "mirror"),
)


def coordinates(rank: int, degrees: Degrees) -> dict[str, int]:
    """Where `rank` stands on each axis of the mesh, tp innermost."""
    result = {}
    for axis in ("tp", "cp", "pp", "dp"):
        rank, result[axis] = divmod(rank, getattr(degrees, axis))
    return result


def layout(
    rank: int, degrees: Degrees, kv_heads: int | None = None, placement: Placement | None = None
) -> dict[str, tuple[int, ...]]:
    """Members of every group of `rank`, by name. Pure: needs no process group, so it can be asked for any world.

    Args:
        kv_heads: number of K/V heads; with more tensor ranks than that, `kv_replica` holds those that share a head.
        placement: which pipeline ranks hold which stage (default: stage i on rank i). Decides `embed` (the ranks that
            hold the first or the last stage) and `mirror` (the ranks that hold copies of this rank's stages).
    """
    mine = coordinates(rank, degrees)
    placement = placement or (tuple(range(degrees.pp)),)

    def members(allowed: dict[str, set[int]]) -> tuple[int, ...]:
        """Ranks whose coordinate lies in `allowed` on the named axes and equals mine on the others, in rank order."""
        wanted = {axis: allowed.get(axis, {mine[axis]}) for axis in ("dp", "pp", "cp", "tp")}  # outermost first
        result = []
        for dp, pp, cp, tp in itertools.product(*(sorted(wanted[axis]) for axis in ("dp", "pp", "cp", "tp"))):
            result.append(((dp * degrees.pp + pp) * degrees.cp + cp) * degrees.tp + tp)
        return tuple(result)

    def all_of(axis: str) -> set[int]:
        return set(range(getattr(degrees, axis)))

    replicas = max(1, degrees.tp // kv_heads) if kv_heads else 1
    same_head = {tp for tp in range(degrees.tp) if tp // replicas == mine["tp"] // replicas}
    ends = {row[0] for row in placement} | {row[-1] for row in placement}
    stages = {stage for row in placement for stage, holder in enumerate(row) if holder == mine["pp"]}
    copies = {row[stage] for row in placement for stage in stages}
    stage_ranks = members({"tp": all_of("tp"), "cp": all_of("cp"), "dp": all_of("dp")})
    dp_cp = members({"dp": all_of("dp"), "cp": all_of("cp")})
    size = len(dp_cp) // degrees.zero_replicas  # neighbours share a model, so that most traffic stays near
    copy, part = divmod(dp_cp.index(rank), size)
    fold, place = stage_ranks.index(rank) // degrees.ep, stage_ranks.index(rank) % degrees.ep
    return {
        "world": tuple(range(degrees.world)),
        "tp": members({"tp": all_of("tp")}),
        "kv_replica": members({"tp": same_head}),
        "cp": members({"cp": all_of("cp")}),
        "pp_forward": members({"pp": all_of("pp")}),
        "pp_backward": members({"pp": all_of("pp")}),
        "dp": members({"dp": all_of("dp")}),
        "dp_cp": dp_cp,
        "shard": dp_cp[copy * size : (copy + 1) * size],
        "replica": dp_cp[part::size],
        "ep": stage_ranks[fold * degrees.ep : (fold + 1) * degrees.ep],
        "edp": stage_ranks[place :: degrees.ep],
        "embed": members({"pp": ends}) if mine["pp"] in ends else (rank,),
        "mirror": members({"pp": copies}) if len(placement) > 1 else (rank,),
    }


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all ranks: its groups, degrees and device."""

    degrees: Degrees
    device: torch.device
    world: Group
    tp: Group
    kv_replica: Group
    cp: Group
    pp_forward: Group
    pp_backward: Group
    dp: Group
    dp_cp: Group
    shard: Group
    replica: Group
    ep: Group
    edp: Group
    embed: Group
    mirror: Group

    @property
    def rank(self) -> int:
        return self.world.rank


class Environment(NamedTuple):
    """This process among those that the launcher started."""

    rank: int
    world_size: int
    local_rank: int


def environment() -> Environment:
    """What torchrun has set; (0, 1, 0) for plain `python train.py`."""
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    return Environment(*(int(os.environ.get(name, default)) for name, default in names.items()))


def init_distributed(device: str = "auto", timeout: float = 600.0, init_method: str = "env://") -> torch.device:
    """Choose this rank's device and start torch.distributed. A world of one rank does without it.

    NCCL where every local rank has a GPU of its own, else gloo (also for ranks that share a GPU: `collectives` then
    stages tensors through the CPU). Raises UsageError for `--device cuda` without CUDA.
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
    own_gpu = use_cuda and int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) <= torch.cuda.device_count()
    options = {"backend": "cpu:gloo,cuda:nccl", "device_id": chosen} if own_gpu else {"backend": "gloo"}
    options |= {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=timeout)}
    try:
        store, *_ = next(dist.rendezvous(init_method, rank, world_size, timeout=options["timeout"]))
        store.set_timeout(options["timeout"])
        if dist.is_torchelastic_launched():
            store = _part_of_this_start(store, rank, world_size, timeout)
        dist.init_process_group(store=store, **options)
        _meet()
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(f"rendezvous of {world_size} ranks failed: {first_line(error)}") from error
    return chosen


def _part_of_this_start(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.Store:
    """The part of torchrun's store that no earlier start of these ranks has written to.

    torchrun restarts ranks on the same store, and what dead ranks left there leads to nobody. Counting restarts does
    not help, as every node counts its own (pytorch issue 135712). So each rank asks under a new name, and rank 0
    answers with the name of the part. It also answers what dead ranks have asked: nobody reads that.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"question/{rank}", name)
        part = dist.PrefixStore(store.get(f"answer/{name}").decode(), store)
        part.add("arrived", 1)
        return part
    part, end = dist.PrefixStore(name, store), time.monotonic() + timeout
    while (arrived := part.add("arrived", 0)) < world_size - 1:
        for question in [f"question/{each}" for each in range(1, world_size)]:
            if store.check([question]):
                store.set(f"answer/{store.get(question).decode()}", name)
        if time.monotonic() > end:
            raise RuntimeError(f"only {arrived + 1} ranks came within {timeout:g} s")
        time.sleep(0.01)
    return part


def build_mesh(degrees: Degrees, device: torch.device, kv_heads: int | None = None, timeout: float = 600.0) -> Mesh:
    """The mesh of this rank. All ranks call it together: each group is created by all ranks in one order.

    Groups with the same members share one communicator, except `pp_forward` and `pp_backward`: on one NCCL communicator
    an early receive of the one direction would hold up the sends of the other.
    """
    degrees.check()
    _, world_size, _ = environment()
    if degrees.world != world_size:
        raise UsageError(
            f"tp {degrees.tp} x cp {degrees.cp} x pp {degrees.pp} x dp {degrees.dp} is not {world_size} ranks"
        )
    layouts = [layout(each, degrees, kv_heads) for each in range(world_size)]
    return Mesh(degrees=degrees, device=device, **_make_groups(GROUP_NAMES, layouts, timeout))


def place_stages(mesh: Mesh, placement: Placement, timeout: float = 600.0) -> Mesh:
    """`mesh` with the groups `embed` and `mirror` for this placement of pipeline stages. All ranks call it together."""
    if placement == (tuple(range(mesh.degrees.pp)),):  # that of `build_mesh`
        return mesh
    layouts = [layout(each, mesh.degrees, placement=placement) for each in range(mesh.world.size)]
    return replace(mesh, **_make_groups(("embed", "mirror"), layouts, timeout))


def _make_groups(names: Iterable[str], layouts: list[dict[str, tuple[int, ...]]], timeout: float) -> dict[str, Group]:
    """This rank's groups of these names; `layouts` holds what `layout` says of every rank."""
    rank, world_size, _ = environment()
    handles = {("shared", layouts[0]["world"]): dist.group.WORLD} if world_size > 1 else {}
    backend = "" if world_size == 1 else "gloo" if dist.get_backend() == "gloo" else "nccl"
    groups = {}
    for name in names:
        channel = name if name.startswith("pp_") else "shared"
        for members in dict.fromkeys(each[name] for each in layouts):
            if len(members) > 1 and (channel, members) not in handles:
                handles[channel, members] = dist.new_group(members, timeout=timedelta(seconds=timeout))
        members = layouts[rank][name]
        groups[name] = Group(name, members, members.index(rank), handles.get((channel, members)), backend)
    if world_size > 1:
        _meet()
    return groups


def _meet() -> None:
    """Return when all ranks have come here.

    gloo makes a group as soon as this rank's own connections stand, while others may still be making theirs: a rank
    that ended right then would look to them like one that crashed. (A CPU tensor, since it is gloo that connects.)
    """
    dist.all_reduce(torch.zeros(1))
