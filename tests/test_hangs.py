"""The page on runs that hang: each of its cases does what the page says."""

import re

import pytest

from step02_data_parallel.hangs import CASES
from tests.harness.ranks import ROOT, run_script

SEEN = {  # what a rank prints, and the line of hangs.py at which it is found
    "skipped": (r"\[rank 1\] the second sum is 11, and should be 20", r"in skipped"),
    "order": (r"\[rank [01]\] Timed out waiting \d+ms for recv", r"in order"),
    "facing": (r"\[rank 0\] Timed out waiting \d+ms for recv", r"in facing"),
    "shapes": (r"Received data size doesn't match|Connection reset by peer|Connection closed by peer", ""),
    "gone": (r"a bad sample", ""),
    "stopped": (r"\[rank 0\] Timed out waiting \d+ms for recv", r"in stopped"),
}


def test_every_case_is_on_the_page():
    page = (ROOT / "common/when_a_run_hangs.md").read_text()
    assert re.findall(r"^OMP.* (\w+)$", page, re.MULTILINE) == re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == CASES.keys() == SEEN.keys()


@pytest.mark.parametrize("case", SEEN)
def test_what_one_sees(case):
    done = run_script("step02_data_parallel/hangs.py", case, "1.5", ranks=2)
    printed, stack = SEEN[case]
    assert done.returncode != 0
    assert re.search(printed, done.stdout + done.stderr) and re.search(stack, done.stderr), done
