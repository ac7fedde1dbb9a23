"""Schedules that compute each backward in one go: (ranks, micro-batches, chunks) -> the actions of each rank.

Letters: p ranks, m micro-batches, v stages on each rank ("chunks", --virtual-stages); F and B are the times of a
stage's forward and backward. The bubble is the time that a rank spends waiting, if all stages are equal and messages
take no time. On 3 ranks with 4 micro-batches, if B = 2F:

    afab    rank 0  F0 F1 F2 F3 ..................B0--- B1--- B2--- B3---
            rank 1  ...F0 F1 F2 F3 .........B0--- B1--- B2--- B3---
            rank 2  ......F0 F1 F2 F3 B0--- B1--- B2--- B3---
    1f1b    rank 0  F0 F1 F2 ............B0--- F3 B1--- ...B2--- ...B3---
            rank 1  ...F0 F1 ......B0--- F2 B1--- F3 B2--- ...B3---
            rank 2  ......F0 B0--- F1 B1--- F2 B2--- F3 B3---
    interleaved with v = 2, on 2 ranks with 2 micro-batches. F0.1 is the forward of micro-batch 0 through chunk 1:
            rank 0  F0-- F1-- F0.1 F1.1 ..........B0.1----- .....B1.1----- B0------- B1-------
            rank 1  .....F0-- F1-- F0.1 B0.1----- F1.1 B1.1----- B0------- B1-------
"""

from common.errors import UsageError
from step05_pipeline.schedules.actions import Action, expand_pattern

# ---- one stage on each rank ------------------------------------------------------------------------------------------


def naive(p: int, m: int, v: int) -> list[list[Action]]:
    """One micro-batch after another, so only one rank works at a time. Bubble: (p - 1) m (F + B)."""
    return [expand_pattern((m, "F B"), micro_batches=m) for _ in range(p)]


def all_forward_all_backward(p: int, m: int, v: int) -> list[list[Action]]:
    """GPipe (Huang et al., arXiv:1811.06965). Bubble: (p - 1)(F + B)."""
    # --- write this yourself ---
    return [expand_pattern((m, "F"), (m, "B"), micro_batches=m) for _ in range(p)]
    # --- until here ---


def one_forward_one_backward(p: int, m: int, v: int) -> list[list[Action]]:
    """PipeDream-Flush (Narayanan et al., arXiv:2006.09503). Bubble: (p - 1)(F + B), as in AFAB; fewer activations."""
    # --- write this yourself ---
    rows = []
    for rank in range(p):
        ahead = min(m, p - 1 - rank)  # forwards before the first pair: one for each later rank
        rows.append(expand_pattern((ahead, "F"), (m - ahead, "F B"), (ahead, "B"), micro_batches=m))
    return rows
    # --- until here ---


# ---- several stages on each rank -------------------------------------------------------------------------------------


def interleaved(p: int, m: int, v: int) -> list[list[Action]]:
    """Megatron-LM (Narayanan et al., arXiv:2104.04473, section 2.2.2): depth first, p micro-batches at a time.

    Bubble: (p - 1)(F + B), which is 1/v of 1F1B's, for about v times its messages. Here a stage is 1/v of what it is
    with one stage on each rank.
    """
    if m % p:
        raise UsageError(
            f"--schedule interleaved: {m} micro-batches are not a multiple of --pp {p}; llama3 takes any number"
        )
    return in_groups(p, m, v, n=p)


def in_groups(p: int, m: int, v: int, n: int) -> list[list[Action]]:
    """Depth first: n >= p consecutive micro-batches pass through a stage, then through the rank's next one.

    Groups of n are planned in full, and micro-batches that do not exist are left out.
    """
    groups = range(0, m, n)
    # expand_pattern numbers a rank's forwards and backwards 0, 1, ... Here is which (micro-batch, chunk) each number is
    forwards = [(first + i, chunk) for first in groups for chunk in range(v) for i in range(n)]
    backwards = [(first + i, chunk) for first in groups for chunk in reversed(range(v)) for i in range(n)]
    rows = []
    for rank in range(p):
        ahead = min(len(forwards), forwards_ahead(p, v, n, rank))
        table = expand_pattern((ahead, "F"), (len(forwards) - ahead, "F B"), (ahead, "B"), micro_batches=len(forwards))
        row = [Action(each.kind, *(forwards if each.kind == "F" else backwards)[each.micro_batch]) for each in table]
        rows.append([action for action in row if action.micro_batch < m])
    return rows


def forwards_ahead(p: int, v: int, n: int, rank: int) -> int:
    """Forwards of a rank before its first backward.

    Those of (v - 1) n pass through all chunks but its last. Each later rank adds 2: while the first micro-batch travels
    down to that rank and its gradient back, this rank can do two more forwards. With one chunk (1F1B) 1 is enough.
    """
    return (p - 1 - rank) * (2 if v > 1 else 1) + (v - 1) * n
