"""The suite rejects every known-wrong variant of ZeRO, by the figure or the check that is there for it."""

import pytest

from tests.harness.observing import observe_each
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
from tests.parity.runs import assert_parity, differences, reference, run_cases, training_of
from tests.parity.test_step03 import ADAMW, ODD, UNTIED
from tests.parity.test_step03_precision import assert_narrow_parity

TRAINING = f"{UNTIED} {ADAMW} --steps 3 --bucket-mb 0.02"

# ---- wrong numbers: rejected by parity -------------------------------------------------------------------------------

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


@pytest.fixture(scope="module")
def trained():
    """Results by mutant, and under (None, flags) those of the unmutated code in the same cases."""
    found = {}
    for world in (2, 3, 4):
        mine = {name: flags for name, (ranks, flags) in WRONG_NUMBERS.items() if ranks == world}
        sound = [(None, flags) for flags in dict.fromkeys(mine.values())]
        every = [*mine.items(), *sound]
        results = run_cases(world, 3, [flags for _, flags in every], [name for name, _ in every])
        found |= {name or (None, flags): result for (name, flags), result in zip(every, results, strict=True)}
    return found


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_wrong_numbers_are_rejected(trained, name):
    flags = WRONG_NUMBERS[name][1]
    assert_parity(trained[None, flags], reference(training_of(flags)), "the case itself")
    with pytest.raises(AssertionError, match="relative differences above"):
        assert_parity(trained[name], reference(training_of(flags)), name)


def test_a_wrong_norm_is_seen_in_the_norm(trained):
    for name, factor in (("norm counts replicas", 2**0.5), ("norm of the local shard", None)):
        expected = reference(training_of(WRONG_NUMBERS[name][1]))
        found = differences(trained[name], expected)["grad_norm"]
        assert found > 0.01 if factor is None else found == pytest.approx(factor - 1, rel=0.3), name


def test_sums_in_bfloat16_are_rejected():
    case = f"{TRAINING} --dtype bfloat16 --zero 2"
    sound, wrong = run_cases(2, 3, [case] * 2, [None, "sums in bfloat16"])
    expected = reference(training_of(case, 1))
    assert_narrow_parity(sound, expected, "the case itself")
    with pytest.raises(AssertionError, match="'grad_norm'"):
        assert_narrow_parity(wrong, expected, "sums in bfloat16")


# ---- right numbers, wrong structure: rejected by accounting ----------------------------------------------------------

ONCE = f"--micro-batch 6 {SMALL}"  # one micro-batch on each of two ranks
SEVERAL = f"--micro-batch 1 {SMALL}"
WRONG_STRUCTURE = {  # mutant: (flags, check that rejects it, what that says)
    "all-reduce poses as reduce-scatter": (f"--zero 2 {ONCE}", checks.check_calls, "calls: 0 x reduce_scatter"),
    "gloo's own reduce-scatter": (f"{LARGE} --zero 2 --micro-batch 6", checks.check_wire, "wire: .* of the formula"),
    "unsharded optimizer": (f"--zero 1 {ONCE}", checks.check_bytes_held, "bytes held: .* of optimizer state"),
    "parameters never freed": (f"--zero 3 {ONCE}", checks.check_residency, "residency: .* at the peak"),
    "prefetch of two": (f"--zero 3 {ONCE}", checks.check_residency, "residency: .* at the peak"),
    "no prefetch": (f"--zero 3 {ONCE}", checks.check_gathers_overlap, "order of gathers: .* no prefetch"),
    "last unit freed and gathered again": (
        f"--zero 3 {ONCE}",
        checks.check_calls,
        "calls: 9 x all_gather instead of 8",
    ),
    "waits for all gathers": (f"--zero 1 {ONCE}", checks.check_gathers_overlap, "order of gathers: .* elsewhere"),
    "reduced after the backward": (f"--zero 2 {ONCE}", checks.check_reductions_overlap, "order of reductions: "),
    "stage 1 waits for the previous bucket": (
        f"--zero 1 {ONCE}",
        checks.check_reductions_overlap,
        "order of reductions: .* is waited for",
    ),
    "last backward of ZeRO missed": (f"--zero 1 {SEVERAL}", checks.check_phases, "phases of reduce-scatters: "),
    "gathers beside a reduction": (f"--zero 3 {ONCE}", checks.check_one_in_flight, "in flight: a reduce-scatter"),
    "gradients kept": (f"--zero 2 {ONCE}", checks.check_gradient_memory, "gradient memory: "),
}


@pytest.fixture(scope="module")
def observed():
    """What two ranks did under every mutant, and under (None, flags) without one."""
    every = [(name, flags) for name, (flags, *_) in WRONG_STRUCTURE.items()]
    every += [(None, flags) for flags in dict.fromkeys(flags for _, flags in every)]
    names, cases = zip(*every, strict=True)
    ranks = run_ranks(2, observe_each, observe, list(cases), list(names))
    return {name or (None, flags): parts for (name, flags), parts in zip(every, zip(*ranks, strict=True), strict=True)}


@pytest.mark.parametrize("name", WRONG_STRUCTURE)
def test_wrong_structure_is_rejected(observed, name):
    flags, check, message = WRONG_STRUCTURE[name]
    plan = plan_of(flags, 2)
    for seen in observed[None, flags]:
        check(seen, plan)
    for seen in observed[name]:
        with pytest.raises(AssertionError, match=message):
            check(seen, plan)


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
