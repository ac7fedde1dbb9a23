"""The suite rejects every known-wrong variant of what step 8 puts together."""

import pytest

from tests.harness.ranks import run_ranks
from tests.mechanisms.step08.kernels.compare import needs_triton
from tests.mechanisms.step08.test_fused import TINY, assert_recomputes, train_in_pieces, train_with_kernels
from tests.mutants.patches_step08 import MUTANTS
from tests.mutants.rejection import assert_rejected, train_mutants, with_and_without
from tests.parity.runs import ADAMW, assemble, assert_parity, reference, training_of

MODEL = f"--steps 1 {ADAMW} --micro-batch 3"
EXPERTS = "--experts 8 --expert-ffn 20 --cp 2 --tp 2 --ep 4"
FLAGS = {
    "head's split lost": f"{MODEL} --cp 2 --tp 2 --no-sequence-parallel",
    "head takes its slice in the backward": f"{MODEL} {EXPERTS}",
    "softmax over a rank's columns": f"{MODEL} {EXPERTS}",
    "head's gradient twice": f"{MODEL} --pp 2 --tp 2 --schedule zb-h1",
    "experts summed like the rest": f"{MODEL} {EXPERTS}",
    "loads of a part of the sequence": f"{MODEL} --steps 2 {EXPERTS} --balance bias --bias-rate 0.01",
    "copies of tp counted twice": f"{MODEL} {EXPERTS}",
    "loss of a part of the sequence": f"{MODEL} {EXPERTS}",
}
TINIER = f"{TINY} {ADAMW} --layers 1"  # for the interpreter
FLAGS_OF_KERNELS = {  # two ranks
    "norm past the residual": f"{TINIER} --steps 1 --cp 2",
    "blocks of equal weight": f"{TINIER} --steps 1 --cp 2",
}
FLAGS_OF_UPDATE = {  # one process
    "clip factor lost": f"{TINIER} --attention naive",
    "everything decays": f"{TINIER} --attention naive",
    "copy lost": f"{TINIER} --attention naive --dtype bfloat16 --lr 0.02",
}
WITH_KERNELS = FLAGS_OF_KERNELS | FLAGS_OF_UPDATE
HIGHER_PRICE = "recompute before the kernels"


@pytest.fixture(scope="module")
def results():
    return train_mutants(8, {name: (4, flags) for name, flags in FLAGS.items()})


@pytest.fixture(scope="module")
def results_of_kernels():
    cases, alone = with_and_without(FLAGS_OF_KERNELS), with_and_without(FLAGS_OF_UPDATE)
    ranks = run_ranks(2, train_with_kernels, *zip(*cases, strict=True), timeout=600)
    parts = [*zip(*ranks, strict=True), *([part] for part in train_with_kernels(*zip(*alone, strict=True)))]
    return {case: assemble(list(each)) for case, each in zip(cases + alone, parts, strict=True)}


def test_all_are_here():
    assert {*FLAGS, *WITH_KERNELS, HIGHER_PRICE} == MUTANTS.keys()


@pytest.mark.parametrize("name", FLAGS)
def test_mutant_is_rejected(results, name):
    assert_rejected(results, FLAGS[name], name, reference(training_of(FLAGS[name]), 7))


@needs_triton
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_mutant_is_rejected_with_kernels(results_of_kernels, name):
    flags = WITH_KERNELS[name]
    tolerance = 2e-2 if "bfloat16" in flags else 1e-10
    assert_rejected(results_of_kernels, flags, name, reference(training_of(flags, 4), 7), tolerance)


def test_a_lost_recompute_is_noticed():
    """No curve shows it: it trains the same."""
    flags = f"{TINY} {ADAMW} --layers 2 --recompute full"
    result, calls = train_in_pieces(flags, HIGHER_PRICE)
    assert_parity(result, reference(flags, 7), HIGHER_PRICE)
    with pytest.raises(AssertionError, match="computed twice"):
        assert_recomputes(calls)
