"""The formulas of step 3 against numbers worked out by hand, and the playbook's beside them."""

import pytest

from common.counts import count_parameters
from common.experiments.cost_model import ALL_GATHER_GB_PER_S
from common.presets import PRESETS
from step03_zero.experiments import predictions

PEAK = 989e12  # of an H100 in bfloat16
TOKENS = (3464, 5023, 8051, 14109, 17841, 35183, 89733)
LLAMA = count_parameters(PRESETS["llama3-8b"]).total


@pytest.mark.parametrize("stage, gib", [*enumerate((134.6, 56.1, 29.9, 16.8))])
def test_states_of_llama_on_8_gpus(stage, gib):
    held = predictions.held(LLAMA, stage, 8, predictions.OURS["bfloat16"])
    assert sum(held) / 2**30 == pytest.approx(gib, abs=0.05)


def test_stage_3_sends_half_as_much_again():
    model = predictions.Model((0, 10, 10, 0))  # neither embedding nor head: they are gathered once
    assert [sum(predictions.sent(model, stage, 2)) for stage in (1, 2, 3)] == [80, 80, 120]  # bytes, N = 2
    assert [sum(predictions.sent(model, stage, 2, micro_batches=4)) for stage in (1, 2, 3)] == [80, 200, 480]


@pytest.mark.parametrize("gpus, tokens", [*zip(ALL_GATHER_GB_PER_S, TOKENS)])
def test_tokens_that_hide_a_gather(gpus, tokens):
    bandwidth = ALL_GATHER_GB_PER_S[gpus] * 1e9
    assert predictions.tokens_to_hide_gather(gpus, bandwidth, PEAK) == pytest.approx(tokens, abs=1)
    # The playbook's: appendix A3 counts elements, not bytes; its cheatsheet also drops 1/N; for ZeRO-2 it keeps what
    # cancels, and counts elements where gradients have 4 bytes
    assert predictions.appendix_a3(gpus, bandwidth, PEAK, tokens) == pytest.approx(1 / 2, rel=1e-3)
    assert predictions.cheatsheet_zero3(gpus, bandwidth, PEAK, tokens) == pytest.approx(gpus / 2, rel=1e-3)
    right = predictions.tokens_to_hide_scatter(gpus, bandwidth, PEAK) / tokens
    assert predictions.cheatsheet_zero2(gpus, bandwidth, PEAK, tokens, LLAMA) == pytest.approx(right * LLAMA / 4)
