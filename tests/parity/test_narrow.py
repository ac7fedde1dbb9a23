"""Training in bfloat16 and float16: the same master weights, the same rounding of a sample, sums in another order."""

import os
from functools import partial
from unittest import mock

import pytest
import torch

from step01_single_gpu.mixed_precision import GradientSums
from step01_single_gpu.running.run_record import RunRecord
from step03_zero.zero import Zero
from tests.harness.observing import observe_each, watching
from tests.parity import runs
from tests.parity.cases import BIAS, CHUNKED, FOUR, GATHER, ONE, PLAIN, RING, SHARED, ULYSSES, WHOLE
from tests.parity.runs import ADAMW, TIED, UNTIED, assemble, differences, reference, train_case, training_of

# A micro-batch of one sequence takes the same path through the same kernels in every layout, so losses of equal weights
# are equal to the bit, and gradients differ by the order in which float32 adds up 12 of them: about 1e-7, as their norm
# does. That may turn the rounding of a weight to its 8 (float16: 11) bits: by 2^-8 of that weight, so of a tensor of
# 1,000 by 1e-4. Sums in bfloat16 itself would miss the norm by more than 1e-4 (the mutants show it). The runs are short
# because training amplifies such a weight: by step 10 to more than the tolerance of the norm.
NORM_TOLERANCE = 1e-5
BOUNDS = {"loss": NORM_TOLERANCE, "grad_norm": NORM_TOLERANCE, "weights": 1e-3}
# Attention in blocks rounds differently from one kernel over the whole sequence, and the parts of a weight's gradient
# are rounded before they are added up. The bounds are three to ten times what the three modes show.
BLOCKS = {
    "bfloat16": {"loss": 1e-5, "grad_norm": 5e-4, "weights": 3e-3},
    "float16": {"loss": 1e-6, "grad_norm": 2e-4, "weights": 5e-4},
}
# Samples are rounded alike wherever their experts are, but not sums over the tokens of several ranks: four times what
# is seen
TOKENS = {dtype: dict.fromkeys(BOUNDS, bound) for dtype, bound in (("bfloat16", 1e-3), ("float16", 1e-4))}
# Row-parallel layers add up what every rank has rounded: three times what is seen, below bfloat16's own rounding
TENSOR = {"loss": 2e-6, "grad_norm": 4e-5, "weights": 2e-3}
# Step 8 in bfloat16 is compared with float32: twice what is seen. Weights may miss by their rounding, 2^-8 at most
BAND = {"loss": 1.5e-4, "grad_norm": 5e-4, "weights": 5e-3}

ZERO = [f"--zero {stage} --bucket-mb 0.02" for stage in range(4)] + ["--zero 3 --recompute full"]
ZERO += ["--zero 2 --zero-reduce step", "--zero 1 --zero-replicas {ranks}", "--zero 3 --zero-replicas {ranks}"]
SPLIT = ["zb-h1", "zbv --zero 1"]  # not tied: in one process autograd adds up a matrix's two gradients in 16 bits
SCHEDULES = [f"--dtype bfloat16 --schedule {name}" for name in (*SPLIT, "1f1b", "interleaved", "dualpipe --zero 1")]
SCHEDULES += [f"--dtype float16 --schedule {name}" for name in SPLIT]
TP = ["", WHOLE, f"{CHUNKED} --kv-heads 1", f"{PLAIN} --vocab 257 --recompute full"]
CASES = [  # step, ranks, samples of a micro-batch, flags of all cases and of each
    (3, 2, 1, f"{UNTIED} --dtype bfloat16 --steps 3", ZERO),
    (3, 3, 1, f"{TIED} --dtype bfloat16 --steps 3", ZERO),
    (4, 2, 12, f"{UNTIED} --dtype bfloat16 --steps 2 --tp 2 {ONE}", TP),
    (5, 2, 1, f"{UNTIED} --global-batch 6 --layers 4 --pp 2", SCHEDULES),
    (6, 2, 4, f"{UNTIED} --steps 4 --cp 2 --micro-batch 4 --dtype bfloat16", [RING, GATHER, ULYSSES]),
    (6, 2, 4, f"{UNTIED} --steps 4 --cp 2 --micro-batch 4 --dtype float16", [RING]),
    (7, 2, 3, f"--experts 8 {SHARED} {BIAS} {FOUR} --dp 2 --ep 2 --steps 3", [f"--dtype {dtype}" for dtype in TOKENS]),
]


