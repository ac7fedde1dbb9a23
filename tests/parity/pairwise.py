"""Pairwise covering arrays: few cases in which any two values of any two factors meet.

Most mistakes need one or two things to come together, and a dozen cases can show all pairs of what has 2,000
combinations (Cohen et al., "The AETG System", IEEE TSE 23(7), 1997). The result depends on the arguments alone.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Sequence

CANDIDATES = 50  # complete cases of which the one with the most new pairs is taken


def pairwise(factors: dict[str, Sequence], forbidden: Iterable[dict] = ()) -> list[dict]:
    """Cases, as {factor: value} for every factor, that together show every pair of values that can occur.

    Args:
        factors: two or more, each with its values: hashable, at least one, all different.
        forbidden: parts of cases; a case that contains one of them is never made.

    Raises ValueError when `forbidden` leaves a value no case at all.
    """
    forbidden = [part.items() for part in forbidden]
    missing = dict.fromkeys(  # in order, which a set would not keep
        frozenset({(one, a), (other, b)})
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[other])
    )
    cases, used = [], Counter()
    while missing:
        best, most, candidates = None, 0, 0
        for pair in list(missing):
            # Each candidate chooses its values in another order, or all would make the same mistakes
            names = list(factors)[candidates % len(factors) :] + list(factors)[: candidates % len(factors)]
            case = _complete(dict(pair), names, factors, forbidden, missing, used)
            if case is None:
                del missing[pair]  # the two exclude each other
                continue
            if (new := sum(each in missing for each in _pairs(case))) > most:
                best, most = case, new
            candidates += 1
            if candidates == CANDIDATES:
                break
        if best is not None:
            cases.append({name: best[name] for name in factors})
            used.update(best.items())
            for pair in _pairs(best):
                missing.pop(pair, None)
    for name, value in ((name, value) for name, values in factors.items() for value in values):
        if all(case[name] != value for case in cases):
            raise ValueError(f"no case is left for {name} = {value!r}")
    return cases


def thin(cases: list[dict]) -> list[dict]:
    """A few of the cases, in which every single value of every factor still occurs, for a quick run of the tests.

    With the environment variable TEST_ALL=1 (`make test-all`) all of them, and so every pair. Hard cases that have a
    name do not pass through here: they always run.
    """
    if os.environ.get("TEST_ALL"):
        return cases
    missing, kept = {value for case in cases for value in case.items()}, []
    while missing:
        kept.append(max(cases, key=lambda case: len(missing & case.items())))
        missing -= kept[-1].items()
    return kept


def _pairs(case: dict) -> list[frozenset]:
    return [frozenset(pair) for pair in itertools.combinations(case.items(), 2)]


def _complete(
    case: dict, names: list[str], factors: dict, forbidden: list, missing: dict, used: Counter
) -> dict | None:
    """`case` with a value for each of `names`, chosen for the `missing` pairs that they bring; None: there is none."""
    if any(part <= case.items() for part in forbidden):
        return None
    open_names = [name for name in names if name not in case]
    if not open_names:
        return case
    name = open_names[0]

    def rank(value) -> tuple[int, int]:
        """Most new pairs first; of equals the one that was used least; of those, as sorting is stable, the first."""
        new = sum(frozenset({item, (name, value)}) in missing for item in case.items())
        return -new, used[name, value]

    for value in sorted(factors[name], key=rank):
        found = _complete(case | {name: value}, open_names[1:], factors, forbidden, missing, used)
        if found is not None:
            return found
    return None
