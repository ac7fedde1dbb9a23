"""The cases of a covering array show every pair that can occur, and none that must not."""

import itertools

import pytest

from tests.parity.pairwise import pairwise, thin

FACTORS = {"stage": [0, 1, 2, 3], "replicas": [1, 2, 4], "reduce": ["micro-batch", "step"], "tied": [False, True]}
FORBIDDEN = [{"stage": 0, "replicas": 2}, {"stage": 0, "replicas": 4}, {"stage": 0, "reduce": "step"}]
FORBIDDEN += [{"stage": 1, "reduce": "step", "tied": tied} for tied in (False, True)]  # so that the pair cannot be


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


def test_every_pair_is_covered_and_nothing_forbidden_made():
    product = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    allowed = [case for case in product if not any(part.items() <= case.items() for part in FORBIDDEN)]
    cases = pairwise(FACTORS, FORBIDDEN)
    assert all(case in allowed for case in cases) and pairs(cases) == pairs(allowed)
    assert 9 <= len(cases) <= 12 < len(allowed), "3 x 3 of the largest factors' values is the least"
    with pytest.raises(ValueError, match="no case is left for reduce = 'step'"):
        pairwise(FACTORS, [{"reduce": "step"}])


def test_a_thin_array_still_has_every_value(monkeypatch):
    monkeypatch.delenv("TEST_ALL", raising=False)
    cases = pairwise(FACTORS, FORBIDDEN)
    arrays = {2: cases, 4: [case | {"only": "4"} for case in cases]}
    few = thin(arrays)
    assert all(few[world] and all(case in arrays[world] for case in few[world]) for world in arrays)
    values = {(factor, value) for factor, values in FACTORS.items() for value in values} | {("only", "4")}
    kept = [case for several in few.values() for case in several]
    assert {item for case in kept for item in case.items()} == values and len(kept) <= 6
