"""DualPipe, which enters the pipeline at both ends, and its half, DualPipeV. Letters as in split_backward.py.

On 4 ranks with 8 micro-batches, if F = I = W and nothing runs as one. Even micro-batches enter at rank 0, odd ones at
rank 3 (an F1 here is the F1.1 of `Action`, because the copy for odd ones is chunk 1):

    rank 0  F0 F2 F4 F1 I1 W1 F3 F6 B3--- F5 B0--- B5--- F7 ...B2--- B7--- I4 W4 I6 W6
    rank 1  ...F0 F1 F2 F3 F4 B1--- F5 B0--- F6 B3--- F7 B2--- B5--- B4--- I7 I6 W7 W6
    rank 2  ...F1 F0 F3 F2 F5 B0--- F4 B1--- F7 B2--- F6 B3--- B4--- B5--- I6 I7 W6 W7
    rank 3  F1 F3 F5 F0 I0 W0 F2 F7 B2--- F4 B1--- B4--- F6 ...B3--- B6--- I5 W5 I7 W7
"""

from common.errors import UsageError
from step05_pipeline.schedules.actions import Action, expand_pattern


def dualpipe(p: int, m: int, v: int) -> list[list[Action]]:
    """DeepSeek-V3 (arXiv:2412.19437, section 3.2.1): micro-batches enter at both ends, each end with its own copy.

    Even micro-batches pass through copy 0, odd ones through copy 1. DeepSeek's bubble, for m >= 2p, is
    (p/2 - 1)(F&B + B - 3W), where F&B is the time of an F and a B of the other direction that run as one. It is that of
    the ranks in the middle; outer ones wait less, if F&B < F + B. Here F and B run one after the other, and the output
    of the first is sent before the second is done: (p/2 - 1)(F + B - 2W), if F = I.
    """
    if p % 2:
        raise UsageError(f"--schedule dualpipe needs an even --pp, not {p}; dualpipev takes any")
    near = [_dualpipe_rank(rank, p, m) for rank in range(p // 2)]
    # The other half of the ranks does the same with its own copy
    far = [[Action(each.kind, each.micro_batch, 1 - each.chunk) for each in row] for row in reversed(near)]
    # Each rank holds one stage of each copy, so the chunk is the copy
    rows = [[Action(each.kind, 2 * each.micro_batch + each.chunk, each.chunk) for each in row] for row in near + far]
    return [[action for action in row if action.micro_batch < m] for row in rows]


def _dualpipe_rank(rank: int, p: int, m: int) -> list[Action]:
    """A rank of the first half. 0 is the copy that enters on this side, 1 the other; each counts its micro-batches."""
    n = max(p, -(-m // 2))  # micro-batches of each copy
    inner = p // 2 - 1 - rank  # ranks from here to the middle
    return expand_pattern(
        (2 * inner, "F.0"),
        (rank + 1, "F.0 F.1"),
        (inner, "I.1 W F.1"),
        (n - p + rank + 1, "F.0 B.1 F.1 B.0"),
        (inner, "B.1 F.1 B.0"),
        ((rank + 1) // 2, "B.1 B.0"),  # of the last 2 (rank + 1) backwards, the first half is whole
        ((rank + 1) % 2, "B.1 I.0"),
        ((rank + 1) // 2, "I.1 I.0"),
        (inner, "W I.0"),
        micro_batches=n,
    )


def dualpipe_v(p: int, m: int, v: int) -> list[list[Action]]:
    """DualPipe cut in half (Sea AI Lab, "DualPipe could be better without the Dual"): no second copy of the parameters.

    The two halves of DualPipe on 2p ranks mirror each other, so one half is enough: what rank p - 1 would send to its
    mirror image stays on rank p - 1, as input of its chunk 1. Bubble: DualPipe's for 2p ranks, with two of its stages
    on each rank.
    """
    return [[action for action in _dualpipe_rank(rank, 2 * p, 2 * m) if action.micro_batch < m] for rank in range(p)]
