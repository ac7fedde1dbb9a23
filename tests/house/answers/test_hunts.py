"""The bugs that the bug hunts are about show what the exercises say, in the real train.py.

First steps are those of the lessons' commands. What shows after ten of them is looked for on a smaller model, after
three; with TEST_ALL=1 after ten on theirs, and then its numbers are compared.
"""

import math
import os
import tempfile
from functools import cache

import pytest

from common.start import environment
from tests.harness.ranks import run_ranks, steps_of
from tests.house.answers.exercises import QUICK, Exercise, check_trained, exercise, results, same_text, written_as
from tests.mutants.patches import assert_applies, patched
from tests.parity.runs import train_here

ALL = bool(os.environ.get("TEST_ALL"))
ONE, SHORT = "--steps 1", "--steps 3 --warmup 1 --seq-len 32 --layers 2 --micro-batch 4"
TEN = "--steps 10" if ALL else SHORT
LAST = 9 if ALL else 2
ZERO = {stage: f"--zero {stage} --bucket-mb 0.5 {TEN}" for stage in (1, 3)}
INTERLEAVED, OTHERS = f"--pp 2 --schedule interleaved {ONE}", f"{SHORT} --steps 1 --micro-batch 2 --pp 2 --schedule"
ZIGZAG, FLOAT64 = f"--cp 2 {ONE}", f"--dtype float64 {ONE}" if ALL else f"--dtype float64 {SHORT} --steps 1"
EIGHT, TWO = f"--experts 8 {TEN}", f"--experts 2 --top-k 1 {SHORT}"
HEAD = f"--tp 2 --no-sequence-parallel {ONE}"
ON_TWO = [  # (step, flags, whether with its bug)
    *[(2, ONE, True), (4, f"--tp 2 {ONE}", True), (5, INTERLEAVED, True), (6, ZIGZAG, True), (8, HEAD, True)],
    *[(3, flags, bug) for flags in ZERO.values() for bug in (False, True)],
    *[(5, f"{OTHERS} {name}", True) for name in ("afab", "1f1b", "zb-h1")],
    *[(6, f"--cp 2 {FLOAT64}", bug) for bug in (False, True)],
    *[(7, f"{EIGHT} --ep 2", bug) for bug in (False, True)],
    (7, f"{TWO} --ep 2", True),
]
TENTH = {6: f"--cp 2 {TEN}", 8: HEAD.replace(ONE, TEN)}
if ALL:
    ON_TWO += [(6, ZIGZAG, False), *((step, flags, True) for step, flags in TENTH.items())]


def hunt(step: int) -> Exercise:
    assert_applies(f"hunt of step {step}")
    return exercise(step, 4, "bug hunt")


def check_hunt(of: Exercise, *computed: float, late: tuple[str, ...] = ()) -> None:
    """`check` of what a hunt asks, too, but for `late` numbers, those of tenth steps, without TEST_ALL."""
    check_trained(of, *computed)
    if same_text():
        asked = [number for number in results(of.question) if ALL or number not in late]
        assert all(any(written_as(value, number) for value in computed) for number in asked), asked


