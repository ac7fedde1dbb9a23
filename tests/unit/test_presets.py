"""Configurations of Hugging Face models: files in old and new forms, and what is refused."""

import json
from dataclasses import replace

import pytest

from common.errors import UsageError
from common.model_config import ModelConfig
from common.presets import PRESETS, resolve

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
SCALING |= {"original_max_position_embeddings": 8192}
SIZES = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32}
SIZES |= {"num_attention_heads": 32, "intermediate_size": 14336}
LLAMA_31_8B = SIZES | {"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "max_position_embeddings": 131072}
LLAMA_31_8B |= {"rope_theta": 500000.0, "rope_scaling": SCALING}  # as published


def resolved(folder, values: dict) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    assert resolve(str(folder)) == resolve(str(folder / "config.json"))
    return replace(resolve(str(folder)), head_dim=None)


def test_files_of_all_ages(tmp_path):
    assert resolved(tmp_path, LLAMA_31_8B) == PRESETS["llama3-8b"]
    new = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope")}
    new["rope_parameters"] = SCALING | {"rope_theta": 500000.0}
    assert resolved(tmp_path, new) == PRESETS["llama3-8b"]
    llama_1 = ModelConfig(128256, 4096, 32, 32, 32, 14336, False, norm_eps=1e-6, max_positions=2048)
    assert resolved(tmp_path, SIZES) == llama_1, "no K/V heads, no RoPE entries, no tying"
    mixtral = {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_key_value_heads": 8}
    mixtral |= {"rope_theta": 1e6, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
    assert resolved(tmp_path, SIZES | mixtral) == PRESETS["mixtral-8x7b"]


REFUSED = [
    (LLAMA_31_8B | {"model_type": "gpt2"}, "has model_type gpt2, which this decoder does not have"),
    (LLAMA_31_8B | {"model_type": "mistral"}, "has sliding_window 4096, which"),  # transformers' default
    (LLAMA_31_8B | {"attention_bias": True}, "has attention_bias True, which"),
    (LLAMA_31_8B | {"mlp_bias": True}, "has mlp_bias True, which"),
    (LLAMA_31_8B | {"hidden_act": "gelu"}, "has hidden_act gelu, which"),
    (LLAMA_31_8B | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope_parameters {'type': 'linear'"),
    (LLAMA_31_8B | {"rope_scaling": SCALING | {"low_freq_factor": 4}}, "has rope_parameters {'factor': 8.0"),
    (LLAMA_31_8B | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "cannot be read ("),
    (LLAMA_31_8B | {"hidden_size": "32"}, "cannot be read ("),
    (LLAMA_31_8B | {"tie_word_embeddings": "no"}, ""),  # transformers 5.0 leaves it to us
    ([], "cannot be read ("),
]


def test_refusals(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    names = [(name, "is no preset (debug, smollm-135m, ") for name in ("llama9", "./missing", "a/b/c", "", "x" * 5000)]
    names += [("owner/no-such-model-1.7B", "cannot be read ("), (str(tmp_path / "bad.json"), "cannot be read (")]
    for number, (values, words) in enumerate(REFUSED):
        (tmp_path / str(number)).mkdir()
        (tmp_path / f"{number}/config.json").write_text(json.dumps(values))
        names.append((str(tmp_path / str(number)), words))
    for name, words in names:
        with pytest.raises(UsageError) as caught:
            resolve(name)
        assert str(caught.value).startswith(f"--model {name} {words}") and "\n" not in str(caught.value)
