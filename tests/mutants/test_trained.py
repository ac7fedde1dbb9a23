"""The suite rejects every known-wrong variant that trains something else, by the figure that is there for it."""

import tempfile
from functools import cache

import pytest

from common.start import environment
from tests.mechanisms.step08.kernels.compare import needs_triton
from tests.mechanisms.step08.test_fused import TINY, train_with_kernels
from tests.mutants.patches import STEPS, assert_applies, patched
from tests.mutants.test_observed import NOTICED, NOTICED_ALONE
from tests.parity import runs
from tests.parity.cases import (
    BIAS,
    CAPACITY,
    CHUNKED,
    CONTIGUOUS,
    DOCUMENTS,
    FOUR,
    GATHER,
    LATENT,
    ODD,
    ONE,
    SHARED,
    TWO,
)
from tests.parity.runs import ADAMW, TIED, UNTIED, Result, assert_parity, reference, training_of

ZERO = f"{UNTIED} {ADAMW} --steps 2 --bucket-mb 0.02 --zero"  # several micro-batches on each rank
TP = f"{UNTIED} {ADAMW} {ONE} --steps 2 --tp 2"
PP = f"{UNTIED} {ADAMW} --steps 2 --micro-batch 3 --layers 4 --pp 2 --schedule"  # 4 micro-batches on 2 ranks
DP = f"{UNTIED} {ADAMW} --steps 2 --micro-batch 2 --layers 4 --pp 2 --dp 2 --schedule 1f1b"  # 3 on each of 4
CP = f"{UNTIED} {ADAMW} {ONE} --steps 2 --cp 2"
MOE = f"{ADAMW} --steps 2 --experts 8 {SHARED}"
ALL = f"{ADAMW} --steps 1 --micro-batch 3 --experts 8 --expert-ffn 20 --cp 2 --tp 2 --ep 4"
LONGER = f"{MOE} --dp 2 --ep 2 {FOUR} --steps 4"
STAGES = f"{PP} 1f1b --steps 4"
SAVED_WRONG = {"one rank's experts saved": (7, LONGER), "layers counted from zero in a checkpoint": (5, STAGES)}
TRAINED = {  # (step, ranks, flags): the mutants that are trained under them; None: all others of the step
    (2, 2, f"{UNTIED} {ADAMW} --dp-mode bucket --bucket-mb 0.02"): None,
    (3, 2, f"{ZERO} 1"): "weights of the step before, no decay of flat shards, norm of the local shard, "
    "unsharded optimizer",
    (3, 2, f"{ZERO} 2"): "decay on norms, only the last micro-batch in the shard, all-reduce poses as reduce-scatter",
    (3, 2, f"{ZERO} 3"): "last unit of the step before, parameters never freed, no prefetch, "
    "no prefetch in the backward",
    (3, 3, f"{ZERO} 1 {ODD}"): "norm counts padding",
    (3, 4, f"{ZERO} 1 --zero-replicas 2"): "no sum over replicas",
    (3, 4, f"{ZERO} 2 --zero-replicas 2"): "summed over replicas each micro-batch",
    (3, 4, f"{ZERO} 3 --zero-replicas 2"): "norm counts replicas, divided by shards and not by replicas",
    (4, 2, TP): None,
    (4, 2, f"{TP} --kv-heads 1 --no-sequence-parallel"): "K/V replicas drift",
    (4, 2, f"{TP} --no-sequence-parallel --tp-mode plain"): "f and f* swapped, no f before the head",
    (4, 2, f"{TP} --tp-mode plain"): "g takes its slice in the backward",
    (4, 2, f"{TP} --vocab 257"): "padding not masked",
    (4, 2, f"{TP} {CHUNKED}"): "rings wait before they multiply",
    (4, 2, f"{TP} {LATENT}"): "down-projections' gradients not summed, neighbors taken for halves",
    (4, 2, f"{TP} {LATENT} --no-sequence-parallel"): "rotated key's gradient of a rank's heads",
    (5, 2, f"{PP} 1f1b"): "missing share of micro-batches, loss of one rank, targets of another micro-batch, "
    "layers counted from zero on every stage, sent outputs kept, received when needed, sends waited for, "
    "one communicator for both directions",
    (5, 2, f"{PP} zb-h1"): "W before its I, W with the input of another micro-batch, "
    "norms forgotten by split backwards, graph kept until W",
    (5, 2, f"{PP} afab"): "gradients of another micro-batch, one receive buffer",
    (5, 2, f"{PP} dualpipe"): "two copies counted twice",
    (5, 2, f"{PP} 1f1b {TIED}"): "stale tied gradient, tied matrix counted twice",
    (5, 2, f"{PP} dualpipe {TIED}"): "two copies drift apart",
    (5, 4, f"{PP} 1f1b --tp 2"): "positions of the slice",
    (5, 4, DP): "reduced before the last micro-batch",
    (5, 4, f"{DP} --zero 3"): "weights of the first step",
    (6, 2, CP): None,
    (6, 2, f"{CP} {GATHER}"): "dK/dV of the own queries only",
    (6, 2, f"{CP} --cp-mode ulysses"): "Ulysses in rank order",
    (6, 2, f"{CP} {LATENT}"): "kv_b_proj's gradient of one hop, rotated key's gradient of one head, "
    "latent's gradient not sent home",
    (6, 2, f"{CP} {DOCUMENTS}"): "documents of one rank",
    (6, 2, f"{CP} {CONTIGUOUS}"): "keys travel all the way",
    (7, 2, f"{MOE} --dp 2 --ep 2 {FOUR}"): None,
    (7, 2, f"{MOE} --dp 2 {FOUR}"): "experts' gradients averaged",
    (7, 2, f"{MOE} --tp 2 --ep 2 {TWO}"): "router's gradient not summed over tp",
    (7, 2, f"{MOE} --aux-coef 0.1 --cp 2 --ep 2 {ONE}"): "statistics of a rank",
    (7, 2, f"{MOE} {CAPACITY} --cp 2 --ep 2 {ONE}"): "places of a rank",
    (7, 2, f"{MOE} {BIAS} --pp 2 --schedule dualpipe {TWO}"): "loads of one copy",
    (5, 2, STAGES): "layers counted from zero in a checkpoint",
    (7, 2, LONGER): "one rank's experts saved",
    (8, 4, f"{ADAMW} --steps 1 --micro-batch 3 --cp 2 --tp 2 --no-sequence-parallel"): "head's split lost",
    (8, 4, f"{ADAMW} --steps 1 --micro-batch 3 --pp 2 --tp 2 --schedule zb-h1"): "head's gradient twice",
    (8, 4, f"{ALL} --steps 2 --balance bias --bias-rate 0.01"): "loads of a part of the sequence",
    (8, 4, ALL): "head takes its slice in the backward, softmax over a rank's columns, experts summed like the rest, "
    "copies of tp counted twice, loss of a part of the sequence",
}
CASES = {name: key for key, names in TRAINED.items() for name in (names or "").split(", ") if name}
for (step, ranks, flags), names in TRAINED.items():
    if names is None:
        CASES |= {name: (step, ranks, flags) for name in STEPS[step] if name not in CASES}


