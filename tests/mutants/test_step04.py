"""The suite rejects every known-wrong variant of tensor parallelism, and says so by the right figure."""

from functools import partial

import pytest

from tests.mechanisms.step04 import test_accounting, test_activations
from tests.mutants.patches_step04 import MUTANTS
from tests.mutants.rejection import assert_noticed, assert_rejected, observe_mutants, train_mutants
from tests.parity.runs import assert_parity, differences, reference, training_of
from tests.parity.test_step04 import ADAMW, CHUNKED, ONE, PADDED, PLAIN, UNTIED, WHOLE_SEQUENCE

BASE = f"{UNTIED} {ADAMW} {ONE} --tp 2 --steps 2"
FLAGS = dict.fromkeys(MUTANTS, BASE) | {  # those that show only under other flags
    "K/V replicas drift": f"{BASE} --kv-heads 1 {WHOLE_SEQUENCE}",
    "f and f* swapped": f"{BASE} {WHOLE_SEQUENCE} {PLAIN}",
    "g takes its slice in the backward": f"{BASE} {PLAIN}",
    "padding not masked": f"{BASE} {PADDED}",
    "no f before the head": f"{BASE} {WHOLE_SEQUENCE} {PLAIN}",
    "rings wait before they multiply": f"{BASE} {CHUNKED}",
}
TRAIN = partial(test_accounting.ranks_train, test_accounting.cases(2)[2:3]), test_accounting.check_train
ORDER = test_accounting.ranks_order, test_accounting.check_order
SAVED = test_activations.ranks_saved, test_activations.check_saved
LOSS = test_activations.ranks_loss_memory, test_activations.check_loss_memory
HIGHER_PRICE = {  # those that train the same: what notices them
    "each matrix communicates for itself": TRAIN,
    "gathered inputs kept": SAVED,
    "input gradient waited for": ORDER,
    "rings wait before they multiply": ORDER,
    "full logits on every rank": LOSS,
    "logits kept by the loss": LOSS,
    "gradient of the logits copied": LOSS,
}


@pytest.fixture(scope="module")
def results():
    return train_mutants(4, {name: (2, flags) for name, flags in FLAGS.items()})


@pytest.fixture(scope="module")
def observed():
    return observe_mutants(2, {name: observe for name, (observe, _) in HIGHER_PRICE.items()})


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in HIGHER_PRICE])
def test_mutant_is_rejected(results, name):
    assert_rejected(results, FLAGS[name], name, reference(training_of(FLAGS[name])))


def test_only_the_gradient_norm_shows_an_averaged_loss(results):
    """AdamW divides the factor away, and the loss curve looks right."""
    found = differences(results[BASE, "loss averaged over tp"], reference(training_of(BASE)))
    assert found["grad_norm"] == pytest.approx(0.5, abs=0.1) and found["loss"] < 0.01


@pytest.mark.parametrize("name", HIGHER_PRICE)
def test_a_higher_price_is_noticed(results, observed, name):
    """No curve shows it: it trains the same."""
    assert_parity(results[FLAGS[name], name], reference(training_of(FLAGS[name])), name)
    assert_noticed(HIGHER_PRICE[name][1], observed, name)
