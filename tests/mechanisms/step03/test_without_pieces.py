"""Ranks that update nothing: shards are cut in whole lines of memory, of which a small model may have too few."""

from pathlib import Path
from unittest import mock

from common.start import environment
from step03_zero import unit
from tests.harness.ranks import run_ranks
from tests.parity.runs import SMALL, assemble, assert_parity, curve_of, reference, train_here, training_of

CASES = ["--zero 1 --clip 0.5", "--zero 2 --micro-batch 2", "--zero 3 --optimizer sgd --lr 1e-2"]


def train_with_long_lines(cases: list[str], folder: Path) -> list[dict]:
    """Train each case, with a checkpoint in between. What this rank knows of the result, see `train_case`."""
    found = []
    with mock.patch.dict(unit.ALIGNMENT, {"cpu": 1 << 16}):  # elements: more than the model has
        for number, case in enumerate(cases):
            flags = f"{SMALL} {case} --run-dir {folder / str(number)}"
            held = [train_here(3, f"{flags} {more}") for more in ("--steps 1 --save-every 1", "--resume auto")][-1]
            curve = curve_of(folder / str(number)) if environment().rank == 0 else []
            found.append({"boxes": held, "curve": curve})
    return found


def test_a_rank_may_have_no_pieces(tmp_path):
    ranks = run_ranks(3, train_with_long_lines, CASES, tmp_path)
    for case, *parts in zip(CASES, *ranks, strict=True):
        assert [bool(each["boxes"]) for each in parts] == [True, False, False]
        assert_parity(assemble(parts), reference(training_of(case)), case)