def curve(step: int, flags: str, bug: bool) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a run, on this rank; rank 0 knows them."""
    with tempfile.TemporaryDirectory() as folder, patched(f"hunt of step {step}" if bug else None):
        train_here(step, f"{flags} {QUICK} --device cpu --run-dir {folder}")
        lines = steps_of(folder) if environment().rank == 0 else []
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines]


def curves(cases: list[tuple]) -> dict[tuple, tuple]:
    return {case: curve(*case) for case in cases}


@pytest.fixture(scope="module")
def two():
    """The runs on two ranks."""
    return run_ranks(2, curves, ON_TWO, timeout=600)[0]


@cache
def alone(step: int, flags: str, bug: bool = False) -> tuple[list[float], list[float]]:
    return curve(step, flags, bug)


def off(run: tuple, expected: tuple, step: int, norm: bool = False) -> float:
    """How far a loss, or a norm, is off: relative."""
    a, b = (each[norm][step] for each in (run, expected))
    return abs(a - b) / abs(b)


def rounding(run: tuple, expected: tuple) -> bool:
    return all(off(run, expected, step) < 1e-5 for step in range(len(run[0])))


def test_step_1():
    of, right, wrong = hunt(1), alone(1, ONE), alone(1, ONE, True)
    assert "`targets.numel()`" in of.answer and rounding(wrong, right)
    _, norms = zip(*(alone(1, f"{SHORT} --steps 1 --micro-batch {size}", True) for size in (1, 2)))
    assert norms[0][0] == pytest.approx(2 * norms[1][0], rel=1e-5)
    check_hunt(of, right[1][0], wrong[1][0])


def test_step_2(two):
    of = hunt(2)
    assert "`mesh.dp`" in of.answer
    check_hunt(of, alone(1, ONE)[0][0], two[2, ONE, True][0][0])


def test_step_3(two):
    of = hunt(3)
    wrong = {stage: off(two[3, flags, True], two[3, flags, False], LAST) for stage, flags in ZERO.items()}
    assert "`gathering`" in of.answer and off(two[3, ZERO[1], True], two[3, ZERO[1], False], 0) == 0
    assert wrong[1] > 1e-3 and wrong[3] < 1e-6
    check_hunt(of, *([100 * wrong[1]] if ALL else []), late=("5.5",))


def test_step_4(two):
    of, columns = hunt(4), 384 / 2
    assert "`mesh.dp`" in of.answer and "`mesh.tp`" in of.answer
    check_hunt(of, alone(1, ONE)[0][0], two[4, f"--tp 2 {ONE}", True][0][0], columns, 2 * columns, math.log(columns))


def test_step_5(two):
    of, right = hunt(5), alone(1, f"{SHORT} --steps 1")
    (diff,) = of.blocks("diff")
    old, new = (line[1:].strip() for line in diff.splitlines())
    assert old.replace("(step, index,", "(step, forwards % 4,") == new
    assert all(rounding(two[5, f"{OTHERS} {name}", True], right) for name in ("afab", "1f1b", "zb-h1"))
    check_hunt(of, two[5, INTERLEAVED, True][1][0], alone(1, ONE)[1][0])


def test_step_6(two):
    of, right, wrong = hunt(6), alone(1, ONE), two[6, ZIGZAG, True]
    assert "torch.arange(config.rank_seq_len" in of.answer and "positions_of(config, mesh)" in of.answer
    wide = off(two[6, f"--cp 2 {FLOAT64}", True], two[6, f"--cp 2 {FLOAT64}", False], 0)
    assert wide > 1e-8
    found = off(wrong, right, 0), off(wrong, right, 0, norm=True)
    if ALL:
        assert off(two[6, ZIGZAG, False], right, 0, norm=True) < 1e-9
        found += wide, off(two[6, TENTH[6], True], alone(1, TEN), LAST)
    check_hunt(of, *found)


def test_step_7(two):
    of, flags = hunt(7), f"{EIGHT} --ep 2"
    assert "`self.order`" in of.answer and "`inverse(self.order)`" in of.answer
    wrong = off(two[7, flags, True], two[7, flags, False], LAST)
    assert wrong > 1e-4 and rounding(two[7, f"{TWO} --ep 2", True], alone(7, TWO))
    check_hunt(of, *([100 * wrong] if ALL else []), late=("0.36",))


def test_step_8(two):
    of, right, wrong = hunt(8), alone(1, ONE), two[8, HEAD, True]
    assert "`begin_sublayer`" in of.answer and rounding((wrong[0],), right)
    tenth = [100 * off(two[8, TENTH[8], True], alone(1, TEN), LAST)] if ALL else []
    check_hunt(of, 100 * off(wrong, right, 0, norm=True), *tenth)
