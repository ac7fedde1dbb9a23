"""FP8 in every layout: only operands of products are narrow and all else is float64, so all layouts must agree.

That shows where scales are taken: one that differs in its last digit moves numbers across borders of the format.
"""

import functools
from unittest import mock

import pytest

from step08_5d.narrow_numbers.scaling import BLOCKS
from tests.harness.ranks import run_ranks
from tests.parity.cases import (
    ALL,
    CHUNKED,
    GATHER,
    LATENT,
    LATENT_KEYS,
    OVERLAP,
    PLAIN,
    RING,
    ULYSSES,
    WHOLE,
)
from tests.parity.pairwise import pairwise, thin
from tests.parity.runs import ADAMW, SGD, TIED, UNTIED, Result, assemble, assert_parity, train_cases, training_of

SIZES = {"tile": 8, "mx": 4}  # instead of 128 and 32: several blocks in a small model
SHAPE = "--ffn 64 --seq-len 32"
EXPERTS = f"{SHAPE} --experts 4 --expert-ffn 24 --aux-coef 0.1"
SHARED = f"{EXPERTS} --shared-experts 1"
TOLERANCE = 1e-9
GATHERED = "--zero 3 --fp8-gather"
TILE, MX, ROW, NOW, DELAYED = (f"--fp8 {name}" for name in ("tile", "mx", "row", "tensor", "delayed"))
LAYOUTS = {  # the micro-batch of the one process that has the same tokens in a product: layouts
    2: [(3, "--dp 2 --micro-batch 3"), (3, "--tp 2 --micro-batch 3"), (3, "--cp 2 --micro-batch 3")]
    + [(2, f"--pp 2 --micro-batch 2 --schedule {name}") for name in ("1f1b", "zb-h1", "dualpipe")]
    + [(2, f"--pp 2 --layers 4 --micro-batch 2 --schedule {name}") for name in ("zbv", "interleaved")],
    4: [
        (3, "--dp 2 --tp 2 --micro-batch 3"),
        (3, "--tp 2 --cp 2 --micro-batch 3"),
        (6, "--tp 4 --kv-heads 4 --micro-batch 6"),
    ]
    + [(2, "--pp 2 --cp 2 --micro-batch 2 --schedule zb-h1"), (2, "--pp 2 --tp 2 --micro-batch 2 --schedule dualpipe")],
}
WITH_EXPERTS = {
    2: [(6, "--dp 2 --ep 2 --micro-batch 3"), (3, "--tp 2 --ep 2 --micro-batch 3"), (3, "--dp 2 --micro-batch 3")],
    4: [(6, "--dp 2 --tp 2 --ep 4 --micro-batch 3"), (3, "--cp 2 --tp 2 --ep 4 --micro-batch 3")]
    + [(4, "--pp 2 --dp 2 --ep 2 --micro-batch 2 --schedule zb-h1")]
    + [(4, "--pp 2 --dp 2 --ep 2 --micro-batch 2 --schedule dualpipe")],
}


@functools.cache  # only the worker that trains them needs them
def cases_of() -> dict[int, list[dict]]:
    """Cases by number of ranks, in which any two values of two factors meet; thinned without TEST_ALL."""
    found = {}
    for ranks in (2, 4):
        # On 4 ranks, blocks are cut as on 2, and maxima of rows are compared as those of tensors
        recipes = [TILE, NOW, f"{DELAYED} --fp8-gradients e5m2", *([MX, ROW] if ranks == 2 else [])]
        factors = {"recipe": recipes, "optimizer": [SGD, ADAMW], "embeddings": [TIED, UNTIED]}
        factors |= {"recompute": ["", "--recompute full", "--recompute selective"]}
        # Stages 0 to 2 hold whole weights: products see no difference
        factors |= {"zero": ["--zero 1", "--zero 3", GATHERED]}
        dense = factors | {"layout": LAYOUTS[ranks], "tp": [PLAIN, OVERLAP, CHUNKED, WHOLE]}
        dense |= {"cp": [RING, GATHER, ULYSSES]} if ranks == 4 else {}
        copies = [each for each in (*LAYOUTS[ranks], *WITH_EXPERTS[ranks]) if "dualpipe" in each[1]]
        forbidden = [{"recipe": recipe, "tp": CHUNKED} for recipe in (ROW, NOW)]
        forbidden += [{"layout": each, "zero": zero} for each in copies for zero in ("--zero 3", GATHERED)]
        forbidden += [{"recipe": recipe, "zero": GATHERED} for recipe in (ROW, MX)]  # whose weights have two forms
        found[ranks] = [{"shape": SHAPE} | case for case in pairwise(dense, forbidden)]
        sparse = factors | {"layout": WITH_EXPERTS[ranks], "shape": [EXPERTS, SHARED]}
        sparse |= {"dispatch": ["", "--fp8-dispatch"]}
        known = None, *WITH_EXPERTS[ranks]
        here = [each for each in forbidden if "tp" not in each and each.get("layout") in known]
        # A sequence's layers have its rank's tokens, its experts those of several: no single process has both
        several = [each for each in WITH_EXPERTS[ranks] if f"--micro-batch {each[0]}" not in each[1]]
        here += [{"recipe": recipe, "layout": each} for recipe in (ROW, NOW) for each in several]
        found[ranks] += pairwise(sparse, here)
    found = thin(found)
    hard = {"shape": SHARED, "recipe": ROW, "layout": WITH_EXPERTS[2][1], "optimizer": SGD}
    found[2].append(hard)  # each tensor rank has a part of the tokens of a shared expert, which share scales
    return found


