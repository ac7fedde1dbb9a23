"""The suite rejects every known-wrong variant of tensor parallelism, and says so by the right figure."""

import pytest

from tests.harness.ranks import run_ranks
from tests.mechanisms.step04 import test_accounting, test_activations, test_operators
from tests.mutants.patches import patched
from tests.mutants.patches_step04 import MUTANTS
from tests.parity.runs import Result, assert_parity, differences, reference, run_cases
from tests.parity.test_step04 import ADAMW, CHUNKED, ONE, PADDED, PLAIN, UNTIED, WHOLE_SEQUENCE, training_of

BASE = f"{UNTIED} {ADAMW} {ONE} --tp 2"
WRONG_NUMBERS = {  # mutant: flags under which it shows
    "norm gradients not summed": BASE,
    "K/V replicas drift": f"{BASE} --kv-heads 1 {WHOLE_SEQUENCE}",
    "embedding mask off by one": BASE,
    "f and f* swapped": f"{BASE} {WHOLE_SEQUENCE} {PLAIN}",
    "loss averaged over tp": BASE,
    "g takes its slice in the backward": f"{BASE} {PLAIN}",
    "same weights on all ranks": BASE,
    "padding not masked": f"{BASE} {PADDED}",
    "norms counted on every rank": BASE,
    "sequences of a batch mixed": BASE,
    "no f before the head": f"{BASE} {WHOLE_SEQUENCE} {PLAIN}",
    "own largest logit": BASE,
}
HIGHER_PRICE = {  # mutant: which of the checks in tests/step04 notices
    "each matrix communicates for itself": "blocks",
    "gathered inputs kept": "saved",
    "input gradient waited for": "order",
    "rings wait before they multiply": "order",
    "full logits on every rank": "largest",
}
FLAGS = WRONG_NUMBERS | dict.fromkeys(HIGHER_PRICE, BASE) | {"rings wait before they multiply": f"{BASE} {CHUNKED}"}


def test_every_mutant_has_its_test():
    assert set(FLAGS) == set(MUTANTS)


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str | None], Result]:
    """(flags, mutant) -> what came out on 2 ranks; of the unmutated code for all flags too."""
    cases = [(flags, name) for name, flags in FLAGS.items()] + [
        (flags, None) for flags in dict.fromkeys(FLAGS.values())
    ]
    results = run_cases(2, 4, [flags for flags, _ in cases], [name for _, name in cases])
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize("flags", dict.fromkeys(FLAGS.values()))
def test_the_case_itself_passes(results, flags):
    assert_parity(results[flags, None], reference(training_of(flags)), flags)


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_mutant_is_rejected(results, name):
    with pytest.raises(AssertionError, match="relative differences above"):
        assert_parity(results[FLAGS[name], name], reference(training_of(FLAGS[name])), name)


def test_only_the_gradient_norm_shows_an_averaged_loss(results):
    """AdamW divides the factor away, and the loss curve looks right."""
    found = differences(results[BASE, "loss averaged over tp"], reference(training_of(BASE)))
    assert found["grad_norm"] == pytest.approx(0.5, abs=0.1) and found["loss"] < 0.01


# ---- right results at a higher price ---------------------------------------------------------------------------------

CHECKS = {
    "blocks": (test_accounting.ranks_blocks, test_accounting.check_blocks),
    "saved": (test_activations.ranks_saved, test_activations.check_saved),
    "order": (test_accounting.ranks_order, test_accounting.check_order),
    "largest": (test_operators.ranks_largest_tensor, test_operators.check_largest_tensor),
}


def observed_on_ranks() -> dict:
    """What the check of each mutant sees under it."""
    found = {}
    for name, check in HIGHER_PRICE.items():
        with patched(name):
            found[name] = CHECKS[check][0]()
    return found


@pytest.fixture(scope="module")
def observed() -> list[dict]:
    return run_ranks(2, observed_on_ranks)


@pytest.mark.parametrize("name", HIGHER_PRICE)
def test_a_higher_price_is_noticed(results, observed, name):
    """No curve shows it: it trains the same."""
    assert_parity(results[FLAGS[name], name], reference(training_of(FLAGS[name])), name)
    with pytest.raises(AssertionError):
        CHECKS[HIGHER_PRICE[name]][1]([rank[name] for rank in observed])
