"""Step 1: small claims of the playbook, each checked against a model's shape or by its own arithmetic."""

import pytest

from common.counts import count_flops, count_parameters
from common.model_config import ModelConfig
from step01_single_gpu.memory_model.gpt import GptShape
from tests.mechanisms.step01.gpt_block import GptBlock


def test_parameters_of_a_built_gpt_layer():
    """12 h^2 + 13 h: four matrices of h^2 and two of 4 h^2, nine vectors of biases and four of norms."""
    count = sum(parameter.numel() for parameter in GptBlock(48, 4).parameters())
    assert count == 12 * 48**2 + 13 * 48
    assert GptShape(100, 48, 3, 4).parameters == 100 * 48 + 3 * count + 2 * 48


@pytest.mark.parametrize("hidden, seq", [(64, 16), (512, 8192)])
def test_attention_core_against_linear_layers(hidden, seq):
    """Appendix A2's layer has 16 h^2 parameters; 12 L h s^2 against 6 N s is s / 8h, so s << h, not s^2 << h."""
    model = ModelConfig(100, hidden, 2, 4, 4, 4 * hidden, True)
    count, flops = count_parameters(model), count_flops(model, seq)
    assert count.attention + count.dense_mlp == 16 * hidden**2
    assert flops.attention_core / flops.linear == seq / (8 * hidden)
