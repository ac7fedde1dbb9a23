"""What the tests of mutants share: each is trained beside the unmutated code, which passes what the mutant must not."""

from collections.abc import Callable

import pytest

from tests.harness.ranks import run_ranks
from tests.mutants.patches import patched
from tests.parity.runs import TOLERANCE, Result, assert_parity, run_cases

Results = dict[tuple[str, str | None], Result]  # by (flags, mutant); of the unmutated code for all flags too


def with_and_without(flags: dict[str, str]) -> list[tuple[str, str | None]]:
    """(flags, mutant) for every mutant and, without one, for all flags."""
    return [(case, name) for name, case in flags.items()] + [(case, None) for case in dict.fromkeys(flags.values())]


def train_mutants(step: int, cases: dict[str, tuple[int, str]]) -> Results:
    """Train under every mutant with its (ranks, flags). One world for each number of ranks."""
    found = {}
    for world in sorted({ranks for ranks, _ in cases.values()}):
        mine = with_and_without({name: flags for name, (ranks, flags) in cases.items() if ranks == world})
        found |= zip(mine, run_cases(world, step, *zip(*mine, strict=True)), strict=True)
    return found


def assert_rejected(results: Results, flags: str, name: str, expected: Result, tolerance: float = TOLERANCE) -> None:
    """The unmutated code trains as `expected`, and the mutant does not."""
    assert_parity(results[flags, None], expected, flags, tolerance)
    with pytest.raises(AssertionError, match="relative differences above"):
        assert_parity(results[flags, name], expected, name, tolerance)


def observe_mutants(world: int, observers: dict[str, Callable]) -> dict[tuple[str, str | None], list]:
    """What each mutant's observer returns without it (name, None) and under it (name, name), by rank."""
    ranks = run_ranks(world, _observe, observers)
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


def _observe(observers: dict[str, Callable]) -> dict[tuple[str, str | None], object]:
    found, sound = {}, {}
    for name, observe in observers.items():
        if observe not in sound:
            sound[observe] = observe()
        with patched(name):
            found |= {(name, None): sound[observe], (name, name): observe()}
    return found


def assert_noticed(check: Callable, observed: dict, name: str, message: str | None = None) -> None:
    """The check passes what the unmutated code does, and not what the mutant does."""
    check(observed[name, None])
    with pytest.raises(AssertionError, match=message):
        check(observed[name, name])
