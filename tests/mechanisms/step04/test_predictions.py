"""The numbers that the lesson works out, and the playbook's formulas beside the corrected ones."""

import pytest

from common.counts import count_flops
from common.experiments.cost_model import gather_ratio
from common.presets import PRESETS
from step04_tensor_parallel.experiments.predictions import Way, block_bytes, row_then_column_bytes

PEAK, IN_A_NODE = 989e12, 250e9  # FLOP/s and bytes/s of an H100
LLAMA = PRESETS["llama3-8b"]


@pytest.mark.parametrize(("hidden", "printed"), [(4096, 3.38), (16384, 0.85)])
def test_appendix_a3_counts_elements_where_bandwidth_is_bytes(hidden, printed):
    """(tp-1)/(2h) peak/bandwidth, which is half of what 2 bytes per element make; the cheatsheet takes 12 h columns."""
    assert (8 - 1) / (2 * hidden) * PEAK / IN_A_NODE == pytest.approx(printed, rel=0.01)
    assert gather_ratio(8, hidden, PEAK, IN_A_NODE, beta=1) == pytest.approx(printed, rel=0.01)
    assert gather_ratio(8, hidden, PEAK, IN_A_NODE) == pytest.approx(2 * printed, rel=0.01)
    assert gather_ratio(8, 12 * hidden, PEAK, IN_A_NODE) == pytest.approx(2 * printed / 12, rel=0.01)


def test_which_gathers_of_llama_hide():
    keys = 2 * LLAMA.kv_heads * LLAMA.head_width
    assert gather_ratio(8, LLAMA.hidden + keys, PEAK, IN_A_NODE) == pytest.approx(4.5, rel=0.01)
    assert gather_ratio(8, 2 * LLAMA.ffn, PEAK, IN_A_NODE) == pytest.approx(0.97, rel=0.01)
    assert gather_ratio(8, 27_692, PEAK, IN_A_NODE) == pytest.approx(1, rel=1e-4)


def test_what_a_sequence_of_llama_sends_and_computes():
    stream = 2 * 8192 * LLAMA.hidden
    sent = {tp: LLAMA.layers * sum(block_bytes(Way(), tp, stream).values()) for tp in (2, 4, 8)}
    assert sent == pytest.approx({2: 10.7e9, 4: 16.1e9, 8: 18.8e9}, rel=0.01)
    assert sent[8] / IN_A_NODE == pytest.approx(0.075, rel=0.01)
    assert count_flops(LLAMA, 8192).model / 8 / PEAK == pytest.approx(0.060, rel=0.01)


def test_the_wrong_order_sends_four_and_a_half_times_as_much():
    """In an MLP that is four times as wide inside."""
    sent = row_then_column_bytes(2, 256, 128, 512)
    assert sent["row then column"] == 4.5 * sent["column then row"]
