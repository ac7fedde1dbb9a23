"""Step 5 trains exactly what step 1 trains, in whatever order the stages work and whatever that is combined with."""

import pytest

from step05_pipeline.schedules.catalogue import SCHEDULES
from tests.parity.pairwise import pairwise, thin
from tests.parity.runs import (
    ADAMW,
    SGD,
    TIED,
    UNTIED,
    assert_equal_to_one_process,
    reference,
    run_cases,
)
from tests.parity.test_step03_precision import assert_narrow_parity

NAIVE, WHOLE_SEQUENCE = "--attention naive", "--no-sequence-parallel"

# ---- every pair of flags ---------------------------------------------------------------------------------------------

LAYERS = {2: 5, 3: 7, 4: 9}  # two stages on each rank, and one layer over: stages are of different lengths
# Micro-batches of one sequence: 1 to 9, fewer than ranks, a multiple of them, and neither
BATCHES = {2: [1, 5, 8, 9], 3: [6, 7], 4: [2, 3, 4]}


def pairs_of_flags(world: int) -> list[dict]:
    factors = {
        "schedule": [f"--schedule {name}" for name in SCHEDULES if name != "dualpipe" or world % 2 == 0],
        "batches": [f"--global-batch {batches}" for batches in BATCHES[world]],
        "recompute": ["", f"--recompute selective {NAIVE}", "--recompute full"],
        "embeddings": [TIED, UNTIED],
        "stage": ["--zero 0", "--zero 3"],
        "optimizer": [SGD, ADAMW],
    }
    forbidden = [{"schedule": "--schedule dualpipe", "stage": "--zero 3"}]  # two copies
    forbidden += [
        {"schedule": "--schedule interleaved", "batches": f"--global-batch {batches}"}
        for batches in BATCHES[world]
        if batches % world
    ]
    return pairwise(factors, forbidden)


# ---- hard cases, by name ---------------------------------------------------------------------------------------------

FEW = "--micro-batch 3"  # 4 micro-batches, or 2 on each of two copies
HARD = {
    "two copies of the model": [
        (2, f"{UNTIED} {ADAMW} --pp 2 --schedule dualpipe"),
        (2, f"{TIED} {SGD} --pp 2 --schedule dualpipe --recompute full"),
        (4, f"{TIED} {ADAMW} --pp 4 --layers 5 --schedule dualpipe --micro-batch 1"),
        (4, f"{TIED} {ADAMW} --pp 2 --dp 2 --schedule dualpipe --zero 1 --bucket-mb 0.01"),
        (4, f"{UNTIED} {SGD} --pp 2 --tp 2 {FEW} --schedule dualpipe --kv-heads 1"),
    ],
    "with data parallelism in every stage of ZeRO": [
        (4, f"{TIED} {ADAMW} --pp 2 --micro-batch 2 --schedule 1f1b --zero {stage}") for stage in (0, 1, 3)
    ]
    + [
        (4, f"{UNTIED} {ADAMW} --pp 2 --micro-batch 2 --schedule zb-h1 --zero 2 --bucket-mb 0.01"),
        (4, f"{TIED} {SGD} --pp 2 --micro-batch 2 --layers 4 --schedule zbv --zero 3 --zero-reduce step"),
        (4, f"{TIED} {ADAMW} --pp 2 --micro-batch 2 --layers 4 --schedule zbv --zero 1 --zero-replicas 2"),
        (4, f"{TIED} {SGD} --pp 2 --schedule zb-h2 --dp-mode naive"),
        (4, f"{UNTIED} {SGD} --pp 2 --schedule interleaved --layers 6 --virtual-stages 3 --dp-mode overlap"),
    ],
    "with tensor and sequence parallelism": [
        (4, f"{TIED} {ADAMW} --pp 2 --tp 2 {FEW} --vocab 257 --schedule 1f1b --recompute full"),
        (4, f"{UNTIED} {ADAMW} --pp 2 --tp 2 {FEW} --layers 4 --schedule zbv --tp-mode plain"),
        (4, f"{TIED} {SGD} --pp 2 --tp 2 {FEW} --layers 4 --schedule dualpipev {WHOLE_SEQUENCE} --recompute full"),
        (4, f"{UNTIED} {SGD} --pp 2 --tp 2 {FEW} --schedule zb-h1 --tp-mode chunked --kv-heads 1"),
    ],
    "all at once": [
        (8, f"{TIED} {ADAMW} --dp 2 --pp 2 --tp 2 {FEW} --schedule 1f1b --zero 1"),
        (8, f"{UNTIED} {ADAMW} --dp 2 --pp 2 --tp 2 {FEW} --layers 4 --schedule interleaved --zero 3 --recompute full"),
        (8, f"{TIED} {SGD} --dp 2 --pp 2 --tp 2 --schedule dualpipe --zero 1 --micro-batch 1 --global-batch 8"),
        (8, f"{TIED} {ADAMW} --dp 2 --pp 2 --tp 2 {FEW} --layers 4 --schedule zbv --zero 2 --vocab 257"),
    ],
    "more stages on a rank, fewer micro-batches than stages": [
        (2, f"{UNTIED} {SGD} --pp 2 --layers 8 --virtual-stages 4 --schedule breadth-first --micro-batch 12"),
        (2, f"{TIED} {SGD} --pp 2 --layers 6 --virtual-stages 3 --schedule llama3 --consecutive 3 --micro-batch 2"),
    ],
}


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_equals_one_process(world):
    cases = [case for several in HARD.values() for ranks, case in several if ranks == world]
    few = thin({ranks: pairs_of_flags(ranks) for ranks in LAYERS}).get(world, [])
    layout = f"--pp {world} --layers {LAYERS.get(world)} --micro-batch 1"
    assert_equal_to_one_process(5, world, cases + [" ".join(filter(None, (layout, *case.values()))) for case in few])


def test_one_process():
    """A pipeline of one rank is gradient accumulation, under any schedule."""
    schedules = "1f1b", "zb-h1 --zero 1", "interleaved --virtual-stages 2"
    assert_equal_to_one_process(5, 0, [f"{TIED} {ADAMW} --schedule {each}" for each in schedules])


def test_narrow_types():
    """Master weights and sums of micro-batches in float32, split backwards included.

    Not tied: in one process autograd adds the matrix's two gradients up in the narrow type itself, two stages in
    float32.
    """
    schedules = {"float16": ("zb-h1", "zbv --zero 1")}
    schedules["bfloat16"] = *schedules["float16"], "1f1b", "interleaved", "dualpipe --zero 1"
    training = f"{UNTIED} {ADAMW} --micro-batch 1 --global-batch 6 --layers 4"
    cases = [(f"{training} --dtype {dtype}", name) for dtype, names in schedules.items() for name in names]
    results = run_cases(2, 5, [f"{alone} --pp 2 --schedule {name}" for alone, name in cases])
    for (alone, name), result in zip(cases, results, strict=True):
        assert_narrow_parity(result, reference(alone), f"{alone}, {name}")
