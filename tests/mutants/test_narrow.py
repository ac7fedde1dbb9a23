"""What a run in bfloat16 computes in 16 bits, and that nothing else does: sums, statistics and updates need 32."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.harness.narrow_operations import NarrowOperations
from tests.harness.ranks import run_ranks
from tests.mutants.patches_narrow import MUTANTS
from tests.parity.runs import train_case

BASE = "--dtype bfloat16 --steps 1 --layers 1 --global-batch 2 --seq-len 8 --peak-tflops 1"
EXPERTS = "--dp 2 --zero 2 --experts 4 --ep 2 --shared-experts 1 --aux-coef 0.1 --z-coef 0.1"
NAIVE, LOGITS, RING, GATHER = "--dp 2 --attention naive", "--tp 2 --no-fused", "--cp 2", "--cp 2 --cp-mode allgather"
ALONE = "--micro-batch 1"
CASES = [  # step and flags; all but the first on two ranks
    (1, ALONE),
    (2, NAIVE),
    (8, LOGITS),
    (8, "--tp 2 --tp-mode chunked"),
    (8, RING),
    (8, f"{GATHER} --attention naive"),
    (8, "--cp 2 --cp-mode ulysses --zero 3"),
    (8, EXPERTS),
    (8, "--pp 2 --layers 2 --schedule zb-h1"),
    (8, "--dp 2 --experts 4 --gate sigmoid --recompute full --expert-ffn 20"),
]
SHOWN_BY = dict.fromkeys((*MUTANTS, "sums in bfloat16"), (8, RING)) | {
    "narrow model": (2, NAIVE),
    "narrow mixed_precision": (1, ALONE),
    "narrow vocab_parallel": (8, LOGITS),
    "narrow attention_block": (8, f"{GATHER} --attention naive"),
    "gradients of gathered keys in bfloat16": (8, f"{GATHER} --attention naive"),
    "narrow router": (8, EXPERTS),
    "narrow moe": (8, EXPERTS),
    "experts combined in bfloat16": (8, EXPERTS),
}
AUTOGRAD = "add, mm, mul, neg, round, silu_backward, sum, wide flash_attention_backward"
NARROW = {  # file.function: operations. Products and sums round their result only, and tp sends activations
    "all_gather_attention.backward": "round",
    "all_gather_attention.forward": "round",
    "attention_block._scores": "bmm",
    "attention_block.attend": "bmm, flash_attention, round",
    "attention_block.attend_backward": "bmm, round, sum, wide flash_attention_backward",
    "collectives": "reduce_scatter over tp",
    "cross_entropy.logits_to_gradient_reference": "round",
    "experts.multiply": "_grouped_mm, mm",
    "experts.multiply_transposed": "_grouped_mm, mm",
    "gloo._add_up": "sum",
    "initialisation.fill": "round",
    "linear.backward": "mm",
    "linear.forward": "mm",
    "linear.product": "mm",
    "linear_cross_entropy.add_product": "mm",
    "linear_cross_entropy.backward": "mul_",
    "linear_cross_entropy.forward": "mm",
    "mixed_precision._copy_to_parameters": "round",
    "model.apply_linears": "mm",
    "model.compute": "add",
    "model.forward": "mm, mul, round",
    "model.fused_attention": "flash_attention",
    "model.naive_attention": "bmm, mul, round",
    "model.silu_and_multiply": "mul, silu",
    "model.turned": "neg, round",
    "moe.backward": "round",
    "moe.forward": "add, round",
    "pipeline._backward": f"{AUTOGRAD}, embedding_dense_backward, index_put",
    "recompute.backward": AUTOGRAD,
    "ring.multiply": "mm",
    "ring.multiply_and_scatter": "add_",
    "ring.summand": "mm",
    "ring_attention.backward": "round",
    "ring_attention.forward": "round",
    "tensor_parallel.backward": "add_, mm",
    "tensor_parallel.forward": "mm",
    "train.train_step": f"{AUTOGRAD}, embedding_dense_backward, bmm",
    "vocab_parallel.backward": "round",
}
NARROW = {place: {*names.split(", ")} for place, names in NARROW.items()}


def ranks_watch(cases: list[tuple]) -> list[dict[str, set[str]]]:
    """What each case computes in 16 bits on this rank."""
    found = []
    for step, flags, mutant in cases:
        with NarrowOperations() as operations:
            train_case(step, f"{BASE} {flags}", mutant)
        found.append(dict(operations.found))
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple, dict[str, set[str]]]:
    """(step, flags, mutant) -> what the ranks compute in 16 bits."""
    cases = [(*case, None) for case in CASES] + [(*case, name) for name, case in SHOWN_BY.items()]
    alone, on_ranks = [each for each in cases if each[0] == 1], [each for each in cases if each[0] > 1]
    result = dict(zip(alone, ranks_watch(alone), strict=True))
    for case, ranks in zip(on_ranks, zip(*run_ranks(2, ranks_watch, on_ranks, timeout=600), strict=True), strict=True):
        result[case] = union(ranks)
    return result


def union(several: Iterable[dict[str, set[str]]]) -> dict[str, set[str]]:
    result = defaultdict(set)
    for place, names in (item for each in several for item in each.items()):
        result[place] |= names
    return result


def beyond(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """What should not be computed in 16 bits."""
    return {place: more for place, names in found.items() if (more := names - NARROW.get(place, set()))}


def test_all_of_it(found):
    """Nothing else, and all of it in some run: a line that nothing computes any more would hide a mistake."""
    assert union(found[(*case, None)] for case in CASES) == NARROW


@pytest.mark.parametrize("name", SHOWN_BY)
def test_mutant_is_rejected(found, name):
    assert beyond(found[(*SHOWN_BY[name], name)])
