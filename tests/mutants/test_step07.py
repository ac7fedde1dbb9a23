"""The suite rejects every known-wrong variant of experts and of expert parallelism, and says so by the right figure."""

import pytest

from common.start import environment
from tests.harness.ranks import run_ranks
from tests.mechanisms.step07 import test_accounting
from tests.mutants.patches import patched
from tests.mutants.patches_step07 import MUTANTS
from tests.mutants.rejection import assert_noticed, assert_rejected, observe_mutants, train_mutants
from tests.parity.runs import SMALL, assemble, assert_parity, curve_of, reference, train_here, training_of
from tests.parity.test_step07 import ADAMW, BIAS, CAPACITY, FOUR, ONE, SHARED, TWO

MODEL = f"{ADAMW} --experts 8 {SHARED} --steps 2"
BASE = f"{MODEL} --dp 2 --ep 2 {FOUR}"
OF_CHECKPOINTS, LONGER = "one rank's experts saved", f"{BASE} --steps 4"
FLAGS = dict.fromkeys(MUTANTS, BASE) | {  # those that show only under other flags
    "experts' gradients averaged": f"{MODEL} --dp 2 {FOUR}",
    "router's gradient not summed over tp": f"{MODEL} --tp 2 --ep 2 {TWO}",
    "statistics of a rank": f"{MODEL} --aux-coef 0.1 --cp 2 --ep 2 {ONE}",
    "places of a rank": f"{MODEL} {CAPACITY} --cp 2 --ep 2 {ONE}",
    "loads of one copy": f"{MODEL} {BIAS} --pp 2 --schedule dualpipe {TWO}",
    OF_CHECKPOINTS: LONGER,
}
HIGHER_PRICE = "dispatch waits before the shared experts", "gradients arrive before the shared experts' backward"
HIGHER_PRICE += ("counts read for drops that cannot be",)


@pytest.fixture(scope="module")
def results():
    return train_mutants(7, {name: (2, flags) for name, flags in FLAGS.items()})


@pytest.fixture(scope="module")
def observed():
    return observe_mutants(2, dict.fromkeys(HIGHER_PRICE, test_accounting.ranks_order))


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in (OF_CHECKPOINTS, *HIGHER_PRICE)])
def test_mutant_is_rejected(results, name):
    assert_rejected(results, FLAGS[name], name, reference(training_of(FLAGS[name]), 7))


def ranks_save_and_resume(folder: str, mutants: list[str | None]) -> list[dict]:
    """Of each mutant: two steps, a checkpoint, and from there two more steps on as many ranks."""
    found = []
    for index, mutant in enumerate(mutants):
        flags = f"{SMALL} {LONGER} --run-dir {folder}/{index} --save-every 2"
        with patched(mutant):
            train_here(7, f"{flags} --steps 2")
            boxes = train_here(7, f"{flags} --resume auto")
        curve = curve_of(f"{folder}/{index}") if environment().rank == 0 else []
        found.append({"curve": curve, "boxes": boxes})
    return found


def test_a_checkpoint_with_the_experts_of_one_rank_is_noticed(results, tmp_path):
    """Nothing complains when it is loaded, and the run that saved it goes on well."""
    assert_parity(results[LONGER, OF_CHECKPOINTS], reference(training_of(LONGER), 7), OF_CHECKPOINTS)
    ranks = run_ranks(2, ranks_save_and_resume, str(tmp_path), [None, OF_CHECKPOINTS])
    right, wrong = (assemble(list(parts)) for parts in zip(*ranks, strict=True))
    assert_parity(right, reference(training_of(LONGER), 7), "resumed")
    with pytest.raises(AssertionError, match="'loss'"):
        assert_parity(wrong, reference(training_of(LONGER), 7), OF_CHECKPOINTS)


@pytest.mark.parametrize("name", HIGHER_PRICE)
def test_a_higher_price_is_noticed(results, observed, name):
    """No curve shows it: it trains the same."""
    assert_parity(results[FLAGS[name], name], reference(training_of(FLAGS[name]), 7), name)
    assert_noticed(test_accounting.check_order, observed, name)
