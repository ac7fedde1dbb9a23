"""The first examples of lessons 2 and 3 do what the lessons say: two ranks arrive where one does."""

import re

import pytest

from tests.harness.ranks import run_script


def numbers(script: str, ranks: int, after: str) -> list[float]:
    """All numbers that a script prints after a word."""
    done = run_script(script, ranks=ranks)
    assert done.returncode == 0, done.stderr
    ends = [line.split(after)[1] for line in done.stdout.splitlines() if after in line]
    return [float(number) for end in ends for number in re.findall(r"-?\d+\.\d*", end)]


def test_data_parallelism_with_two_weights():
    script, after = "step02_data_parallel/two_ranks.py", "new weights"
    assert numbers(script, 2, after) == numbers(script, 1, after) * 2, "each rank prints both"


def test_zero_without_hooks():
    one, two = (numbers("step03_zero/sketch.py", ranks, "loss") for ranks in (1, 2))
    assert two == pytest.approx(one, rel=1e-5) and one[-1] < one[0]
