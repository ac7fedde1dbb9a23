"""The suite rejects every known-wrong variant of the pipeline, and says so by the right figure."""

from functools import partial

import pytest

from tests.mechanisms.step05 import test_accounting
from tests.mechanisms.step05.observe import observe
from tests.mutants.patches_step05 import MUTANTS
from tests.mutants.rejection import assert_noticed, assert_rejected, observe_mutants, train_mutants
from tests.parity.runs import assert_parity, differences, reference, run_cases, training_of
from tests.parity.test_step05 import ADAMW, TIED, UNTIED

BASE = f"{UNTIED} {ADAMW} --steps 2 --micro-batch 3 --layers 4 --pp 2"  # 4 micro-batches on 2 ranks
TIED_BASE = BASE.replace(UNTIED, TIED)
DP = f"{UNTIED} {ADAMW} --steps 2 --micro-batch 2 --layers 4 --pp 2 --dp 2"  # 3 micro-batches on each of 4
WRONG_NUMBERS = {  # mutant: (ranks, flags) under which it shows
    "missing share of micro-batches": (2, f"{BASE} --schedule 1f1b"),
    "loss of one rank": (2, f"{BASE} --schedule 1f1b"),
    "reduced before the last micro-batch": (4, f"{DP} --schedule 1f1b"),
    "W before its I": (2, f"{BASE} --schedule zb-h1"),
    "W with the input of another micro-batch": (2, f"{BASE} --schedule zb-h1"),
    "norms forgotten by split backwards": (2, f"{BASE} --schedule zb-h1"),
    "stale tied gradient": (2, f"{TIED_BASE} --schedule 1f1b"),
    "two copies drift apart": (2, f"{TIED_BASE} --schedule dualpipe"),
    "tied matrix counted twice": (2, f"{TIED_BASE} --schedule 1f1b"),
    "two copies counted twice": (2, f"{BASE} --schedule dualpipe"),
    "targets of another micro-batch": (2, f"{BASE} --schedule 1f1b"),
    "gradients of another micro-batch": (2, f"{BASE} --schedule afab"),
    "one receive buffer": (2, f"{BASE} --schedule afab"),
    "positions of the slice": (4, f"{BASE} --tp 2 --schedule 1f1b"),
    "layers counted from zero on every stage": (2, f"{BASE} --schedule 1f1b"),
    "weights of the first step": (4, f"{DP} --schedule 1f1b --zero 3"),
}
HIGHER_PRICE = {  # mutant: (check of tests/step05 that notices, flags on 4 ranks, what it says)
    "sent outputs kept": ("memory", "--pp 4 --schedule 1f1b", "sent outputs kept"),
    "graph kept until W": ("memory", "--pp 4 --schedule zb-h1", "graphs alive"),
    "reduced at the end": ("reductions", "--pp 2 --dp 2 --schedule zbv --zero 1", "reduced in the optimizer"),
    "gathered for each micro-batch": ("gathers", "--pp 2 --dp 2 --schedule 1f1b --zero 3", "gathered"),
    "received when needed": ("program", "--pp 4 --schedule 1f1b", "order of messages"),
    "sends waited for": ("program", "--pp 4 --schedule 1f1b", "waits for its sends"),
    "operands of weight gradients kept": ("memory", "--pp 4 --schedule zb-h1", "operands of weight gradients kept"),
    "weights kept after the step": ("gathers", "--pp 2 --dp 2 --schedule 1f1b --zero 3", "bytes of weights"),
    "wait counted as work": ("messages", "--pp 4 --schedule 1f1b", "counts the wait as part of the action"),
    "one communicator for both directions": ("communicators", "--pp 4 --schedule zb-h2", "one direction waits"),
}


def test_every_mutant_has_its_test():
    assert {*WRONG_NUMBERS, *HIGHER_PRICE} == set(MUTANTS)


@pytest.fixture(scope="module")
def results():
    return train_mutants(5, WRONG_NUMBERS)


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_mutant_is_rejected(results, name):
    flags = WRONG_NUMBERS[name][1]
    assert_rejected(results, flags, name, reference(training_of(flags)))


def test_only_the_gradient_norm_shows_a_missing_share(results):
    """It is as many times too large as there are micro-batches; AdamW divides the factor away, and the curve looks
    right.
    """
    flags = WRONG_NUMBERS["missing share of micro-batches"][1]
    found = differences(results[flags, "missing share of micro-batches"], reference(training_of(flags)))
    assert found["grad_norm"] == pytest.approx(3, abs=0.1) and found["loss"] < 0.01


def test_what_is_counted_twice_shows_in_the_norm(results):
    flags = WRONG_NUMBERS["two copies counted twice"][1]
    found = differences(results[flags, "two copies counted twice"], reference(training_of(flags)))
    assert found["grad_norm"] == pytest.approx(2**0.5 - 1, rel=0.01)


# ---- right results at a higher price ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def observed():
    """What 4 ranks did."""
    each = {flags: partial(observe, flags) for _, flags, _ in HIGHER_PRICE.values()}
    return observe_mutants(4, {name: each[flags] for name, (_, flags, _) in HIGHER_PRICE.items()})


@pytest.mark.parametrize("name", HIGHER_PRICE)
def test_a_higher_price_is_noticed(observed, name):
    check, flags, message = HIGHER_PRICE[name]
    check = getattr(test_accounting, f"check_{check}")
    assert_noticed(lambda seen: check(seen, flags), observed, name, message)


def test_a_higher_price_trains_right():
    """Why parity is not enough: each of these passes it."""
    layouts = {"sent outputs kept": "1f1b", "graph kept until W": "zb-h1", "received when needed": "1f1b"}
    layouts |= {"sends waited for": "1f1b", "one communicator for both directions": "1f1b"}
    cases = [f"{BASE} --schedule {schedule}" for schedule in layouts.values()]
    for name, case, result in zip(layouts, cases, run_cases(2, 5, cases, list(layouts)), strict=True):
        assert_parity(result, reference(training_of(case)), name)
