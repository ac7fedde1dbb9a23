"""The suite rejects every known-wrong variant of context parallelism, and says so by the right figure."""

from functools import partial

import pytest

from tests.mechanisms.step06 import test_accounting, test_memory
from tests.mutants.patches_step06 import MUTANTS
from tests.mutants.rejection import assert_noticed, assert_rejected, observe_mutants, train_mutants
from tests.parity.runs import Result, assert_parity, differences, reference, training_of
from tests.parity.test_step06 import ADAMW, CONTIGUOUS, DOCUMENTS, GATHER, ONE, ULYSSES, UNTIED

BASE = f"{UNTIED} {ADAMW} {ONE} --cp 2 --steps 2"
FLAGS = dict.fromkeys(MUTANTS, BASE) | {  # those that show only under other flags
    "dK/dV of the own queries only": f"{BASE} {GATHER}",
    "Ulysses in rank order": f"{BASE} {ULYSSES}",
    "documents of one rank": f"{BASE} {DOCUMENTS}",
    "keys travel all the way": f"{BASE} {CONTIGUOUS}",
}
ON_FOUR = [f"--cp 4 {CONTIGUOUS} --kv-heads 4 --micro-batch 2"]
TRAIN = partial(test_accounting.ranks_train, ON_FOUR), partial(test_accounting.check_train, flags=ON_FOUR)
HIGHER_PRICE = {  # those that train the same: what notices them, on 4 ranks
    "K/V repeated before they are sent": TRAIN,
    "ring waits before it computes": (test_accounting.ranks_order, test_accounting.check_order),
    "keys travel all the way": TRAIN,
    "all keys of a ring kept": (test_memory.ranks_peak, test_memory.check_peak),
    "causal blocks in squares": TRAIN,
}


@pytest.fixture(scope="module")
def results():
    return train_mutants(6, {name: (2, flags) for name, flags in FLAGS.items()})


@pytest.fixture(scope="module")
def observed():
    return observe_mutants(4, {name: observe for name, (observe, _) in HIGHER_PRICE.items()})


def expected(flags: str) -> Result:
    return reference(training_of(flags), 6 if DOCUMENTS in flags else 1)


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in HIGHER_PRICE])
def test_mutant_is_rejected(results, name):
    assert_rejected(results, FLAGS[name], name, expected(FLAGS[name]))


def test_only_the_gradient_norm_shows_an_averaged_loss(results):
    """It is as many times too large as there are ranks; AdamW divides the factor away."""
    found = differences(results[BASE, "loss averaged over a rank's tokens"], expected(BASE))
    assert found["grad_norm"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", HIGHER_PRICE)
def test_a_higher_price_is_noticed(results, observed, name):
    """No curve shows it: it trains the same."""
    assert_parity(results[FLAGS[name], name], expected(FLAGS[name]), name)
    assert_noticed(HIGHER_PRICE[name][1], observed, name)
