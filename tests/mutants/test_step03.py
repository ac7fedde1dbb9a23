"""The suite rejects every known-wrong variant of ZeRO, by the figure or the check that is there for it."""

from functools import partial

import pytest

from tests.harness.ranks import run_ranks
from tests.mechanisms.step03 import checks
from tests.mechanisms.step03.observe import observe
from tests.mechanisms.step03.test_accounting import LARGE, SMALL, plan_of
from tests.mechanisms.step03.test_model_state import (
    check_initial_peak,
    check_peak_of_gradients,
    initial_peak,
    launch_in_zero,
    peak_of_gradients,
)
from tests.mutants.patches import patched
from tests.mutants.patches_step03 import MUTANTS
from tests.mutants.rejection import assert_noticed, assert_rejected, observe_mutants, train_mutants
from tests.parity.runs import assert_parity, differences, reference, run_cases, training_of
from tests.parity.test_step03 import ADAMW, ODD, UNTIED
from tests.parity.test_step03_precision import assert_narrow_parity

TRAINING = f"{UNTIED} {ADAMW} --steps 2 --bucket-mb 0.02"
WRONG_NUMBERS = {  # mutant: (ranks, flags); several micro-batches on each rank
    "weights of the step before": (2, f"{TRAINING} --zero 1"),
    "last unit of the step before": (2, f"{TRAINING} --zero 3"),
    "decay on norms": (2, f"{TRAINING} --zero 2"),
    "no decay of flat shards": (2, f"{TRAINING} --zero 1"),
    "norm of the local shard": (2, f"{TRAINING} --zero 1"),
    "only the last micro-batch in the shard": (2, f"{TRAINING} --zero 2"),
    "norm counts padding": (3, f"{TRAINING} {ODD} --zero 1"),
    "norm counts replicas": (4, f"{TRAINING} --zero 3 --zero-replicas 2"),
    "no sum over replicas": (4, f"{TRAINING} --zero 1 --zero-replicas 2"),
    "summed over replicas each micro-batch": (4, f"{TRAINING} --zero 2 --zero-replicas 2"),
}
ONCE = f"--micro-batch 6 {SMALL}"  # one micro-batch on each of two ranks
SEVERAL = f"--micro-batch 1 {SMALL}"
WRONG_STRUCTURE = {  # mutant: (flags, check that rejects it, what that says)
    "all-reduce poses as reduce-scatter": (f"--zero 2 {ONCE}", "calls", "calls: 0 x reduce_scatter"),
    "gloo's own reduce-scatter": (f"{LARGE} --zero 2 --micro-batch 6", "wire", "wire: .* of the formula"),
    "unsharded optimizer": (f"--zero 1 {ONCE}", "bytes_held", "bytes held: .* of optimizer state"),
    "parameters never freed": (f"--zero 3 {ONCE}", "residency", "residency: .* at the peak"),
    "prefetch of two": (f"--zero 3 {ONCE}", "residency", "residency: .* at the peak"),
    "no prefetch": (f"--zero 3 {ONCE}", "gathers_overlap", "order of gathers: .* no prefetch"),
    "last unit freed and gathered again": (f"--zero 3 {ONCE}", "calls", "calls: 9 x all_gather instead of 8"),
    "waits for all gathers": (f"--zero 1 {ONCE}", "gathers_overlap", "order of gathers: .* elsewhere"),
    "reduced after the backward": (f"--zero 2 {ONCE}", "reductions_overlap", "order of reductions: "),
    "stage 1 waits for the previous bucket": (f"--zero 1 {ONCE}", "reductions_overlap", "reductions: .* is waited for"),
    "last backward of ZeRO missed": (f"--zero 1 {SEVERAL}", "phases", "phases of reduce-scatters: "),
    "gathers beside a reduction": (f"--zero 3 {ONCE}", "one_in_flight", "in flight: a reduce-scatter"),
    "gradients kept": (f"--zero 2 {ONCE}", "gradient_memory", "gradient memory: "),
}


@pytest.fixture(scope="module")
def trained():
    return train_mutants(3, WRONG_NUMBERS)


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_wrong_numbers_are_rejected(trained, name):
    flags = WRONG_NUMBERS[name][1]
    assert_rejected(trained, flags, name, reference(training_of(flags)))


def test_a_wrong_norm_is_seen_in_the_norm(trained):
    for name, at_least, at_most in (("norm counts replicas", 0.29, 0.54), ("norm of the local shard", 0.01, 1)):
        flags = WRONG_NUMBERS[name][1]
        assert at_least < differences(trained[flags, name], reference(training_of(flags)))["grad_norm"] < at_most, name


def test_sums_in_bfloat16_are_rejected():
    case = f"{TRAINING} --dtype bfloat16 --zero 2"
    sound, wrong = run_cases(2, 3, [case] * 2, [None, "sums in bfloat16"])
    expected = reference(training_of(case, 1))
    assert_narrow_parity(sound, expected, "the case itself")
    with pytest.raises(AssertionError, match="'grad_norm'"):
        assert_narrow_parity(wrong, expected, "sums in bfloat16")


@pytest.fixture(scope="module")
def observed():
    each = {flags: partial(observe, flags) for flags, *_ in WRONG_STRUCTURE.values()}
    return observe_mutants(2, {name: each[flags] for name, (flags, *_) in WRONG_STRUCTURE.items()})


@pytest.mark.parametrize("name", WRONG_STRUCTURE)
def test_wrong_structure_is_rejected(observed, name):
    flags, check, message = WRONG_STRUCTURE[name]
    check, plan = getattr(checks, f"check_{check}"), plan_of(flags, 2)
    for rank in range(2):
        of_rank = {key: seen[rank] for key, seen in observed.items()}
        assert_noticed(lambda seen: check(seen, plan), of_rank, name, message)


def test_wrong_structure_trains_right():
    """Why parity is not enough: each of these passes it."""
    names = ["all-reduce poses as reduce-scatter", "unsharded optimizer", "parameters never freed", "no prefetch"]
    cases = [f"{TRAINING} --zero {stage}" for stage in (2, 1, 3, 3)]
    for name, case, result in zip(names, cases, run_cases(2, 3, cases, names), strict=True):
        assert_parity(result, reference(training_of(case)), name)


def mutated_peaks() -> tuple:
    with patched("whole model at first"):
        first = initial_peak()
    with patched("buckets kept elsewhere"):
        return first, peak_of_gradients("--zero 2")


def test_memory_held_too_long_is_rejected():
    for first, gradients in run_ranks(2, mutated_peaks):
        with pytest.raises(AssertionError, match="initial peak: "):
            check_initial_peak(*first)
        with pytest.raises(AssertionError, match="peak of gradients: "):
            check_peak_of_gradients(*gradients)


def test_waiting_units_are_rejected():
    with patched("one launch per gradient of ZeRO"), pytest.raises(AssertionError, match="launches: complete"):
        launch_in_zero()


def test_every_mutant_is_tried():
    others = ["sums in bfloat16", "updates in bfloat16", "whole model at first", "buckets kept elsewhere"]
    others += ["one launch per gradient of ZeRO"]
    assert {*WRONG_NUMBERS, *WRONG_STRUCTURE, *others} == MUTANTS.keys()
