"""The cases of a covering array show every pair that can occur, and none that must not."""

import itertools

import pytest

from tests.parity.pairwise import pairwise, thin

FACTORS = {
    "stage": [0, 1, 2, 3],
    "replicas": [1, 2, 4],
    "reduce": ["micro-batch", "step"],
    "recompute": ["none", "selective", "full"],
    "tied": [False, True],
    "optimizer": ["sgd", "adamw"],
}
FORBIDDEN = [
    {"stage": 0, "replicas": 2},
    {"stage": 0, "replicas": 4},
    {"stage": 0, "reduce": "step"},
    {"stage": 1, "reduce": "step"},
    {"replicas": 4, "tied": True, "recompute": "full"},  # three at once
]


def possible(factors, forbidden):
    """Every allowed case of the full product."""
    cases = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    return [case for case in cases if not any(part.items() <= case.items() for part in forbidden)]


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


@pytest.mark.parametrize("forbidden", [[], FORBIDDEN])
def test_every_pair_is_covered_and_nothing_forbidden_made(forbidden):
    cases, allowed = pairwise(FACTORS, forbidden), possible(FACTORS, forbidden)
    assert all(case in allowed for case in cases)
    assert pairs(cases) == pairs(allowed)
    assert 12 <= len(cases) <= 15 < len(allowed), "4 x 3 of the two largest factors is the least"


def test_pairs_that_only_a_third_factor_excludes_are_left_out():
    factors = {"a": [0, 1], "b": [0, 1], "c": [0, 1]}
    forbidden = [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 1}]  # so a = b = 0 cannot be
    assert pairs(pairwise(factors, forbidden)) == pairs(possible(factors, forbidden))


def test_the_same_every_time():
    assert pairwise(FACTORS, FORBIDDEN) == pairwise(FACTORS, FORBIDDEN)
    assert pairwise({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]


def test_a_thin_array_still_has_every_value(monkeypatch):
    cases = pairwise(FACTORS, FORBIDDEN)
    arrays = {2: cases, 4: [case | {"only": "4"} for case in cases]}
    monkeypatch.setenv("TEST_ALL", "1")
    assert thin(arrays) == arrays
    monkeypatch.delenv("TEST_ALL")
    few = thin(arrays)
    assert all(few[world] and all(case in arrays[world] for case in few[world]) for world in arrays)
    kept = [case for several in few.values() for case in several]
    assert len(kept) <= 6
    values = {(factor, value) for factor, values in FACTORS.items() for value in values} | {("only", "4")}
    assert {item for case in kept for item in case.items()} == values


def test_a_value_without_any_case_is_an_error():
    with pytest.raises(ValueError, match="no case is left for reduce = 'step'"):
        pairwise(FACTORS, [{"reduce": "step"}])
