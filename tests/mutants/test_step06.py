"""The suite rejects every known-wrong variant of context parallelism, and says so by the right figure."""

import pytest

from tests.harness.ranks import run_ranks
from tests.mechanisms.step06 import test_accounting, test_memory
from tests.mutants.patches import patched
from tests.mutants.patches_step06 import MUTANTS
from tests.parity.runs import Result, assert_parity, differences, reference, run_cases, training_of
from tests.parity.test_step06 import ADAMW, CONTIGUOUS, DOCUMENTS, GATHER, ONE, ULYSSES, UNTIED, masked

BASE = f"{UNTIED} {ADAMW} {ONE} --cp 2 --steps 2"
FLAGS = dict.fromkeys(MUTANTS, BASE) | {  # those that show only under other flags
    "dK/dV of the own queries only": f"{BASE} {GATHER}",
    "Ulysses in rank order": f"{BASE} {ULYSSES}",
    "documents of one rank": f"{BASE} {DOCUMENTS}",
    "keys travel all the way": f"{BASE} {CONTIGUOUS}",
}
ON_FOUR = [f"--cp 4 {CONTIGUOUS} --kv-heads 4 --micro-batch 2"]
TRAIN = lambda: test_accounting.ranks_train(ON_FOUR), lambda ranks: test_accounting.check_train(ranks, ON_FOUR)
HIGHER_PRICE = {  # those that train the same: what notices them, on 4 ranks
    "K/V repeated before they are sent": TRAIN,
    "ring waits before it computes": (test_accounting.ranks_order, test_accounting.check_order),
    "keys travel all the way": TRAIN,
    "all keys of a ring kept": (test_memory.ranks_peak, test_memory.check_peak),
    "causal blocks in squares": TRAIN,
}


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str | None], Result]:
    """(flags, mutant) -> what came out on 2 ranks; of the unmutated code for all flags too."""
    cases = [(flags, name) for name, flags in FLAGS.items()]
    cases += [(flags, None) for flags in dict.fromkeys(FLAGS.values())]
    results = run_cases(2, 6, [flags for flags, _ in cases], [name for _, name in cases])
    return dict(zip(cases, results, strict=True))


def expected(flags: str) -> Result:
    return (masked if DOCUMENTS in flags else reference)(training_of(flags))


@pytest.mark.parametrize("flags", dict.fromkeys(FLAGS.values()))
def test_the_case_itself_passes(results, flags):
    assert_parity(results[flags, None], expected(flags), flags)


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in HIGHER_PRICE])
def test_mutant_is_rejected(results, name):
    with pytest.raises(AssertionError, match="relative differences above"):
        assert_parity(results[FLAGS[name], name], expected(FLAGS[name]), name)


def test_only_the_gradient_norm_shows_an_averaged_loss(results):
    """It is as many times too large as there are ranks; AdamW divides the factor away."""
    found = differences(results[BASE, "loss averaged over a rank's tokens"], expected(BASE))
    assert found["grad_norm"] == pytest.approx(1, abs=0.1)


def observed_on_ranks() -> dict:
    """What the check of each mutant sees without it and under it."""
    found = {}
    for name, (on_rank, _) in HIGHER_PRICE.items():
        for mutant in (None, name):
            with patched(mutant):
                found[name, mutant] = on_rank()
    return found


@pytest.fixture(scope="module")
def observed() -> list[dict]:
    return run_ranks(4, observed_on_ranks)


@pytest.mark.parametrize("name", HIGHER_PRICE)
def test_a_higher_price_is_noticed(results, observed, name):
    """No curve shows it: it trains the same."""
    assert_parity(results[FLAGS[name], name], expected(FLAGS[name]), name)
    HIGHER_PRICE[name][1]([rank[name, None] for rank in observed])
    with pytest.raises(AssertionError):
        HIGHER_PRICE[name][1]([rank[name, name] for rank in observed])
