"""Step 7 trains the same on all ranks as in one process, and without experts what step 1 trains."""

import itertools
import os
from unittest import mock

import numpy as np
import pytest
import torch

from step07_expert_parallel.router import Router
from tests.harness.ranks import run_ranks, steps_of
from tests.parity.pairwise import pairwise, thin
from tests.parity.runs import (
    ADAMW,
    SGD,
    SMALL,
    assemble,
    assert_equal_to_one_process,
    assert_parity,
    curve_of,
    run_cases,
    train_case,
    train_here,
    training_of,
)

AUX, BIAS = "--aux-coef 0.1 --z-coef 0.01", "--balance bias --bias-rate 0.003"
LIMIT, CAPACITY, SHARED = "--expert-groups 4 --node-limit 2", "--capacity-factor 0.9", "--shared-experts 1"
ONE, TWO, FOUR = "--micro-batch 12", "--micro-batch 6", "--micro-batch 3"  # that many micro-batches, with --dp 1
ALL = bool(os.environ.get("TEST_ALL"))
EXPERTS = "--expert-ffn 20 --experts"


# ---- every pair of flags ---------------------------------------------------------------------------------------------

LAYOUTS = {
    2: [f"--ep 2 --dp 2 {FOUR}", f"--ep 2 --cp 2 {ONE}", f"--ep 2 --tp 2 {TWO}", f"--pp 2 {TWO} --schedule 1f1b"],
    4: [
        f"--ep 4 --dp 4 {FOUR}",
        f"--ep 2 --dp 2 --cp 2 {TWO}",
        f"--ep 4 --dp 2 --tp 2 {FOUR}",
        f"--ep 2 --cp 2 --tp 2 {ONE}",
        f"--ep 2 --cp 2 --pp 2 {TWO} --schedule zb-h1",
        f"--ep 2 --tp 2 --pp 2 {TWO} --schedule zbv --layers 4",
        f"--ep 2 --dp 2 --pp 2 {FOUR} --schedule interleaved --layers 4",
        f"--ep 2 --dp 2 --pp 2 {FOUR} --schedule dualpipe",
    ],
    8: [
        f"--ep 8 --dp 2 --cp 2 --tp 2 {TWO}",
        f"--ep 4 --dp 2 --tp 2 --pp 2 {FOUR} --schedule 1f1b",
        f"--ep 4 --cp 2 --tp 2 --pp 2 {TWO} --schedule dualpipev --layers 4",
    ],
}
REPLICAS = "--zero 3 --zero-replicas 2"


def pairs_of_flags(world: int) -> list[dict]:
    factors = {
        "layout": LAYOUTS[world],
        "stage": ["--zero 0", "--zero 1", "--zero 2", "--zero 3", REPLICAS],
        "recompute": ["", "--recompute selective", "--recompute full"],
        "balance": ["--balance none", AUX, BIAS],
        "gate": ["--gate softmax", "--gate sigmoid"],
        "chosen": ["--top-k 1", f"--top-k 3 {LIMIT}"],
        "capacity": ["", CAPACITY],
        "others": ["", f"{SHARED} --dense-layers 1"],
        "optimizer": [SGD, ADAMW],
    }
    copies = [layout for layout in LAYOUTS[world] if "dualpipe" in layout]
    forbidden = [{"layout": each, "stage": stage} for each in copies for stage in ("--zero 2", "--zero 3", REPLICAS)]
    alone = [layout for layout in LAYOUTS[world] if "--dp" not in layout and "--cp" not in layout]
    return pairwise(factors, forbidden + [{"layout": layout, "stage": REPLICAS} for layout in alone])


# ---- hard cases, by name ---------------------------------------------------------------------------------------------

FEW_TOKENS = "--experts 64 --seq-len 4 --global-batch 2 --micro-batch 1"
HARD = {
    "most experts get no token, and some ranks none at all": [
        (2, f"{ADAMW} {FEW_TOKENS} --top-k 1 --dp 2 --ep 2 --zero 3"),
        (4, f"{SGD} {FEW_TOKENS} --top-k 2 --tp 2 --cp 2 --ep 4 --recompute full {CAPACITY}"),
    ],
    "both ends of a pipeline hold the embedding": [
        (4, f"{ADAMW} --experts 8 --tie-embeddings --dp 2 --pp 2 {FOUR} --ep 2 --schedule zb-h1 --zero 1 {BIAS}"),
    ],
    "an expert on several ranks, of which not all share their copies": [
        (4, f"{ADAMW} --experts 4 --dp 2 --cp 2 {TWO} --ep 2 --zero 2 --zero-replicas 2 --bucket-mb 0.01 {AUX}"),
    ],
    "all at once": [
        (
            *(8, f"{ADAMW} --experts 8 --top-k 3 --gate sigmoid {LIMIT} {SHARED} --dense-layers 1 {BIAS} {CAPACITY}"),
            f"--tp 2 --cp 2 --pp 2 --ep 4 {TWO} --schedule dualpipe --layers 4 --zero 1 --recompute selective",
        ),
    ],
}
MORE = [  # with TEST_ALL=1
    (4, f"{SGD} --experts 8 {SHARED} --tp 4 --kv-heads 1 --ep 4 {TWO} --tp-mode chunked --zero 1 {AUX} {CAPACITY}"),
    (4, f"{ADAMW} --experts 8 --cp 4 --ep 4 {ONE} --cp-split striped {CAPACITY} {AUX} --seq-len 16"),
    (4, f"{ADAMW} --experts 8 --cp 4 --ep 4 {ONE} --cp-mode ulysses --cp-split contiguous --kv-heads 4 {CAPACITY}"),
    (4, f"{ADAMW} --experts 8 --dp 4 --ep 2 {FOUR} --dp-mode overlap --mask-documents {BIAS}"),
    (8, f"{ADAMW} {FEW_TOKENS} --top-k 2 --dp 2 --tp 2 --cp 2 --ep 8 --zero 3 {CAPACITY} {SHARED}"),
    (8, f"{SGD} --experts 8 --dp 2 --tp 2 --pp 2 --ep 2 {FOUR} --schedule zbv --layers 4 --zero 3 --recompute full"),
    (16, f"{ADAMW} --experts 8 {SHARED} --dp 2 --cp 2 --tp 2 --pp 2 --ep 8 {FOUR} --zero 2 {BIAS} {CAPACITY}"),
    (16, f"{SGD} --experts 8 {AUX} --dp 2 --cp 2 --tp 2 --pp 2 --ep 4 {FOUR} --schedule zb-h1 --zero 1"),
]


