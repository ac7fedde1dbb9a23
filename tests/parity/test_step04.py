"""Step 4 trains exactly what step 1 trains, however layers are divided and whatever that is combined with."""

import pytest

from tests.parity.pairwise import pairwise, thin
from tests.parity.runs import ADAMW, SGD, TIED, UNTIED, assert_equal_to_one_process

WHOLE_SEQUENCE = "--no-sequence-parallel"
PLAIN, OVERLAP, CHUNKED = (f"--tp-mode {mode}" for mode in ("plain", "overlap", "chunked"))
MHA, GQA, MQA = (f"--kv-heads {heads}" for heads in (4, 2, 1))  # of 4 heads
PADDED = "--vocab 257"  # a prime
ONE = "--micro-batch 12"  # all samples in one micro-batch
NAIVE = "--attention naive"
THREE = "--hidden 24 --layers 1"  # 3 and 6 heads divide it


# ---- every pair of flags ---------------------------------------------------------------------------------------------


LAYOUTS = {  # of 12 samples a step, in one micro-batch a rank or in two
    2: [f"--tp 2 {ONE}", "--tp 2 --micro-batch 6"],
    3: [f"--tp 3 {ONE}"],
    4: [f"--tp 4 {ONE}", "--tp 4 --micro-batch 6", "--tp 2 --micro-batch 6", "--tp 2 --micro-batch 3"],
}


def factors(world: int) -> dict[str, list[str]]:
    three = [f"{THREE} --heads {heads} --kv-heads {kv_heads}" for heads, kv_heads in ((3, 3), (6, 3), (6, 1))]
    return {
        "layout": LAYOUTS[world],
        "sequence": ["", WHOLE_SEQUENCE],
        "mode": [PLAIN, OVERLAP, CHUNKED],
        "heads": three if world == 3 else [MHA, GQA, MQA],
        "embeddings": [TIED, UNTIED],
        "vocabulary": [""] if world == 3 else ["", PADDED],  # 3 does not divide 256 either
        "recompute": ["", f"--recompute selective {NAIVE}", "--recompute full"],
        "stage": ["--zero 0", "--zero 1", "--zero 2", "--zero 3"] if world == 4 else ["--zero 0", "--zero 3"],
        "optimizer": [SGD, ADAMW],
    }


def pairs_of_flags(world: int) -> list[dict]:
    return pairwise(factors(world), forbidden=[{"sequence": WHOLE_SEQUENCE, "mode": CHUNKED}])


# ---- hard cases, by name ---------------------------------------------------------------------------------------------

HARD = {
    "a K/V head on several ranks, and shards that cut its gradient": [
        (2, f"{UNTIED} {ADAMW} --tp 2 {MQA} {ONE} --zero 2"),
        (4, f"{UNTIED} {SGD} --tp 4 {GQA} {ONE} {WHOLE_SEQUENCE}"),
        (4, f"{UNTIED} {ADAMW} --tp 2 --hidden 20 --heads 2 {MQA} --ffn 26 --micro-batch 6 --zero 3 --recompute full"),
    ],
    "a tied matrix with padding: embedding, head and its gradients from both": [
        (2, f"{TIED} {SGD} --tp 2 {PADDED} {ONE} --zero 3 --recompute full"),
        (4, f"{TIED} {ADAMW} --tp 4 {PADDED} {ONE}"),
        (4, f"{TIED} {ADAMW} --tp 2 {PADDED} --micro-batch 6 --zero 3 {WHOLE_SEQUENCE}"),
    ],
    "one token of a sequence on each rank; one sequence in a batch": [
        (2, f"{UNTIED} {SGD} --tp 2 --seq-len 2 {ONE} {CHUNKED}"),
        (2, f"{TIED} {ADAMW} --tp 2 --global-batch 1 --micro-batch 1"),
        (4, f"{UNTIED} {ADAMW} --tp 4 --seq-len 4 --global-batch 2 --micro-batch 1 {CHUNKED}"),
    ],
    "a whole sequence may have any length": [(2, f"{UNTIED} {ADAMW} --tp 2 --seq-len 23 {ONE} {WHOLE_SEQUENCE}")],
    "the recomputed forward communicates as the first one did, in each micro-batch": [
        (2, f"{UNTIED} {ADAMW} --tp 2 --micro-batch 3 --recompute full {CHUNKED}"),
        (2, f"{UNTIED} {SGD} --tp 2 --micro-batch 6 --recompute full {WHOLE_SEQUENCE} {OVERLAP}"),
    ],
    "hybrid sharding, sums of shards after the last micro-batch": [
        (4, f"{UNTIED} {ADAMW} --tp 2 --micro-batch 3 --zero 3 --zero-replicas 2"),
        (4, f"{UNTIED} {SGD} --tp 2 --micro-batch 3 --zero 2 --zero-reduce step --bucket-mb 0.02"),
    ],
    "gradients of replicas all-reduced early, late, in small buckets": [
        (4, f"{UNTIED} {ADAMW} --tp 2 --micro-batch 6 --dp-mode naive"),
        (4, f"{TIED} {ADAMW} --tp 2 --micro-batch 6 --dp-mode overlap {MQA}"),
        (2, f"{UNTIED} {ADAMW} --tp 2 {ONE} --bucket-mb 0.001"),
    ],
    "smallest and deeper": [
        (2, f"{UNTIED} {ADAMW} --tp 2 --hidden 4 --heads 2 {MQA} --ffn 2 --layers 1 {ONE}"),
        (3, f"{TIED} {SGD} --tp 3 {THREE} --heads 6 --kv-heads 6 --ffn 27 --layers 3 {ONE}"),
    ],
}


@pytest.mark.parametrize("world", LAYOUTS)
def test_equals_one_process(world):
    cases = [case for several in HARD.values() for ranks, case in several if ranks == world]
    few = thin({world: pairs_of_flags(world) for world in LAYOUTS})[world]
    cases += [" ".join(filter(None, case.values())) for case in few]
    assert_equal_to_one_process(4, world, cases)


def test_one_process():
    """Without --tp nothing is divided, whatever the other flags say."""
    forms = f"{WHOLE_SEQUENCE} {PLAIN}", CHUNKED
    assert_equal_to_one_process(4, 0, [f"{UNTIED} {ADAMW} {PADDED} {form} {ONE} --zero 1" for form in forms])
