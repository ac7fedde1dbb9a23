"""The suite rejects every known-wrong variant of products in FP8."""

import pytest

from tests.mechanisms.step08.test_delayed_scales import check_delayed_scales, check_idle_expert
from tests.mechanisms.step08.test_narrow_numbers import check_cast, check_weight_gradient
from tests.mutants.patches import assert_applies, patched
from tests.mutants.patches.fp8 import MUTANTS
from tests.parity.runs import ADAMW, SGD, UNTIED, assert_parity
from tests.parity.test_fp8 import (
    DELAYED,
    GATHERED,
    NOW,
    ROW,
    SHAPE,
    SHARED,
    TILE,
    TOLERANCE,
    one_process,
    run_narrow,
)

BASE = f"{UNTIED} {SHAPE} --layers 1"
TRAINED = {  # flags, and the micro-batch of the one process: mutants
    (f"{BASE} {SGD} {NOW} --tp 2 --micro-batch 3", 3): (
        *("scale not reduced over tp", "gradient scale reused", "scale of the wrong operand"),
    ),
    (f"{BASE} {ADAMW} {DELAYED} --dp 2 --micro-batch 3", 6): ("notes not compared",),
    (f"{BASE} {ADAMW} {TILE} --seq-len 36 --dp 2 --micro-batch 3", 2): ("blocks across sequences",),
    (f"{BASE} {SGD} {TILE} {GATHERED} --dp 2 --micro-batch 3", 3): (
        *("scale not reduced over the shards", "scales never renewed"),
    ),
    (f"{UNTIED} {SHARED} --layers 1 {SGD} {ROW} --tp 2 --ep 2 --micro-batch 3", 3): (
        "scale of a part of the shared tokens",
    ),
    (f"{BASE} {SGD} {NOW} {GATHERED} --dp 2 --tp 2 --micro-batch 3", 3): ("gathered scale not reduced over tp",),
}
CHECKED = {
    "saturation left out": check_cast,
    "weight gradient in bfloat16": check_weight_gradient,
    "delayed scale of the last step alone": check_delayed_scales,
    "history one step too short": check_delayed_scales,
    "what nobody has seen is noted": check_idle_expert,
}


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: ", ".join(TRAINED[case]))
def test_parity_shows_it(case):
    assert_applies(*TRAINED[case])
    flags, micro_batch = case
    ranks = 4 if "--dp 2 --tp 2" in flags else 2
    sound, *wrong = run_narrow(ranks, [flags] * (1 + len(TRAINED[case])), [None, *TRAINED[case]])
    expected = one_process(flags, micro_batch)
    assert_parity(sound, expected, flags, TOLERANCE)
    for name, result in zip(TRAINED[case], wrong, strict=True):
        with pytest.raises(AssertionError, match="relative differences above"):
            assert_parity(result, expected, name, TOLERANCE)


@pytest.mark.parametrize("name", CHECKED)
def test_a_check_shows_it(name):
    assert_applies(name)
    CHECKED[name]()
    with patched(name), pytest.raises(AssertionError):
        CHECKED[name]()


def test_every_mutant_is_tried():
    assert {*CHECKED, *(name for names in TRAINED.values() for name in names)} == MUTANTS.keys()
