"""Step 3 trains exactly what step 1 trains, in every stage of ZeRO and whatever it is combined with."""

import pytest

from tests.parity.pairwise import pairwise, thin
from tests.parity.runs import ADAMW, SGD, TIED, UNTIED, assert_equal_to_one_process

ODD = "--hidden 20 --heads 2 --kv-heads 1 --ffn 27"  # shards on 3 and 4 ranks cut rows, on 3 they need padding
TINY = "--hidden 2 --heads 1 --kv-heads 1 --ffn 1 --layers 1"
STEP = "--zero-reduce step"

# ---- pairs of flags --------------------------------------------------------------------------------------------------


def factors(world: int) -> dict[str, list[str]]:
    return {
        "stage": ["--zero 0", "--zero 1", "--zero 2", "--zero 3"],
        "replicas": [""] + [f"--zero-replicas {copies}" for copies in sorted({2, world}) if world % copies == 0],
        "reduce": ["", STEP],
        "accumulation": ["", f"--micro-batch {12 // world}"],  # 12 / world micro-batches of one sequence, or one
        "recompute": ["", "--recompute selective --attention naive", "--recompute full"],
        "embeddings": [TIED, UNTIED],
        "optimizer": [SGD, ADAMW],
        "bucket": ["", "--bucket-mb 0.02"],
        "model": ["", "--kv-heads 1", ODD],
    }


def pairs_of_flags(world: int) -> list[dict]:
    choices = factors(world)
    forbidden = [{"stage": "--zero 0", "replicas": copies} for copies in choices["replicas"] if copies]
    forbidden += [{"stage": stage, "reduce": STEP} for stage in ("--zero 0", "--zero 1")]
    every = pairwise(choices, forbidden)
    assert 12 <= len(every) <= 18
    return every


# ---- hard cases, by name ---------------------------------------------------------------------------------------------

HARD = {
    "naive and overlap, as in step 2": [
        (2, f"{UNTIED} {ADAMW} --zero 0 --dp-mode naive"),
        (3, f"{TIED} {SGD} --zero 0 --dp-mode overlap --recompute full"),
    ],
    "a recomputed layer is gathered once for its backward, in each micro-batch": [
        (3, f"{UNTIED} {ADAMW} --zero 3 --recompute full --micro-batch 2"),
        (2, f"{UNTIED} {ADAMW} --zero 3 --recompute selective --attention naive --micro-batch 3 {STEP}"),
    ],
    "a tied matrix is needed by the first and the last region, and gets gradients from both": [
        (2, f"{TIED} {SGD} --zero 3"),
        (3, f"{TIED} {ADAMW} --zero 3 --recompute full {ODD}"),
        (4, f"{TIED} {ADAMW} --zero 3 --zero-replicas 2 {STEP}"),
    ],
    "gradients of all micro-batches, then one reduce-scatter": [
        (3, f"{UNTIED} {ADAMW} --zero 2 {STEP} --bucket-mb 0.02"),
        (2, f"{UNTIED} {SGD} --zero 3 {STEP} --recompute full"),
    ],
    "shards are summed over the replicas once, after the last micro-batch": [
        (4, f"{UNTIED} {ADAMW} --zero {stage} --zero-replicas 2 --bucket-mb 0.02 {ODD}") for stage in (1, 2, 3)
    ],
    "as many copies as ranks: shards of a single rank": [
        (2, f"{UNTIED} {ADAMW} --zero {stage} --zero-replicas 2 --micro-batch 2") for stage in (1, 2, 3)
    ],
    "one layer, and more layers than the prefetch spans": [
        (2, f"{UNTIED} {ADAMW} --zero 3 --layers 1 --micro-batch 6"),
        (2, f"{TIED} {SGD} --zero 3 --layers 5 --micro-batch 6"),
    ],
    "so small that some ranks own nothing of some units, or no matrix in them": [
        (4, f"{TIED} {ADAMW} {TINY} --zero 3 --micro-batch 3"),  # the last unit is a norm of 2 elements
        (4, f"{UNTIED} {ADAMW} {TINY} --zero 1 --micro-batch 3 --bucket-mb 1e-6"),  # a parameter a bucket
        (3, f"{UNTIED} {SGD} {TINY} --zero 2 --bucket-mb 1e-6"),
    ],
    "grouped queries in every form": [
        (3, f"{UNTIED} {ADAMW} --kv-heads {kv_heads} --zero 3 --micro-batch 4") for kv_heads in (1, 4)
    ],
}
WORLDS = [2, 3, 4]


@pytest.mark.parametrize("world", WORLDS)
def test_step03_equals_step01(world):
    cases = [case for several in HARD.values() for ranks, case in several if ranks == world]
    cases += [" ".join(case.values()) for case in thin({world: pairs_of_flags(world) for world in WORLDS})[world]]
    assert_equal_to_one_process(3, world, cases)


def test_one_process():
    """A group of one rank: every stage is step 1."""
    flags = f"{UNTIED} {ADAMW}", f"{TIED} {SGD}", f"{UNTIED} {SGD}", f"{TIED} {ADAMW}"
    cases = [f"{each} --zero {stage} --micro-batch 4 --bucket-mb 0.02" for stage, each in enumerate(flags)]
    assert_equal_to_one_process(3, 0, cases)
