"""The parity suite rejects every known-wrong variant of data parallelism, and says so by the right figure."""

import pytest

from tests.mutants.patches import PARITY_MUTANTS
from tests.parity.runs import assert_parity, differences, reference, run_cases
from tests.parity.test_step02 import training_of

CASE = "--optimizer adamw --lr 1e-3 --clip 0.5 --no-tie-embeddings --dp-mode bucket --bucket-mb 0.02"


@pytest.fixture(scope="module")
def mutated():
    """Results of every mutant, and of the unmutated code, on 2 ranks with 6 micro-batches a rank."""
    names = [None, *PARITY_MUTANTS]
    results = run_cases(2, 2, [CASE] * len(names), names)
    return dict(zip(names, results, strict=True))


def test_the_case_itself_passes(mutated):
    assert_parity(mutated[None], reference(training_of(CASE)), CASE)


@pytest.mark.parametrize("name", PARITY_MUTANTS)
def test_mutant_is_rejected(mutated, name):
    with pytest.raises(AssertionError, match="relative differences above"):
        assert_parity(mutated[name], reference(training_of(CASE)), name)


def test_only_the_gradient_norm_shows_a_missing_share(mutated):
    """Why parity is proved on gradients: AdamW divides the factor away, and the loss curve looks right."""
    found = differences(mutated["missing share of the global mean"], reference(training_of(CASE)))
    assert found["grad_norm"] == pytest.approx(1.0, abs=0.2), "gradients are twice too large on two ranks"
