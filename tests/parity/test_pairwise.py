"""The cases of a covering array show every pair that can occur, and none that must not."""

import itertools

import pytest

from tests.parity.pairwise import pairwise, thin

FACTORS = {"stage": [0, 1, 2, 3], "replicas": [1, 2, 4], "reduce": ["micro-batch", "step"], "tied": [False, True]}
FORBIDDEN = [{"stage": 0, "replicas": 2}, {"stage": 0, "replicas": 4}, {"stage": 0, "reduce": "step"}]
FORBIDDEN += [{"stage": 1, "reduce": "step", "tied": tied} for tied in (False, True)]  # so that the pair cannot be


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


def test_every_pair_is_covered_and_nothing_forbidden_made(monkeypatch):
    product = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    allowed = [case for case in product if not any(part.items() <= case.items() for part in FORBIDDEN)]
    cases = pairwise(FACTORS, FORBIDDEN)
    assert all(case in allowed for case in cases) and pairs(cases) == pairs(allowed)
    assert 9 <= len(cases) <= 12 < len(allowed), "3 x 3 of the largest factors' values is the least"
    with pytest.raises(ValueError, match="no case is left for reduce = 'step'"):
        pairwise(FACTORS, [{"reduce": "step"}])
    monkeypatch.delenv("TEST_ALL", raising=False)
    few = thin({2: cases, 4: cases})
    assert few[2] and few[4] and len(few[2] + few[4]) <= 6
    assert {item for case in few[2] + few[4] for item in case.items()} == {
        item for case in cases for item in case.items()
    }
