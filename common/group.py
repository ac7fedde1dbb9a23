"""A group of ranks that communicate: all that a mechanism needs to know of the others.

How the groups of a run come from its degrees is in process_groups.py.
"""

from dataclasses import dataclass, field

import torch.distributed as dist

from common.link import Line


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
    line: Line | None = field(default=None, compare=False)  # a simulated slower one (--link)

    @classmethod
    def of(cls, handle: dist.ProcessGroup | None = None, name: str = "group") -> "Group":
        """Return the group of a process group that a program has made itself; by default of all its ranks.

        With it, a mechanism runs in any program that has called `init_process_group`, and needs no mesh.

        Args:
            name: the one under which collectives are counted and recorded.

        Raises ValueError if there is no process group, or this process is not in it.
        """
        if handle == dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` returns to all others
            raise ValueError(f"rank {dist.get_rank()} is not in the process group that is to be {name!r}")
        size = dist.get_world_size(handle)  # raises ValueError before `init_process_group`
        handle = handle or dist.group.WORLD
        ranks = tuple(dist.get_global_rank(handle, index) for index in range(size))
        if size == 1:
            return cls(name, ranks, 0)
        backends = dist.get_backend_config(handle)  # as cpu:gloo,cuda:nccl, for which `get_backend` says "undefined"
        backend = next((each for each in ("nccl", "gloo") if each in backends), backends)
        return cls(name, ranks, dist.get_rank(handle), handle, backend)

    @property
    def size(self) -> int:
        return len(self.ranks)
