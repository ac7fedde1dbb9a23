"""The suite rejects every known-wrong variant of tensor parallelism, and says so by the right figure."""

import pytest

from tests.harness.ranks import run_ranks
from tests.mechanisms.step04 import test_accounting, test_activations
from tests.mutants.patches import patched
from tests.mutants.patches_step04 import MUTANTS
from tests.parity.runs import Result, assert_parity, differences, reference, run_cases, training_of
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
ONE_CASE = test_accounting.cases(2)[2:3]
TRAIN = lambda: test_accounting.ranks_train(ONE_CASE), test_accounting.check_train
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
def results() -> dict[tuple[str, str | None], Result]:
    """(flags, mutant) -> what came out on 2 ranks; of the unmutated code for all flags too."""
    cases = [(flags, name) for name, flags in FLAGS.items()]
    cases += [(flags, None) for flags in dict.fromkeys(FLAGS.values())]
    results = run_cases(2, 4, [flags for flags, _ in cases], [name for _, name in cases])
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize("flags", dict.fromkeys(FLAGS.values()))
def test_the_case_itself_passes(results, flags):
    assert_parity(results[flags, None], reference(training_of(flags)), flags)


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in HIGHER_PRICE])
def test_mutant_is_rejected(results, name):
    with pytest.raises(AssertionError, match="relative differences above"):
        assert_parity(results[FLAGS[name], name], reference(training_of(FLAGS[name])), name)


def test_only_the_gradient_norm_shows_an_averaged_loss(results):
    """AdamW divides the factor away, and the loss curve looks right."""
    found = differences(results[BASE, "loss averaged over tp"], reference(training_of(BASE)))
    assert found["grad_norm"] == pytest.approx(0.5, abs=0.1) and found["loss"] < 0.01


def observed_on_ranks() -> dict:
    """What the check of each mutant sees under it."""
    found = {}
    for name, (on_rank, _) in HIGHER_PRICE.items():
        with patched(name):
            found[name] = on_rank()
    return found


@pytest.fixture(scope="module")
def observed() -> list[dict]:
    return run_ranks(2, observed_on_ranks)


@pytest.mark.parametrize("name", HIGHER_PRICE)
def test_a_higher_price_is_noticed(results, observed, name):
    """No curve shows it: it trains the same."""
    assert_parity(results[FLAGS[name], name], reference(training_of(FLAGS[name])), name)
    with pytest.raises(AssertionError):
        HIGHER_PRICE[name][1]([rank[name] for rank in observed])
