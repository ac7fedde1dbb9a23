"""Step 7 trains what step 6 trains if there are no experts, and with experts the same in every layout."""

import functools

import numpy as np
import pytest

from tests.harness.ranks import run_ranks, steps_of
from tests.parity.runs import (
    SMALL,
    Result,
    assemble,
    assert_equal_to_step01,
    assert_parity,
    curve_of,
    run_cases,
    train_case,
    train_here,
    training_of,
)

SGD, ADAMW = "--optimizer sgd --lr 1e-2 --clip 0", "--optimizer adamw --lr 1e-3 --clip 0.5"
MIXTRAL = "--experts 6 --aux-coef 0.1 --z-coef 0.01"
DEEPSEEK = "--experts 8 --top-k 3 --gate sigmoid --shared-experts 1 --dense-layers 1 --expert-ffn 20"
DEEPSEEK += " --expert-groups 4 --node-limit 2 --balance bias --bias-rate 0.01"
CAPACITY = "--experts 4 --capacity-factor 0.9 --aux-coef 0.1"


@functools.cache
def on_one_process(flags: str) -> Result:
    return assemble([train_case(7, flags)])


def test_without_experts():
    cases = ["--dp 2 --zero 3", "--pp 2 --schedule zb-h1", "--cp 2"]
    assert_equal_to_step01(7, 2, [f"{ADAMW} {case}" for case in cases])


LAYOUTS = {
    1: [
        f"{ADAMW} {MIXTRAL} --micro-batch 3 --recompute full",
        f"{SGD} {DEEPSEEK} --micro-batch 2 --recompute selective --zero 1",
    ],
    2: [
        f"{ADAMW} {MIXTRAL} --dp 2 --bucket-mb 0.01",
        f"{SGD} {MIXTRAL} --dp 2 --zero 3 --recompute full --micro-batch 3",
        f"{ADAMW} {DEEPSEEK} --dp 2 --zero 1 --micro-batch 2",
        f"{SGD} {DEEPSEEK} --dp 2 --zero 2",
        f"{ADAMW} {CAPACITY} --dp 2 --micro-batch 2",
        f"{ADAMW} {DEEPSEEK} --pp 2 --layers 3",
        f"{ADAMW} {MIXTRAL} --pp 2 --schedule zb-h1 --zero 1",
        f"{SGD} {MIXTRAL} --cp 2",
        f"{ADAMW} {DEEPSEEK} --cp 2 --zero 1",
    ],
}


@pytest.mark.parametrize("world", LAYOUTS)
def test_with_experts(world):
    if world == 1:
        results = [assemble([train_case(7, case)]) for case in LAYOUTS[world]]
    else:
        results = run_cases(world, 7, LAYOUTS[world])
    for case, result in zip(LAYOUTS[world], results, strict=True):
        assert_parity(result, on_one_process(training_of(case)), f"{world} ranks, {case}")


def test_the_record_and_a_resumed_run(tmp_path):
    """What routers count is that of all ranks; the biases are saved, and go on in another layout."""
    training = f"{SMALL} {ADAMW} {DEEPSEEK} --z-coef 0.01 --capacity-factor 1"
    two, one, resumed = (f"{training} --run-dir {tmp_path}/{name}" for name in ("two", "one", "resumed"))
    save = "--save-every 5 --zero 1 --micro-batch 2"
    run_ranks(2, train_here, 7, f"{two} {save}")
    whole = assemble([{"curve": curve_of(tmp_path / "two"), "boxes": train_here(7, f"{one} --micro-batch 12")}])
    for ours, theirs in zip(steps_of(tmp_path / "two"), steps_of(tmp_path / "one"), strict=True):
        assert ours["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-10) and ours["aux_loss"] > 0
        assert (ours["imbalance"], ours["dropped"]) == (theirs["imbalance"], theirs["dropped"])
        assert ours["imbalance"] > 1 and ours["dropped"] > 0
    boxes = train_here(7, f"{resumed} --resume {tmp_path}/two/checkpoints/step-00000005 --micro-batch 4")
    end = assemble([{"curve": [(0, 0)], "boxes": boxes}]).parameters
    assert any(name.endswith("bias") for name in end)
    for name, value in whole.parameters.items():
        assert np.linalg.norm(end[name] - value) <= 1e-10 * np.linalg.norm(value), name
