"""What a run in bfloat16 computes in 16 bits, and that nothing else does: sums, statistics and updates need 32."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.harness.narrow_operations import NarrowOperations
from tests.harness.ranks import run_ranks
from tests.mutants.patches import assert_applies
from tests.mutants.patches.hidden import NARROW as MUTANTS
from tests.parity.runs import train_case

BASE = "--dtype bfloat16 --steps 1 --layers 1 --global-batch 2 --seq-len 8 --peak-tflops 1"
EXPERTS = "--dp 2 --zero 2 --experts 4 --ep 2 --shared-experts 1 --aux-coef 0.1 --z-coef 0.1"
NAIVE, LOGITS, RING, ALONE = "--dp 2 --attention naive", "--tp 2 --no-fused", "--cp 2", "--micro-batch 1"
GATHER = "--cp 2 --cp-mode allgather --attention naive"
OF_STEP_8 = [LOGITS, "--tp 2 --tp-mode chunked", RING, GATHER, "--cp 2 --cp-mode ulysses --zero 3", EXPERTS]
OF_STEP_8 += ["--pp 2 --layers 2 --schedule zb-h1"]
OF_STEP_8 += ["--dp 2 --experts 4 --gate sigmoid --recompute full --expert-ffn 20"]
CASES = [(1, ALONE), (2, NAIVE), *((8, flags) for flags in OF_STEP_8)]  # step and flags; all but the first on two ranks
SHOWN_BY = dict.fromkeys((*MUTANTS, "sums in bfloat16"), (8, RING))
SHOWN_BY |= {"narrow model": (2, NAIVE), "narrow mixed_precision": (1, ALONE), "narrow vocab_parallel": (8, LOGITS)}
SHOWN_BY |= dict.fromkeys(("narrow attention_block", "gradients of gathered keys in bfloat16"), (8, GATHER))
SHOWN_BY |= dict.fromkeys(("narrow router", "narrow moe", "experts combined in bfloat16"), (8, EXPERTS))
AUTOGRAD = "add, mm, mul, neg, round, silu_backward, sum, wide flash_attention_backward"
NARROW = {  # operations: where (file.function). Products and sums round their result only, and tp sends activations
    "round": "all_gather_attention.backward, all_gather_attention.forward, attention_block.attend, "
    "attention_block.attend_backward, cross_entropy.logits_to_gradient_reference, gloo._add_up, "
    "initialisation.fill, mixed_precision._copy_to_parameters, model.naive_attention, layers.rms_norm, layers.turned, "
    "moe.backward, moe.forward, ring_attention.backward, ring_attention.forward, vocab_parallel.backward",
    "bmm": "attention_block._scores, attention_block.attend, attention_block.attend_backward, model.naive_attention, "
    "train.train_step",
    "flash_attention": "attention_block.attend, model.fused_attention",
    "sum": "attention_block.attend_backward",
    "wide flash_attention_backward": "attention_block.attend_backward",
    "reduce_scatter over tp": "collectives",
    "_grouped_mm": "experts.multiply, experts.multiply_transposed",
    "mm": "experts.multiply, experts.multiply_transposed, linear.input_gradient, linear.output, "
    "linear.weight_gradient, linear_cross_entropy.add_product, linear_cross_entropy.forward, layers.apply_linears, "
    "model.forward",
    "mul_": "linear_cross_entropy.backward",
    "add": "layers.after_adding, model.compute, moe.forward",
    "mul": "model.naive_attention, layers.rms_norm, model.silu_and_multiply",
    "silu": "model.silu_and_multiply",
    "neg": "layers.turned",
    AUTOGRAD: "pipeline._backward, recompute.backward, train.train_step",
    "embedding_dense_backward": "pipeline._backward, train.train_step",
    "index_put": "pipeline._backward",
    "add_": "ring.multiply_and_scatter, tensor_parallel.backward",
}
NARROW = [(place, names) for names, places in NARROW.items() for place in places.split(", ")]
NARROW = {place: {each for at, names in NARROW if at == place for each in names.split(", ")} for place, _ in NARROW}


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
    assert_applies(name)
    assert beyond(found[(*SHOWN_BY[name], name)])
