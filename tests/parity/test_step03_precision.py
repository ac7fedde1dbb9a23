"""Step 3 in the narrow types: the same master weights, the same rounding of every sample, sums in another order."""

import os
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from step01_single_gpu.mixed_precision import GradientSums, LossScaler, Optimizer
from step01_single_gpu.recording.run_record import RunRecord
from step03_zero.zero import Zero
from tests.harness.ranks import run_ranks
from tests.parity.runs import ADAMW, TIED, UNTIED, assemble, differences, reference, run_cases, train_case, training_of

OVERFLOW = 3  # the step in which a gradient overflows

# A micro-batch of one sequence takes the same path through the same kernels in every layout, so losses of equal weights
# are equal to the bit, and gradients differ by the order in which float32 adds up 12 of them: about 1e-7, as their norm
# does. That may turn the rounding of a weight to its 8 (float16: 11) bits: by 2^-8 of that weight, so of a tensor of
# 1,000 by 1e-4. Sums in bfloat16 itself would miss the norm by more than 1e-4 (the mutants show it). The runs are short
# because training amplifies such a weight: by step 10 to more than the tolerance of the norm.
NORM_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-3


def assert_narrow_parity(result, expected, case: str) -> None:
    found = differences(result, expected)
    limits = {name: NORM_TOLERANCE if name in ("loss", "grad_norm") else WEIGHT_TOLERANCE for name in found}
    wrong = {name: value for name, value in found.items() if not value < limits[name]}
    assert not wrong, f"{case}: relative differences above {NORM_TOLERANCE} or {WEIGHT_TOLERANCE}: {wrong}"


@pytest.mark.parametrize("world", [2, 3])
def test_bfloat16(world):
    training = f"{UNTIED if world == 2 else TIED} {ADAMW} --dtype bfloat16 --steps 3"
    cases = [f"{training} --zero {stage} --bucket-mb 0.02" for stage in range(4)]
    cases += [f"{training} --zero 3 --recompute full", f"{training} --zero 2 --zero-reduce step"]
    cases += [f"{training} --zero {stage} --zero-replicas {world}" for stage in (1, 3)]
    for case, result in zip(cases, run_cases(world, 3, cases), strict=True):
        assert_narrow_parity(result, reference(training_of(case, 1)), f"{world} ranks, {case}")


# ---- float16: a step that overflows is skipped -----------------------------------------------------------------------


def overflow_case(step: int, flags: str) -> tuple[dict, list]:
    """Train; in step `OVERFLOW` the gradients of the last rank are infinite. What this rank knows of the result, and
    after each step its number of updates and its loss scale."""
    taker, made, states = GradientSums if step == 1 else Zero, {}, []
    accumulate, real_step = taker.accumulate, RunRecord.step
    last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1

    def overflowing(self, parameter, gradient):
        if last and len(states) == OVERFLOW:
            gradient = torch.full_like(gradient, float("inf"))
        accumulate(self, parameter, gradient)

    def kept(owner, real):
        def initialise(self, *arguments):
            made[owner] = self
            real(self, *arguments)

        return mock.patch.object(owner, "__init__", initialise)

    @contextmanager
    def noting(self, number):
        with real_step(self, number) as measured:
            yield measured
        states.append((made[Optimizer].updates, made[LossScaler].scale, made[LossScaler].good_steps))

    with ExitStack() as stack:
        for owner in (Optimizer, LossScaler):
            stack.enter_context(kept(owner, owner.__init__))
        stack.enter_context(mock.patch.object(taker, "accumulate", overflowing))
        stack.enter_context(mock.patch.object(RunRecord, "step", noting))
        return train_case(step, flags), states


def overflow_cases(cases: list[str]) -> list[tuple]:
    return [overflow_case(3, case) for case in cases]


def test_all_ranks_skip_a_step_in_which_one_of_them_overflowed():
    training = f"{UNTIED} {ADAMW} --dtype float16 --steps 6"
    cases = [f"{training} --zero {stage} --bucket-mb 0.02" for stage in range(4)]
    known, states = overflow_case(1, training)
    assert [updates for updates, _, _ in states] == [1, 2, 3, 3, 4, 5]
    assert [scale for _, scale, _ in states] == [2.0**16] * 3 + [2.0**15] * 3
    expected = assemble([known])
    assert expected.norms.pop(OVERFLOW) == float("inf")
    ranks = run_ranks(3, overflow_cases, cases)
    for case, parts in zip(cases, zip(*ranks, strict=True), strict=True):
        for _, seen in parts:
            assert seen == states, case
        result = assemble([part for part, _ in parts])
        assert result.norms.pop(OVERFLOW) == float("inf"), case
        assert_narrow_parity(result, expected, case)
