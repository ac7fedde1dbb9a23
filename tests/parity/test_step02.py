"""Step 2 trains exactly what step 1 trains: float64, every step's loss and gradient norm, every final parameter."""

import itertools

import pytest

from tests.parity.runs import assert_parity, reference, run_cases

OPTIMIZERS = ("--optimizer sgd --lr 1e-2 --clip 0", "--optimizer adamw --lr 1e-3 --clip 0.5")
# What changes the training itself: both sides have it. What changes only how step 2 does it stands in LAYOUTS.
TRAININGS = [
    f"{tied} {optimizer}"
    for tied, optimizer in itertools.product(("--tie-embeddings", "--no-tie-embeddings"), OPTIMIZERS)
]
MODES = ("--dp-mode naive", "--dp-mode overlap", "--dp-mode bucket", "--dp-mode bucket --bucket-mb 0.02")
EXTRA = [
    "--recompute full --dp-mode bucket --bucket-mb 0.02",
    "--recompute selective --attention naive --dp-mode overlap",
    "--kv-heads 1 --dp-mode bucket",
    "--kv-heads 4 --dp-mode naive",
    "--global-batch 24 --micro-batch 2 --dp-mode bucket",
]


def training_of(case: str) -> str:
    """The case without the flags that step 1 does not know."""
    words, result = iter(case.split()), []
    for word in words:
        if word in ("--dp-mode", "--bucket-mb"):
            next(words)
        else:
            result.append(word)
    return " ".join(result)


def cases_for(world: int) -> list[str]:
    """Every mode x tied/untied x optimizer x (one micro-batch a rank, several)."""
    accumulation = ("", f"--micro-batch {12 // world}")  # 12 / world micro-batches of one sequence, or a single one
    every = [" ".join(case) for case in itertools.product(TRAININGS, MODES, accumulation)]
    return every + [f"{training} {extra}" for training, extra in zip(itertools.cycle(TRAININGS), EXTRA)]


@pytest.mark.parametrize("world", [2, 4])
def test_step02_equals_step01(world):
    cases = cases_for(world)
    results = run_cases(world, 2, cases)
    for case, result in zip(cases, results, strict=True):
        assert_parity(result, reference(training_of(case)), f"{world} ranks, {case}")


def test_three_ranks():
    cases = [f"{training} {mode}" for training in TRAININGS[1::2] for mode in MODES]
    results = run_cases(3, 2, cases)
    for case, result in zip(cases, results, strict=True):
        assert_parity(result, reference(training_of(case)), f"3 ranks, {case}")
