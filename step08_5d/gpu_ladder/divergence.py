"""Control divergence: a warp whose threads disagree at an `if` goes both ways, one after the other.

All threads of a warp execute the same instruction. Those that want another branch wait until it has ended. So a warp
takes the sum of the branches that any of its threads takes, and what counts is how threads are sorted into warps.
"""

from typing import NamedTuple

import numpy as np

from common.drawing.tables import print_comparison
from step08_5d.gpu_ladder.traffic import LANES

WARPS = 1 << 14


class Case(NamedTuple):
    """A choice for each thread, and how many different ones a warp has on average, predicted."""

    name: str
    choices: np.ndarray
    predicted: float


def paths(choices: np.ndarray) -> float:
    """How many branches a warp goes through on average, one after the other. `choices`: of thread 0, 1, 2, ..."""
    warps = np.sort(choices.reshape(-1, LANES), axis=1)
    return 1 + float((warps[:, 1:] != warps[:, :-1]).sum(axis=1).mean())


def expected_paths(*shares: float) -> float:
    """The same if each thread chooses on its own, with these probabilities: a branch is free if all 32 avoid it."""
    return sum(1 - (1 - share) ** LANES for share in shares)


def cases(warps: int) -> list[Case]:
    threads, random = np.arange(warps * LANES), np.random.default_rng(0)
    negative = {share: random.random(len(threads)) < share for share in (0.5, 0.1, 0.01)}
    expert = random.integers(8, size=len(threads))
    return [
        Case("if (threadIdx.x % 2)", threads % 2, 2),
        Case("if (threadIdx.x / 32 % 2)", threads // LANES % 2, 1),
        *(
            Case(f"if (x < 0), {share:.0%} negative", x, expected_paths(share, 1 - share))
            for share, x in negative.items()
        ),
        Case("the same, half negative, sorted", np.sort(negative[0.5]), 1),
        Case("switch (expert), 8 of them", expert, expected_paths(*[1 / 8] * 8)),
        Case("the same, sorted by expert", np.sort(expert), 1),
        Case("if (i < size), one block of 256 too many", threads < len(threads) - 256 + 100, 1),
    ]


def divergence(quick: bool) -> None:
    """How many branches a warp goes through, by what its threads decide."""
    found = [(case.name, case.predicted, paths(case.choices)) for case in cases(WARPS // (16 if quick else 1))]
    print_comparison("Branches that a warp executes, on average", "", found, ".3f")
