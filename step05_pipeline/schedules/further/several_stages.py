"""Further schedules with several stages on each rank: between breadth first and depth first.

Letters as in whole_backward.py: p ranks, m micro-batches, v stages on each rank, each 1/v of what it is with one.
"""

from common.errors import UsageError
from step05_pipeline.schedules.actions import Action
from step05_pipeline.schedules.whole_backward import in_groups


def breadth_first(p: int, m: int, v: int) -> list[list[Action]]:
    """Lamy-Poirier (arXiv:2211.05953): all micro-batches pass through a stage before the rank's next stage begins.

    Bubble: (p - 1)(F + B), if m >= p.
    """
    forwards = [Action("F", i, chunk) for chunk in range(v) for i in range(m)]
    backwards = [Action("B", i, chunk) for chunk in reversed(range(v)) for i in range(m)]
    return [forwards + backwards for _ in range(p)]


def llama3(p: int, m: int, v: int, consecutive: int | None = None) -> list[list[Action]]:
    """Llama 3 (arXiv:2407.21783, section 3.3.2, figure 6): N consecutive micro-batches pass through a stage at a time.

    N = p is `interleaved`, N = m is breadth-first with 1F1B's order of F and B. Any number of micro-batches works.
    Bubble: (p - 1)(F + B), if N divides m.

    Args:
        consecutive: N, at least p (with fewer, a rank would wait for its own output to travel round the loop).
    """
    if consecutive is not None and consecutive < p:
        raise UsageError(f"--schedule llama3: {consecutive} consecutive micro-batches are fewer than --pp {p}")
    return in_groups(p, m, v, _group_size(p, m, consecutive))


def _group_size(p: int, m: int, consecutive: int | None) -> int:
    """N of Llama 3: p unless stated otherwise, at most m, at least p."""
    return max(p, min(m, consecutive or p))