@pytest.mark.parametrize("world", [2, 4, 8, 16] if ALL else [2, 4, 8])
def test_equals_one_process(world):
    every = [*itertools.chain(*HARD.values()), *(MORE if ALL else [])]
    cases = [" ".join(flags) for ranks, *flags in every if ranks == world]
    few = thin({ranks: pairs_of_flags(ranks) for ranks in LAYOUTS}).get(world, [])
    cases += [" ".join((EXPERTS, "8", *filter(None, case.values()))) for case in few]
    assert_equal_to_one_process(7, world, cases, 7)


def test_micro_batches_and_recomputation_on_one_process():
    flags = "--recompute full --micro-batch 3", "--recompute selective --micro-batch 2 --zero 1"
    assert_equal_to_one_process(7, 0, [f"{ADAMW} {EXPERTS} 6 {AUX} {CAPACITY} {each}" for each in flags], 7)


def test_without_experts():
    cases = ["--dp 2 --zero 3", "--pp 2 --schedule zb-h1 --micro-batch 3", "--cp 2"]
    assert_equal_to_one_process(7, 2, [f"{ADAMW} {case}" for case in cases])


# ---- a router that has collapsed -------------------------------------------------------------------------------------


def choose_the_last(self, scores: torch.Tensor) -> torch.Tensor:
    """In place of `Router.choose`: the last expert is the best one for every token, then that before it, and so on."""
    return (self.shape.experts - 1 - torch.arange(self.shape.top_k)).expand(*scores.shape[:-1], -1)


def train_collapsed(cases: list[str]) -> list[dict]:
    with mock.patch.object(Router, "choose", choose_the_last):
        return [train_case(7, flags) for flags in cases]


COLLAPSED = [
    f"{ADAMW} {EXPERTS} 8 --top-k 1 {AUX} --dp 4 --ep 4 {FOUR} --zero 2",
    f"{SGD} {EXPERTS} 8 --top-k 1 {SHARED} --dp 2 --pp 2 --ep 2 --schedule zb-h1 {FOUR} {BIAS}",
    f"{ADAMW} {EXPERTS} 8 --top-k 2 --tp 2 --cp 2 --ep 4 {ONE} {CAPACITY} --recompute full",
]


def test_all_tokens_go_to_one_expert():
    ranks = run_ranks(4, train_collapsed, COLLAPSED)
    for case, parts in zip(COLLAPSED, zip(*ranks, strict=True), strict=True):
        [expected] = train_collapsed([training_of(case)])
        assert_parity(assemble(list(parts)), assemble([expected]), case)


# ---- narrow types ----------------------------------------------------------------------------------------------------


# Samples are rounded alike wherever their experts are, but not sums over the tokens of several ranks. The bounds are
# about four times what is seen.
BOUNDS = {"bfloat16": 1e-3, "float16": 1e-4}


def test_narrow_types():
    cases = [f"{ADAMW} --experts 8 {SHARED} {BIAS} {FOUR} --steps 3 --dtype {dtype}" for dtype in BOUNDS]
    results = run_cases(2, 7, [f"{case} --dp 2 --ep 2" for case in cases])
    for case, result, bound in zip(cases, results, BOUNDS.values(), strict=True):
        assert_parity(result, assemble([train_case(7, case)]), case, bound)


# ---- the record, and resuming ----------------------------------------------------------------------------------------


def test_the_record_and_a_resumed_run(tmp_path):
    """What routers count is that of all ranks; the biases are saved, and go on in another layout."""
    training = f"{SMALL} {ADAMW} --experts 8 --top-k 3 --gate sigmoid {SHARED} --dense-layers 1 --expert-ffn 20 {LIMIT}"
    training += f" {BIAS} --z-coef 0.01 --capacity-factor 1 --steps 6"
    two, one, resumed = (f"{training} --run-dir {tmp_path}/{name}" for name in ("two", "one", "resumed"))
    run_ranks(2, train_here, 7, f"{two} --save-every 3 --zero 1 --micro-batch 2 --ep 2")
    whole = assemble([{"curve": curve_of(tmp_path / "two"), "boxes": train_here(7, f"{one} --micro-batch 12")}])
    for ours, theirs in zip(steps_of(tmp_path / "two"), steps_of(tmp_path / "one"), strict=True):
        assert ours["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-10) and ours["aux_loss"] > 0
        assert (ours["imbalance"], ours["dropped"]) == (theirs["imbalance"], theirs["dropped"])
        assert ours["imbalance"] > 1 and ours["dropped"] > 0
    boxes = train_here(7, f"{resumed} --resume {tmp_path}/two/checkpoints/step-00000003 --micro-batch 4")
    end = assemble([{"curve": [(0, 0)], "boxes": boxes}]).parameters
    assert any(name.endswith("bias") for name in end)
    for name, value in whole.parameters.items():
        assert np.linalg.norm(end[name] - value) <= 1e-10 * np.linalg.norm(value), name
