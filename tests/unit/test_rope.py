"""YaRN as published configurations have it. That it computes the same as transformers' is in test_transformers.py."""

import json
import math

import pytest
import torch

from common.errors import UsageError
from common.presets import resolve
from common.rope_scaling import YarnScaling
from tests.mutants.patches import assert_applies, patched
from tests.unit import test_transformers as same


def test_a_forgotten_mscale_is_noticed(tmp_path, monkeypatch):
    name = "mscale forgotten"
    assert_applies(name)
    with patched(name), pytest.raises(AssertionError, match="< 1e-12"):
        same.test_same_logits_and_gradients_and_back_again("deepseek_v3 with YaRN", "float64", tmp_path, monkeypatch)


def test_the_published_configuration_of_deepseek_v3(tmp_path):
    """As its config.json spells YaRN. Another kind of it is refused in one line."""
    theirs = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    theirs |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    same.exported(tmp_path / "out", same.config_of(same.DEEPSEEK))
    file = tmp_path / "out/config.json"
    shape = json.loads(file.read_text())
    shape["max_position_embeddings"] = 163840

    def read(**changes):
        rope = {key: value for key, value in (theirs | changes).items() if value is not None}
        file.write_text(json.dumps({**shape, "rope_parameters": None, "rope_theta": 10000, "rope_scaling": rope}))
        return resolve(str(tmp_path / "out"))

    scaling = read().rope_scaling
    assert scaling == YarnScaling(40, 4096, 32, 1, 1.0, 1.0) and scaling.length == 1
    assert scaling.score_scale == pytest.approx(1.368888**2, abs=1e-5)
    kept = scaling.kept(10000.0 ** (-torch.arange(32).double() / 32), 10000.0)  # 64 numbers of a head turn
    assert (kept[:11].min(), kept[23:].max()) == (1, 0) and ((0 < kept[11:23]) & (kept[11:23] < 1)).all()
    assert read(mscale=0.5).rope_scaling.length == pytest.approx((1 + 0.05 * math.log(40)) / (1 + 0.1 * math.log(40)))
    for changes in ({"attention_factor": 1.5}, {"truncate": False}, {"beta_slow": 64}, {"factor": 0.5}):
        with pytest.raises(UsageError, match="^--model [^\n]* has rope_parameters [^\n]*, which this decoder does not"):
            read(**changes)
