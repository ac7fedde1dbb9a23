"""Layouts that are drawn show every flag."""

import itertools
import re

from tests.parity.drawn import EVERY, EXPERTS, LAYOUT, TRAINING, draw

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
