"""Step 6 trains exactly what step 1 trains, however sequences are divided and whatever that is combined with."""

import functools
import itertools
import os

import pytest

from tests.parity.pairwise import pairwise, thin
from tests.parity.runs import (
    Result,
    assemble,
    assert_equal_to_step01,
    assert_parity,
    differences,
    reference,
    run_cases,
    train_case,
    training_of,
)

SGD, ADAMW = "--optimizer sgd --lr 1e-2 --clip 0", "--optimizer adamw --lr 1e-3 --clip 0.5"
TIED, UNTIED = "--tie-embeddings", "--no-tie-embeddings"
MHA, GQA, MQA = (f"--kv-heads {heads}" for heads in (4, 2, 1))  # of 4 heads
RING, GATHER, ULYSSES = (f"--cp-mode {mode}" for mode in ("ring", "allgather", "ulysses"))
ZIGZAG, CONTIGUOUS, STRIPED = (f"--cp-split {split}" for split in ("zigzag", "contiguous", "striped"))
WHOLE_SEQUENCE, NAIVE = "--no-sequence-parallel", "--attention naive"
ONE, TWO = "--micro-batch 12", "--micro-batch 6"  # all samples in one micro-batch, or in two
THREE = "--hidden 24 --layers 1 --heads 6"  # 3 ranks of Ulysses divide it
ALL = bool(os.environ.get("TEST_ALL"))
STEPS = "--steps 10" if ALL else "--steps 5"

# ---- every pair of flags ---------------------------------------------------------------------------------------------

SCHEDULES = f"1f1b {TWO}", f"zb-h1 {TWO}", f"zbv --layers 4 {TWO}", f"interleaved --layers 4 {TWO}"
LAYOUTS = {
    2: [f"--cp 2 {ONE}", "--cp 2 --micro-batch 6"],
    3: [f"--cp 3 {THREE} {ONE}"],
    4: [
        f"--cp 4 {ONE}",
        "--cp 2 --dp 2 --micro-batch 3",
        f"--cp 2 --tp 2 {ONE}",
        f"--cp 2 --tp 2 {ONE} {WHOLE_SEQUENCE}",
        *(f"--cp 2 --pp 2 --schedule {name}" for name in SCHEDULES),
    ],
}


def pairs_of_flags(world: int) -> list[dict]:
    factors = {
        "layout": LAYOUTS[world],
        "mode": [RING, GATHER, ULYSSES],
        "split": [ZIGZAG, CONTIGUOUS, STRIPED],
        "heads": [f"--kv-heads {heads}" for heads in (6, 3, 1)] if world == 3 else [MHA, GQA, MQA],
        "embeddings": [TIED, UNTIED],
        "recompute": ["", f"--recompute selective {NAIVE}", "--recompute full"],
        "stage": [f"--zero {stage}" for stage in range(4)],
        "optimizer": [SGD, ADAMW],
    }
    return pairwise(factors)


# ---- hard cases, by name ---------------------------------------------------------------------------------------------

HARD = {
    "gradients are reduced over dp x cp, whichever of them is 1": [
        (2, f"{UNTIED} {ADAMW} --cp 2 --micro-batch 4 --zero 3 --zero-replicas 2"),
        (2, f"{TIED} {SGD} --cp 2 {TWO} --dp-mode overlap {MQA}"),
        (4, f"{UNTIED} {ADAMW} --cp 2 --dp 2 --micro-batch 3 --zero 2 --zero-replicas 2 --bucket-mb 0.02"),
        (4, f"{TIED} {SGD} --cp 4 --dp 1 {ONE} --zero 3 --zero-reduce step --recompute full"),
    ],
    "one token in a chunk": [
        (2, f"{UNTIED} {ADAMW} --cp 2 --seq-len 4 {ONE}"),
        (4, f"{UNTIED} {SGD} --cp 4 --seq-len 4 {ONE} {CONTIGUOUS}"),
        (4, f"{TIED} {ADAMW} --cp 4 --seq-len 4 --global-batch 1 --micro-batch 1 {STRIPED} {GATHER}"),
    ],
    "tensor and sequence parallelism: positions of a part of a part, K/V heads on several ranks": [
        (4, f"{UNTIED} {ADAMW} --cp 2 --tp 2 {TWO} {MQA} {STRIPED} --tp-mode chunked --vocab 257"),
        (4, f"{TIED} {SGD} --cp 2 --tp 2 {ONE} {MQA} {ULYSSES} --tp-mode plain --recompute full"),
    ],
    "two copies of the model in a pipeline": [
        (4, f"{UNTIED} {SGD} --cp 2 --pp 2 {TWO} --schedule dualpipe --zero 1 {CONTIGUOUS}"),
    ],
    "all at once": [
        (8, f"{TIED} {ADAMW} --cp 2 --tp 2 --pp 2 {TWO} --zero 1"),
        (8, f"{UNTIED} {SGD} --cp 2 --dp 2 --pp 2 --micro-batch 3 --layers 4 --schedule zbv --zero 3 {CONTIGUOUS} {GATHER}"),
    ],
}
WIDE = [
    (8, f"{UNTIED} {ADAMW} --cp 4 --tp 2 {ONE} {ULYSSES} --heads 8 --kv-heads 4 --recompute full"),
    (8, f"{TIED} {SGD} --cp 2 --dp 2 --tp 2 {TWO} --zero 3 {STRIPED} {WHOLE_SEQUENCE}"),
    (8, f"{TIED} {ADAMW} --cp 4 --pp 2 {TWO} --layers 4 --schedule dualpipev {ULYSSES} {MHA}"),
    (16, f"{UNTIED} {ADAMW} --cp 2 --dp 2 --tp 2 --pp 2 --micro-batch 3 --zero 2"),
    (16, f"{TIED} {SGD} --cp 4 --dp 2 --tp 2 {TWO} --zero 3 {GATHER}"),
]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16] if ALL else [2, 3, 4, 8])
def test_equals_one_process(world):
    every = [*itertools.chain(*HARD.values()), *(WIDE if ALL else [])]
    cases = [case for ranks, case in every if ranks == world]
    few = thin({ranks: pairs_of_flags(ranks) for ranks in LAYOUTS}).get(world, [])
    cases += [" ".join(filter(None, case.values())) for case in few]
    assert_equal_to_step01(6, world, [f"{STEPS} {case}" for case in cases])
