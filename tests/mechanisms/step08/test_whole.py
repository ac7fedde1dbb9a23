"""DeepSeek-V3 as a whole, on 8 ranks: all that it is made of at once, and the same training in one process.

With FP8 operands, a run is compared with one process whose products have the same rows. All rows of an expert's product
share the scales of its weight gradient, and they come from all ranks of its row of `ep` (4 ranks, a sequence each). So
the one process takes 4 sequences as a micro-batch. If it took 16, other rows would share a scale: the experts'
down-projections would differ by 1e-4. In float64 the number of micro-batches makes no difference.
"""

from dataclasses import replace

import pytest

from common.process_groups import all_groups
from step08_5d.experiments import deepseek
from tests.mutants.patches.multi_token import MUTANTS
from tests.parity import test_fp8 as fp8
from tests.parity.cases import ALL
from tests.parity.runs import ADAMW, UNTIED, assert_parity

# Latent attention, a dense first layer, 16 experts with a shared one, sigmoid gates with a bias, two of four nodes
MODEL = "--latent 12,8,6,4,8 --heads 4 --kv-heads 4 --layers 4 --dense-layers 1 --experts 16 --top-k 4"
MODEL += " --shared-experts 1 --expert-ffn 16 --gate sigmoid --expert-groups 4 --node-limit 2 --balance bias --mtp 1"
MODEL += f" --global-batch 16 {UNTIED} {ADAMW}"
NARROW = f"{fp8.TILE} --fp8-dispatch --seq-len 32"
LAYOUT = "--pp 2 --dp 4 --ep 4 --zero 1 --micro-batch 1 --schedule"
DUALPIPEV = f"{LAYOUT} dualpipev"  # both ends of the pipeline are on rank 0 of `pp`
CASES = [(NARROW, DUALPIPEV)]
FURTHER = [
    ("", DUALPIPEV),
    (NARROW, f"{LAYOUT} dualpipe"),
    (NARROW, f"{LAYOUT} zb-h1 --recompute full"),
    ("", f"{LAYOUT} zb-h1 --zero 3"),
    ("", "--pp 2 --cp 2 --tp 2 --ep 4 --zero 1 --micro-batch 1 --schedule dualpipev --recompute full"),
    ("--mask-documents", "--pp 2 --cp 2 --tp 2 --ep 4 --zero 1 --micro-batch 1"),
]
CASES += FURTHER if ALL else []


def test_equals_one_process():
    cases = [f"{MODEL} {numbers} {layout}" for numbers, layout in CASES]
    for (numbers, _), case, result in zip(CASES, cases, fp8.run_narrow(8, cases), strict=True):
        tolerance = fp8.TOLERANCE if numbers == NARROW else 1e-10
        assert_parity(result, fp8.one_process(f"{MODEL} {numbers}", 4), case, tolerance)


def test_the_ranks_of_the_picture():
    groups = all_groups(deepseek.DEGREES)
    for stage in (deepseek.RANKS[:4], deepseek.RANKS[4:]):
        assert stage in groups["ep"] and stage in groups["dp_cp"]
    assert (2, 3) in groups["pp_forward"] and all(len(each) == 1 for each in groups["edp"])
    assert deepseek.kv_numbers(deepseek.V3) == (40960, 576)
    share, unmasked, tokens_per_second = deepseek.published_mfu(replace(deepseek.V3, mtp=1))
    assert (round(share, 3), round(unmasked, 3), round(tokens_per_second)) == (0.455, 0.407, 1543)


@pytest.mark.skipif(not ALL, reason="TEST_ALL")
def test_an_embedding_at_both_ends_of_one_rank():
    """With DualPipeV, the rank that holds the first stage holds the last one as well: two copies of the embedding."""
    name = "second embedding goes its own way"
    assert name in MUTANTS
    (result,) = fp8.run_narrow(8, [f"{MODEL} {DUALPIPEV}"], [name])
    with pytest.raises(AssertionError, match="relative differences above"):
        assert_parity(result, fp8.one_process(MODEL, 4), name)
