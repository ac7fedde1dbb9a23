"""Step 6 trains exactly what step 1 trains, however sequences are divided and whatever that is combined with."""

import itertools
import os
from unittest import mock

import pytest
import torch

from common.model import naive_attention
from step06_context_parallel import context_parallel
from tests.parity.pairwise import pairwise, thin
from tests.parity.runs import (
    ADAMW,
    SGD,
    TIED,
    UNTIED,
    assemble,
    assert_equal_to_one_process,
    assert_parity,
    differences,
    reference,
    run_cases,
    train_case,
    training_of,
)

MHA, GQA, MQA = (f"--kv-heads {heads}" for heads in (4, 2, 1))  # of 4 heads
RING, GATHER, ULYSSES = (f"--cp-mode {mode}" for mode in ("ring", "allgather", "ulysses"))
ZIGZAG, CONTIGUOUS, STRIPED = (f"--cp-split {split}" for split in ("zigzag", "contiguous", "striped"))
WHOLE_SEQUENCE, NAIVE = "--no-sequence-parallel", "--attention naive"
ONE, TWO = "--micro-batch 12", "--micro-batch 6"  # all samples in one micro-batch, or in two
THREE = "--hidden 24 --layers 1 --heads 6"  # 3 ranks of Ulysses divide it
ALL = bool(os.environ.get("TEST_ALL"))

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
        (4, f"{TIED} {ADAMW} --cp 4 --seq-len 4 --global-batch 1 --micro-batch 1 {STRIPED} {GATHER}"),
    ],
    "tensor and sequence parallelism: positions of a part of a part, K/V heads on several ranks": [
        (4, f"{UNTIED} {ADAMW} --cp 2 --tp 2 {TWO} {MQA} {STRIPED} --tp-mode chunked --vocab 257"),
        (4, f"{TIED} {SGD} --cp 2 --tp 2 {ONE} {MQA} {ULYSSES} --tp-mode plain --recompute full"),
    ],
    "all at once": [
        (8, f"{TIED} {ADAMW} --cp 2 --tp 2 --pp 2 {TWO} --zero 1"),
        (8, f"{UNTIED} {SGD} --cp 2 --dp 2 --pp 2 --micro-batch 3 --layers 4 --schedule zbv --zero 3 {GATHER}"),
    ],
}
MORE = [  # with TEST_ALL=1
    (4, f"{UNTIED} {SGD} --cp 4 --seq-len 4 {ONE} {CONTIGUOUS}"),
    (4, f"{UNTIED} {SGD} --cp 2 --pp 2 {TWO} --schedule dualpipe --zero 1 {CONTIGUOUS}"),
    (8, f"{UNTIED} {ADAMW} --cp 4 --tp 2 {ONE} {ULYSSES} --heads 8 --kv-heads 4 --recompute full"),
    (8, f"{TIED} {SGD} --cp 2 --dp 2 --tp 2 {TWO} --zero 3 {STRIPED} {WHOLE_SEQUENCE}"),
    (8, f"{TIED} {ADAMW} --cp 4 --pp 2 {TWO} --layers 4 --schedule dualpipev {ULYSSES} {MHA}"),
    (16, f"{UNTIED} {ADAMW} --cp 2 --dp 2 --tp 2 --pp 2 --micro-batch 3 --zero 2"),
    (16, f"{TIED} {SGD} --cp 4 --dp 2 --tp 2 {TWO} --zero 3 {GATHER}"),
]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16] if ALL else [2, 3, 4, 8])
def test_equals_one_process(world):
    every = [*itertools.chain(*HARD.values()), *(MORE if ALL else [])]
    cases = [case for ranks, case in every if ranks == world]
    few = thin({ranks: pairs_of_flags(ranks) for ranks in LAYOUTS}).get(world, [])
    cases += [" ".join(filter(None, case.values())) for case in few]
    assert_equal_to_one_process(6, world, cases)


def test_one_process():
    """Without --cp nothing is divided, whatever the other flags say."""
    assert_equal_to_one_process(6, 0, [f"{UNTIED} {ADAMW} {ULYSSES} {STRIPED} {ONE}"])


# ---- masked documents ------------------------------------------------------------------------------------------------

# A document of the synthetic corpus has 96 tokens: three samples of four have the end of one, each at another place
DOCUMENTS = "--mask-documents --seq-len 72"
DIVIDED = [  # ranks, flags
    (2, f"{UNTIED} {ADAMW} --cp 2 {TWO}"),
    (2, f"{UNTIED} {ADAMW} --cp 2 {TWO} {ULYSSES} {STRIPED}"),
    (4, f"{TIED} {SGD} --cp 4 {ONE} {CONTIGUOUS} --recompute full"),
    (4, f"{UNTIED} {ADAMW} --cp 2 --pp 2 {TWO} --layers 4 --schedule zbv {STRIPED} {NAIVE}"),
    (4, f"{UNTIED} {ADAMW} --cp 2 --dp 2 --micro-batch 3 {GATHER} --zero 3"),
] + ALL * [
    (2, f"{UNTIED} {ADAMW} --cp 2 {TWO} {GATHER} {CONTIGUOUS}"),
    (4, f"{UNTIED} {SGD} --cp 2 --tp 2 {ONE} --zero 1"),
    (4, f"{UNTIED} {ADAMW} --tp 2 --pp 2 {TWO} --recompute full"),
]


@pytest.mark.parametrize("world", [2, 4])
def test_masked_documents(world):
    assert_equal_to_one_process(6, world, [f"{DOCUMENTS} {case}" for ranks, case in DIVIDED if ranks == world], 6)


def naive_within_documents(q, k, v, documents):
    """Attention to one document after the other, each on its own."""
    outs = []
    for sample, starts in enumerate(documents):
        borders = [*zip(starts, (*starts[1:], q.shape[2]))]
        parts = [[each[sample : sample + 1, :, start:stop] for each in (q, k, v)] for start, stop in borders]
        outs.append(torch.cat([naive_attention(*part) for part in parts], dim=2))
    return torch.cat(outs)


def test_a_mask_is_attention_within_each_document():
    case = training_of(f"{UNTIED} {ADAMW} {DOCUMENTS}")
    with mock.patch.object(context_parallel, "attention", lambda *args, config, cp: naive_within_documents(*args)):
        expected = assemble([train_case(6, case)])
    masked = reference(case, 6)
    assert_parity(masked, expected, case)
    assert differences(masked, reference(case.replace("--mask-documents", "")))["loss"] > 1e-6  # it matters


# ---- narrow types ----------------------------------------------------------------------------------------------------


# Attention in blocks rounds differently from one kernel over the whole sequence, and the parts of a weight's gradient
# are rounded before they are added up. The bounds are three to ten times what the three modes show.
BOUNDS = {
    "bfloat16": {"loss": 1e-5, "grad_norm": 5e-4, "parameters": 3e-3},
    "float16": {"loss": 1e-6, "grad_norm": 2e-4, "parameters": 5e-4},
}


def test_narrow_types():
    cases = []
    for dtype, ways in ("bfloat16", (RING, GATHER, ULYSSES)), ("float16", (RING,)):
        cases += [(dtype, f"{UNTIED} {ADAMW} --dtype {dtype} --micro-batch 4 --steps 4 --cp 2 {way}") for way in ways]
    for (dtype, case), result in zip(cases, run_cases(2, 6, [case for _, case in cases]), strict=True):
        found, bounds = differences(result, reference(training_of(case, 4))), BOUNDS[dtype]
        wrong = {name: value for name, value in found.items() if not value < bounds.get(name, bounds["parameters"])}
        assert not wrong, f"{case}: {wrong}"
