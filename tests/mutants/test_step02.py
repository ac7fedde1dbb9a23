"""The suite rejects every known-wrong variant of data parallelism, and says so by the right figure."""

import pytest

from tests.harness.observing import observe_each
from tests.harness.ranks import run_ranks
from tests.mechanisms.step02.test_accounting import check_train, launch_in_data_parallel, watch_train
from tests.mutants.patches import LATE, WRONG_NUMBERS, patched
from tests.mutants.rejection import assert_rejected, train_mutants
from tests.parity.runs import assert_parity, differences, reference, training_of

CASE = "--optimizer adamw --lr 1e-3 --clip 0.5 --no-tie-embeddings --dp-mode bucket --bucket-mb 0.02"


@pytest.fixture(scope="module")
def mutated():
    """On 2 ranks with 6 micro-batches each."""
    return train_mutants(2, dict.fromkeys((*WRONG_NUMBERS, *LATE), (2, CASE)))


@pytest.mark.parametrize("name", LATE)
def test_waiting_trains_right(mutated, name):
    """Why parity is not enough."""
    assert_parity(mutated[CASE, name], reference(training_of(CASE)), name)


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_wrong_numbers_are_rejected(mutated, name):
    assert_rejected(mutated, CASE, name, reference(training_of(CASE)))


def test_only_the_gradient_norm_shows_a_missing_share(mutated):
    """Why parity is proved on gradients: AdamW divides the factor away, and the loss curve looks right."""
    found = differences(mutated[CASE, "missing share of the global mean"], reference(training_of(CASE)))
    assert found["grad_norm"] == pytest.approx(1.0, abs=0.2), "gradients are twice too large on two ranks"


def test_a_missed_last_backward_is_rejected():
    flags = "--micro-batch 1 --dp-mode bucket"
    for [calls] in run_ranks(2, observe_each, watch_train, [flags], ["last backward missed"]):
        with pytest.raises(AssertionError, match="bucket 0 is launched in the phase optimizer"):
            check_train(calls, flags, 2)


def test_waiting_buckets_are_rejected():
    with patched("one launch per gradient"), pytest.raises(AssertionError, match="launches: complete buckets wait"):
        launch_in_data_parallel("bucket")