def assert_narrow_parity(result, expected, case: str, bounds: dict[str, float] = BOUNDS) -> None:
    found = differences(result, expected)
    wrong = {name: value for name, value in found.items() if not value < bounds.get(name, bounds["weights"])}
    assert not wrong, f"{case}: relative differences out of bounds: {wrong}"


@pytest.mark.parametrize("step, ranks, samples, flags, each", CASES)
def test_equals_one_process(step, ranks, samples, flags, each):
    cases = [f"{ADAMW} {flags} {more}".format(ranks=ranks) for more in each]
    for case, result in zip(cases, runs.run_cases(ranks, step, cases), strict=True):
        dtype = case.split("--dtype ")[1].split()[0]
        bounds = {4: TENSOR, 6: BLOCKS.get(dtype), 7: TOKENS.get(dtype)}.get(step, BOUNDS)
        assert_narrow_parity(result, reference(training_of(case, samples)), f"{ranks} ranks, {case}", bounds)


# Only weights, activations and the gradients of a micro-batch have 8 bits. Gradients are added up in float32, over
# micro-batches and over ranks, and the optimizer updates float32 masters
AMPLIFIED = {  # mutant: what makes it visible, on four ranks, and where
    "sums in bfloat16": ("--lr 1e-4 --steps 1 --global-batch 48", "grad_norm"),  # many micro-batches
    "updates in bfloat16": ("--lr 6e-5 --steps 8 --global-batch 2", "loss'.*'head.weight"),  # many updates
}


@pytest.mark.parametrize("mutant", AMPLIFIED)
def test_bfloat16_stays_near_float32(mutant):
    flags, where = AMPLIFIED[mutant]
    flags = f"--optimizer adamw --warmup 1 --clip 0.5 --micro-batch 1 --pp 2 --tp 2 --zero 1 {flags}"
    sound, wrong = runs.run_cases(4, 8, [f"{flags} --dtype bfloat16"] * 2, [None, mutant])
    expected = reference(training_of(f"{flags} --dtype float32"))
    assert_narrow_parity(sound, expected, flags, BAND)
    with pytest.raises(AssertionError, match=f"'{where}'"):
        assert_narrow_parity(wrong, expected, flags, BAND)


# ---- float16: a step that overflows is skipped -----------------------------------------------------------------------

OVERFLOW = 3  # the step in which a gradient overflows


def overflow_case(step: int, flags: str) -> dict:
    """Train; in step `OVERFLOW` the gradients of the last rank are infinite. What this rank knows of the result."""
    taker, steps = GradientSums if step == 1 else Zero, []
    accumulate = taker.accumulate
    last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1

    def overflowing(self, parameter, gradient):
        if last and steps[-1] == OVERFLOW:
            gradient = torch.full_like(gradient, float("inf"))
        accumulate(self, parameter, gradient)

    begins = watching(RunRecord, "step", lambda self, number: steps.append(number))
    with begins, mock.patch.object(taker, "accumulate", overflowing):
        return train_case(step, flags)


def test_all_ranks_skip_a_step_in_which_one_of_them_overflowed():
    """Or weights would be infinite on some of them, and the bias corrections of the next steps others."""
    training = f"{UNTIED} {ADAMW} --dtype float16 --steps 6"
    expected, cases = assemble([overflow_case(1, training)]), [f"{training} {flags}" for flags in ZERO[:4]]
    assert expected.norms.pop(OVERFLOW) == float("inf")
    for case, result in zip(cases, runs.results_of(3, observe_each, partial(overflow_case, 3), cases), strict=True):
        assert result.norms.pop(OVERFLOW) == float("inf"), case
        assert_narrow_parity(result, expected, case)