PARTS = 4 if ALL else 1  # starts of 2 ranks, and of 4: each has a time limit


def train_with_small_blocks(cases: list[str], mutants: list[str | None] | None = None) -> list[dict]:
    """On a rank, or alone."""
    with mock.patch.dict(BLOCKS, SIZES):
        return train_cases(8, cases, mutants)


def run_narrow(ranks: int, cases: list[str], mutants: list[str | None] | None = None) -> list[Result]:
    parts = run_ranks(ranks, train_with_small_blocks, cases, mutants, timeout=600)
    return [assemble(list(each)) for each in zip(*parts, strict=True)]


def one_process(case: str, micro_batch: int) -> Result:
    return alone(training_of(case, micro_batch))


@functools.cache  # most cases differ in their layout alone
def alone(flags: str) -> Result:
    return assemble(train_with_small_blocks([flags]))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_trains_as_one_process(ranks, part):
    chosen = cases_of()[ranks][part::PARTS]
    batches = [case["layout"][0] for case in chosen]
    cases = [" ".join([case["layout"][1], *(v for k, v in case.items() if k != "layout")]) for case in chosen]
    for case, batch, result in zip(cases, batches, run_narrow(ranks, cases), strict=True):
        assert_parity(result, one_process(case, batch), f"{ranks} ranks, {case}", TOLERANCE)


# Latent attention: a gathered latent is multiplied on every tensor rank; Ulysses divides what it is expanded to
LATENTS = {  # by ranks, the micro-batch of the one process that has the same tokens in a product, and flags
    2: [
        (3, f"{UNTIED} {SGD} {MX} {LATENT} --cp 2 {ULYSSES} --micro-batch 3 --recompute selective"),
        (3, f"{UNTIED} {ADAMW} {TILE} {LATENT} --tp 2 --micro-batch 3 {OVERLAP}"),
        (3, f"{TIED} {SGD} {DELAYED} {LATENT_KEYS} --tp 2 --micro-batch 3 {WHOLE}"),
        (3, f"{UNTIED} {ADAMW} {NOW} {LATENT} --tp 2 --micro-batch 3 {PLAIN} --zero 3 --recompute full"),
        (3, f"{UNTIED} {SGD} {ROW} {LATENT_KEYS} --tp 2 --micro-batch 3 {OVERLAP}"),
        (2, f"{UNTIED} {ADAMW} {TILE} {LATENT} --pp 2 --micro-batch 2 --schedule zb-h1"),
        (2, f"{TIED} {SGD} {DELAYED} {LATENT_KEYS} --pp 2 --micro-batch 2 --schedule dualpipe --recompute full"),
        (3, f"{UNTIED} {ADAMW} {TILE} {LATENT} {GATHERED} --dp 2 --micro-batch 3"),
    ],
    4: [
        (3, f"{UNTIED} {ADAMW} {TILE} {LATENT} --cp 2 {ULYSSES} --tp 2 --micro-batch 3 {CHUNKED} --zero 1"),
        (3, f"{TIED} {SGD} {NOW} {LATENT_KEYS} --cp 2 {ULYSSES} --tp 2 --micro-batch 3 {WHOLE}"),
        (2, f"{UNTIED} {ADAMW} {TILE} {LATENT} --pp 2 --cp 2 {ULYSSES} --micro-batch 2 --schedule zb-h1"),
        (2, f"{UNTIED} {SGD} {DELAYED} {LATENT_KEYS} --pp 2 --tp 2 --micro-batch 2 --schedule dualpipe"),
    ],
}


@pytest.mark.parametrize("ranks", LATENTS if ALL else [4])
def test_latent_attention_trains_as_one_process(ranks):
    chosen = LATENTS[ranks] if ALL else LATENTS[ranks][:1]
    cases = [f"{SHAPE} {flags}" for _, flags in chosen]
    for (batch, _), case, result in zip(chosen, cases, run_narrow(ranks, cases), strict=True):
        assert_parity(result, one_process(case, batch), f"{ranks} ranks, {case}", TOLERANCE)
