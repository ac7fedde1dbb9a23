"""On several ranks, attention, grouped products and the head keep the rules of CUDA's operators, in bfloat16."""

from collections import Counter

import pytest
import torch

from tests.harness.cuda_rules import STAND_INS, cuda_rules
from tests.harness.product_sums import sums_in_products
from tests.harness.ranks import run_ranks
from tests.parity.runs import assemble, assert_parity, train_case, training_of

SHAPES = "--hidden 64 --heads 8 --kv-heads 4 --dtype bfloat16 --steps 1 --global-batch 4 --peak-tflops 1"
EXPERTS = "--experts 4 --expert-ffn 24 --shared-experts 1"
BLOCKS = {"flash_attention", "flash_attention_backward"}
CASES = {  # what they call
    f"{SHAPES} --cp 4": BLOCKS,
    f"{SHAPES} --cp 2 --cp-mode allgather --tp 2 --mask-documents": BLOCKS,
    f"{SHAPES} --cp 2 --cp-mode ulysses --cp-split striped --tp 2": BLOCKS,
    f"{SHAPES} {EXPERTS} --dp 2 --tp 2 --ep 4 --zero 2": {"scaled_dot_product_attention", "grouped_mm"},
    f"{SHAPES} {EXPERTS} --pp 2 --cp 2 --ep 2 --schedule zb-h1 --recompute full": BLOCKS | {"grouped_mm"},
    "--dtype float32 --steps 1 --global-batch 4 --tp 2 --peak-tflops 1": {"scaled_dot_product_attention"},
}


def trained_by_the_rules(cases: list[str]) -> list[tuple[dict, Counter]]:
    """On a rank: what came out of each case, and how often it called each stand-in."""
    found = []
    for case in cases:
        with cuda_rules() as calls, sums_in_products():
            found.append((train_case(8, case), calls))
    return found


def test_layouts_keep_the_rules():
    """Also when gradients of weights are added up by products, as on a GPU."""
    ranks, called = run_ranks(4, trained_by_the_rules, list(CASES)), set()
    for (case, names), parts in zip(CASES.items(), zip(*ranks, strict=True), strict=True):
        results, calls = zip(*parts, strict=True)
        called |= set().union(*calls)
        assert names <= set().union(*calls), case
        if "bfloat16" in case:
            assert calls[0]["addmm"] > 2 * 4, f"{case}: the matrices of two layers, and the head"
        assert_parity(assemble(results), assemble([train_case(7, training_of(case))]), case, 5e-2)
    assert called == STAND_INS.keys()


def tensor(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def grouped(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> None:
    STAND_INS["grouped_mm"](x, matrices, offs=ends)


Q, MATRIX = tensor(1, 4, 8, 16), tensor(2, 16, 8)
ENDS, attention = torch.tensor([3, 8], dtype=torch.int32), STAND_INS["flash_attention"]
BROKEN = {  # a rule that is more than a type, and a call that breaks it
    "a dense last axis": (attention, Q, Q.mT.contiguous().mT, Q, 0.0, True),
    "rows at multiples of 16 bytes": (attention, tensor(1, 4, 8, 20)[..., 4:], Q, Q, 0.0, True),
    "a causal block is a square": (attention, Q[:, :, :4], Q, Q, 0.0, True),
    "aligned strides": (grouped, tensor(8, 20)[:, :16], MATRIX, ENDS),
    "one dense axis": (grouped, tensor(8, 1).expand(8, 16), MATRIX, ENDS),
    "data at a multiple of 16 bytes": (grouped, tensor(8, 24)[:, 4:20], MATRIX, ENDS),
    "groups that begin at": (grouped, tensor(16, 8), tensor(8, 16), ENDS),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_what_breaks_a_rule_is_refused(rule):
    call, *arguments = BROKEN[rule]
    with pytest.raises(AssertionError, match=rule):
        call(*arguments)
