"""Covering arrays show every pair that can occur, and none that must not; layouts that are drawn show every flag."""

import itertools
import re

import pytest

from tests.parity.drawn import EVERY, EXPERTS, LAYOUT, TRAINING, draw
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


ABOUT = {"--schedule": "pp", "--cp-": "cp", "--tp-mode": "tp", "--no-seq": "tp", "--gate": "ep", "--balance": "ep"}


def test_what_the_layouts_cover():
    """Every flag is there, in runs that divide what it is about, and so are all five dimensions (this runs none)."""
    drawn = [f"{flags} " for key, count in EVERY.items() for flags in draw(*key, count)]
    for flags in filter(None, itertools.chain(*TRAINING.values(), *EXPERTS.values(), *LAYOUT.values())):
        alone = [f"--{name} 1 " for prefix, name in ABOUT.items() if flags.startswith(prefix)]
        assert any(f"{flags} " in case and not any(each in case for each in alone) for case in drawn), flags
    split = {tuple(case.partition(f"--{name}")[2].split()[0] for name in ("cp-mode", "cp-split")) for case in drawn}
    assert len(split) == 9 and any("--ep 1 " not in each and "dualpipe " in each for each in drawn if "--ep" in each)
    all_five = [case for case in drawn if "--ep" in case and not re.search(r"--(dp|pp|cp|tp|ep) 1 ", case)]
    assert len(all_five) >= EVERY[16, 5] and len({case.partition("--schedule")[2].split()[0] for case in all_five}) >= 4
