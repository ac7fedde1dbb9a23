"""Pairwise covering arrays: few cases in which any two values of any two factors meet.

Most mistakes need one or two things to come together, and a dozen cases can show all pairs of what has thousands of
combinations (Cohen et al., "The AETG System", IEEE TSE 23(7), 1997). The result depends on the arguments alone.
"""

import itertools
import os
from collections.abc import Iterable, Sequence


def spelled_out(text: str) -> list[tuple[str, ...]]:
    """The words of every line that is no comment; a word like 0|1|3 stands for a line with each."""
    lines = [line.split() for line in text.splitlines() if line.strip() and "#" not in line]
    return [words for line in lines for words in itertools.product(*(word.split("|") for word in line))]


def pairwise(factors: dict[str, Sequence], forbidden: Iterable[dict] = ()) -> list[dict]:
    """Cases, as {factor: value} for every factor, that together show every pair of values that can occur.

    Args:
        factors: each with its values; of all their combinations, the one with the most new pairs is taken in turn.
        forbidden: parts of cases; a case that contains one of them is never made.

    Raises ValueError when `forbidden` leaves a value no case at all.
    """
    combinations = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    forbidden = [part.items() for part in forbidden]
    cases = [case for case in combinations if not any(part <= case.items() for part in forbidden)]
    for name, value in ((name, value) for name, values in factors.items() for value in values):
        if all(case[name] != value for case in cases):
            raise ValueError(f"no case is left for {name} = {value!r}")
    numbers: dict[tuple, int] = {}  # of pairs; a set of pairs is an integer with their bits
    pairs = [[*itertools.combinations(case.items(), 2)] for case in cases]
    sets = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in each) for each in pairs]
    missing, chosen = (1 << len(numbers)) - 1, []
    while missing:
        best = max(range(len(cases)), key=lambda index: (sets[index] & missing).bit_count())
        chosen.append(cases[best])
        missing &= ~sets[best]
    return chosen


def thin(arrays: dict[int, list[dict]]) -> dict[int, list[dict]]:
    """A few of the cases for each number of ranks, for a quick run of the tests.

    Together they still have every single value of every factor, and each number of ranks a case. With the environment
    variable TEST_ALL=1 (`make test-all`) all of them, and so every pair. Hard cases that have a name do not pass
    through here: they always run.
    """
    if os.environ.get("TEST_ALL"):
        return arrays
    cases = [(world, {**case, "ranks": world}) for world, array in arrays.items() for case in array]
    missing, kept = {value for _, case in cases for value in case.items()}, {world: [] for world in arrays}
    while missing:
        cases.remove(chosen := max(cases, key=lambda each: len(missing & each[1].items())))
        world, best = chosen
        kept[world].append({name: value for name, value in best.items() if name != "ranks"})
        missing -= best.items()
    return kept