@cache
def trained(step: int, ranks: int) -> dict[tuple[str, str | None], Result]:
    """By (flags, mutant): all mutants of a step that so many ranks show, and what is right under their flags (None)."""
    keys = {flags: (flags, None) for (number, world, flags) in CASES.values() if (number, world) == (step, ranks)}
    keys = [*keys.values(), *((case[2], name) for name, case in CASES.items() if case[:2] == (step, ranks))]
    return dict(zip(keys, runs.run_cases(ranks, step, *zip(*keys, strict=True)), strict=True))


def assert_rejected(sound: Result, wrong: Result, expected: Result, name: str, tolerance=runs.TOLERANCE) -> None:
    assert_parity(sound, expected, "the unmutated code", tolerance)
    with pytest.raises(AssertionError, match="relative differences above"):
        assert_parity(wrong, expected, name, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_parity_shows_wrong_numbers_only(name):
    """Those at a higher price, or whose checkpoints are wrong, train right: why parity is not enough."""
    assert_applies(name)
    step, ranks, flags = CASES[name]
    sound, wrong = (trained(step, ranks)[flags, mutant] for mutant in (None, name))
    if name in (*NOTICED, *NOTICED_ALONE, *SAVED_WRONG):
        assert_parity(wrong, reference(training_of(flags)), name)
    else:
        assert_rejected(sound, wrong, reference(training_of(flags)), name)


# ---- with kernels, and after a resume --------------------------------------------------------------------------------

TINIER = f"{TINY} {ADAMW} --layers 1"  # for the interpreter
WITH_KERNELS = {  # mutant: ranks and flags
    "norm past the residual": (2, f"{TINIER} --steps 1 --cp 2"),
    "blocks of equal weight": (2, f"{TINIER} --steps 1 --cp 2"),
    "clip factor lost": (1, f"{TINIER} --attention naive"),
    "everything decays": (1, f"{TINIER} --attention naive"),
    "copy lost": (1, f"{TINIER} --attention naive --dtype bfloat16 --lr 0.02"),
}


@cache
def trained_with_kernels(ranks: int, flags: str) -> dict[str | None, Result]:
    """By mutant: all that these flags show, and what is right under them (None)."""
    names = [None, *(name for name, case in WITH_KERNELS.items() if case == (ranks, flags))]
    results = runs.results_of(ranks, train_with_kernels, [flags] * len(names), names)
    return dict(zip(names, results, strict=True))


@needs_triton
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_wrong_numbers_of_kernels(name):
    assert_applies(name)
    ranks, flags = WITH_KERNELS[name]
    results = trained_with_kernels(ranks, flags)
    tolerance = 2e-2 if "bfloat16" in flags else runs.TOLERANCE
    assert_rejected(results[None], results[name], reference(training_of(flags, 4)), name, tolerance)


def ranks_save_and_resume(folder: str, cases: list[tuple[int, str, str | None]]) -> list[dict]:
    """Of each case, a step, flags and a mutant: two steps, a checkpoint, and from there two more on as many ranks."""
    found = []
    for index, (step, case, mutant) in enumerate(cases):
        flags = f"{runs.SMALL} {case} --run-dir {folder}/{index} --save-every 2"
        with patched(mutant):
            runs.train_here(step, f"{flags} --steps 2")
            boxes = runs.train_here(step, f"{flags} --resume auto")
        curve = runs.curve_of(f"{folder}/{index}") if environment().rank == 0 else []
        found.append({"curve": curve, "boxes": boxes})
    return found


@cache
def resumed() -> dict[tuple[str, str | None], Result]:
    """By (flags, mutant): what goes on from a checkpoint that the mutant has saved, or the code as it is (None)."""
    cases = [(*case, mutant) for name, case in SAVED_WRONG.items() for mutant in (None, name)]
    with tempfile.TemporaryDirectory() as folder:
        results = runs.results_of(2, ranks_save_and_resume, folder, cases)
    return {case[1:]: result for case, result in zip(cases, results, strict=True)}


@pytest.mark.parametrize("name", SAVED_WRONG)
def test_a_wrong_checkpoint_is_noticed(name):
    """Nothing complains when it is loaded, and the run that saved it goes on well."""
    assert_applies(name)
    _, flags = SAVED_WRONG[name]
    assert_rejected(resumed()[flags, None], resumed()[flags, name], reference(training_of(flags)), name)


def test_every_mutant_is_tried():
    others = "sums in bfloat16", "updates in bfloat16"  # by parity/test_narrow.py
    tried = {*CASES, *NOTICED, *NOTICED_ALONE, *WITH_KERNELS, *others}
    assert tried == {name for mutants in STEPS.values() for name in mutants}
