"""Every pipeline schedule, each one a short function: (ranks, micro-batches, chunks) -> the actions of each rank.

p: ranks, m: micro-batches, v: stages on each rank ("chunks", --virtual-stages). F and B: time of a forward and of a
backward. The bubble is what is lost to waiting, of equal stages without communication time. This file holds those that
compute a backward in one go; in `zero_bubble.py` are those that split it.

A schedule of your own: write a function like these, in this file or in a file for --schedule-file.
"""

from common.errors import UsageError
from step05_pipeline.schedules.actions import (
    SCHEDULES,
    Action,
    Schedule,
    bidirectional,
    expand_pattern,
    looped,
    schedule,
    v_shaped,
)
from step05_pipeline.schedules.files import read

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "bidirectional",
    "build",
    "looped",
    "read",
    "schedule",
    "expand_pattern",
    "v_shaped",
]


def build(name: str, ranks: int, micro_batches: int, chunks: int | None = None, **options) -> Schedule:
    """The schedule of that name.

    Args:
        ranks: of the pipeline, --pp.
        chunks: --virtual-stages, stages on each rank (of one copy of the model). None: what the schedule asks for.
        options: of the schedule's function (`llama3`: consecutive).

    Raises UsageError for an unknown name, and for numbers that the schedule cannot do.
    """
    if name not in SCHEDULES:
        raise UsageError(f"--schedule {name} is unknown; there are {', '.join(sorted(SCHEDULES))}")
    return SCHEDULES[name].build(ranks, micro_batches, chunks, **options)


# ---- one stage on each rank ------------------------------------------------------------------------------------------


@schedule("naive", in_flight=lambda p, m, v, rank: 1)
def naive(p: int, m: int, v: int) -> list[list[Action]]:
    """One micro-batch after the other, so that one rank works at a time. Bubble: (p - 1) m (F + B)."""
    return [expand_pattern((m, "F B"), micro_batches=m) for _ in range(p)]


@schedule("afab", in_flight=lambda p, m, v, rank: m)
def all_forward_all_backward(p: int, m: int, v: int) -> list[list[Action]]:
    """GPipe (Huang et al., arXiv:1811.06965). Bubble: (p - 1)(F + B)."""
    return [expand_pattern((m, "F"), (m, "B"), micro_batches=m) for _ in range(p)]


@schedule("1f1b", in_flight=lambda p, m, v, rank: min(m, p - rank))
def one_forward_one_backward(p: int, m: int, v: int) -> list[list[Action]]:
    """PipeDream-Flush (Narayanan et al., arXiv:2006.09503). Bubble: (p - 1)(F + B), as AFAB; fewer activations."""
    rows = []
    for rank in range(p):
        ahead = min(m, p - 1 - rank)  # forwards until the first gradient can be back
        rows.append(expand_pattern((ahead, "F"), (m - ahead, "F B"), (ahead, "B"), micro_batches=m))
    return rows


# ---- several stages on each rank -------------------------------------------------------------------------------------


@schedule("breadth-first", chunks=None, in_flight=lambda p, m, v, rank: m * v)
def breadth_first(p: int, m: int, v: int) -> list[list[Action]]:
    """Lamy-Poirier (arXiv:2211.05953): all micro-batches through a stage before the next.

    Bubble: (p - 1)(F + B), if m >= p. Here and below F and B are those of a stage: 1/v of what they are with one
    stage on each rank.
    """
    forwards = [Action("F", i, chunk) for chunk in range(v) for i in range(m)]
    backwards = [Action("B", i, chunk) for chunk in reversed(range(v)) for i in range(m)]
    return [forwards + backwards for _ in range(p)]


def _consecutive(p: int, m: int, consecutive: int | None) -> int:
    """N of Llama 3: p where nobody says it, and never more than there are micro-batches, nor fewer than ranks."""
    return max(p, min(m, consecutive or p))


def _llama3_in_flight(p: int, m: int, v: int, rank: int, consecutive: int | None = None) -> int:
    if v == 1:
        return min(m, p - rank)
    return min(m * v, 2 * (p - 1 - rank) + (v - 1) * _consecutive(p, m, consecutive) + 1)


@schedule("llama3", chunks=None, in_flight=_llama3_in_flight)
def llama3(p: int, m: int, v: int, consecutive: int | None = None) -> list[list[Action]]:
    """Llama 3 (arXiv:2407.21783, section 3.3.2, figure 6): N consecutive micro-batches through a stage before the next.

    N = p is `interleaved`, N = m is breadth-first with 1F1B's order of F and B. Any number of micro-batches: groups are
    planned full, and what does not exist is left out. Bubble: (p - 1)(F + B), when N divides m.

    Args:
        consecutive: N, at least p. With fewer, a rank would wait for its own output to come round.
    """
    if consecutive is not None and consecutive < p:
        raise UsageError(f"--schedule llama3: {consecutive} consecutive micro-batches are fewer than --pp {p}")
    n = _consecutive(p, m, consecutive)
    groups = range(0, m, n)
    order = [(first + i, chunk) for first in groups for chunk in range(v) for i in range(n)]
    back = [(first + i, chunk) for first in groups for chunk in reversed(range(v)) for i in range(n)]
    rows = []
    for rank in range(p):
        # Every rank needs (v - 1) N forwards to come to its last chunk, and 2 for each rank that comes after it: one
        # for the forward's way down, one for the backward's way up. One chunk is 1F1B, where 1 is enough.
        ahead = min(len(order), (p - 1 - rank) * (2 if v > 1 else 1) + (v - 1) * n)
        table = expand_pattern((ahead, "F"), (len(order) - ahead, "F B"), (ahead, "B"), micro_batches=len(order))
        row = [Action(each.kind, *(order if each.kind == "F" else back)[each.micro_batch]) for each in table]
        rows.append([action for action in row if action.micro_batch < m])
    return rows


@schedule("interleaved", chunks=None, in_flight=_llama3_in_flight)
def interleaved(p: int, m: int, v: int) -> list[list[Action]]:
    """Megatron-LM (Narayanan et al., arXiv:2104.04473, section 2.2.2): depth first, p micro-batches at a time.

    Bubble: (p - 1)(F + B), 1/v of 1F1B's, for about v times its messages.
    """
    if m % p:
        raise UsageError(
            f"--schedule interleaved: {m} micro-batches are not a multiple of --pp {p}; llama3 takes any number"
        )
    return llama3(p, m, v, consecutive=p)


from step05_pipeline.schedules import zero_bubble  # noqa: E402, F401  the others register themselves, after these
