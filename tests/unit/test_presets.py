"""Hugging Face configuration files: old and new forms, what is refused, the Hub."""

import copy
import dataclasses
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from common.model_config import ModelConfig
from common.presets import PRESETS, from_huggingface, resolve

LLAMA_31_8B = {  # the file as published
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}


def refusal(function, *args, **kwargs) -> str:
    """The one line that a UsageError says."""
    with pytest.raises(UsageError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_llama_31_in_both_forms():
    old = dict(LLAMA_31_8B)
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": 500000.0}
    for values in (old, new):
        assert from_huggingface(values, "here") == PRESETS["llama3-8b"]


def test_from_transformers_own_classes(tmp_path):
    """What transformers' classes write today is read, and gives the preset it came from."""
    from transformers import LlamaConfig, MixtralConfig

    values = copy.deepcopy(LLAMA_31_8B)  # the class writes into its rope_scaling
    llama = LlamaConfig(**{key: value for key, value in values.items() if key != "model_type"})
    llama.save_pretrained(tmp_path)
    assert resolve(str(tmp_path)) == replace(PRESETS["llama3-8b"], head_dim=128)
    mixtral = MixtralConfig(
        **{
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32768,
        },
        **{"rope_theta": 1e6},
    )
    mixtral.save_pretrained(tmp_path)
    ours = resolve(str(tmp_path / "config.json"))
    assert replace(ours, head_dim=None) == PRESETS["mixtral-8x7b"]


def test_defaults_of_older_files():
    """Llama 1 and 2: no K/V heads, no RoPE entries, no tying."""
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    values = {"model_type": "llama"} | {key: LLAMA_31_8B[key] for key in keys}
    config = from_huggingface(values, "here")
    expected = ModelConfig(128256, 4096, 32, 32, 32, 14336, False, norm_eps=1e-6, max_positions=2048)
    assert dataclasses.asdict(config) == dataclasses.asdict(expected)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"model_type": "gpt2"}, "has model_type gpt2; llama, mistral and mixtral can be read"),
        ({"attention_bias": True}, "sets attention_bias, which this decoder does not have"),
        ({"mlp_bias": True}, "sets mlp_bias, which this decoder does not have"),
        ({"sliding_window": 4096}, "sets sliding_window, which this decoder does not have"),
        ({"hidden_act": "gelu"}, "has hidden_act gelu; this decoder has silu"),
        ({"vocab_size": ...}, "lacks vocab_size"),
        ({"intermediate_size": ..., "hidden_size": ...}, "lacks hidden_size, intermediate_size"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "has rope_type linear; default and llama3 can be read",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "of rope_type llama3",
        ),
        ({"hidden_size": "32"}, "has hidden_size '32', which is no whole number from 1 on"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": True}, "has num_hidden_layers True, which is no whole number from 1 on"),
        ({"num_key_value_heads": "4"}, "has num_key_value_heads '4', which is no whole number from 1 on"),
        ({"head_dim": -2}, "has head_dim -2, which is no whole number from 1 on"),
        ({"rms_norm_eps": "x"}, "has rms_norm_eps 'x', which is no positive number"),
        ({"rms_norm_eps": float("nan")}, "has rms_norm_eps nan, which is no positive number"),
        ({"rope_theta": 0}, "has rope_theta 0, which is no positive number"),
        ({"rope_theta": 10**400}, "which is no positive number"),
        ({"rope_scaling": "x"}, "has rope_scaling 'x', which is no JSON object"),
        ({"rope_scaling": LLAMA_31_8B["rope_scaling"] | {"factor": 0}}, "has factor 0, which is no positive number"),
        (
            {"rope_scaling": LLAMA_31_8B["rope_scaling"] | {"low_freq_factor": 4}},
            "has a low_freq_factor that is not below its high_freq_factor",
        ),
        ({"tie_word_embeddings": "no"}, "has tie_word_embeddings 'no', which is neither true nor false"),
        ({"model_type": "mixtral"}, "lacks num_local_experts"),
    ],
)
def test_configurations_that_are_refused(change, expected, tmp_path):
    values = {key: value for key, value in (LLAMA_31_8B | change).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    message = refusal(resolve, str(tmp_path))
    assert message.startswith(f"--model {tmp_path} ") and message.endswith(expected)


def test_mixtral_sends_a_token_to_two_experts_unless_told_otherwise():
    mixtral = LLAMA_31_8B | {"model_type": "mixtral", "num_local_experts": 8}
    assert from_huggingface(mixtral, "here").top_k == 2
    assert from_huggingface(mixtral | {"num_experts_per_tok": 1}, "here").top_k == 1


def test_names_and_files_that_are_no_configuration(tmp_path):
    for text in ("{", "[]", "\x00", "[" * 100_000):
        (tmp_path / "bad.json").write_text(text)
        assert refusal(resolve, str(tmp_path / "bad.json")).startswith(f"--model {tmp_path / 'bad.json'} ")
    for name in ("llama9", str(tmp_path), "missing/config.json", "./missing", "", "x" * 5000):
        assert refusal(resolve, name).startswith(f"--model {name} is no preset (debug, smollm-135m, ")


def test_a_hub_configuration(monkeypatch):
    import transformers

    asked = []

    def from_pretrained(name):
        asked.append(name)
        return SimpleNamespace(to_dict=lambda: LLAMA_31_8B)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    assert resolve("meta-llama/Llama-3.1-8B") == PRESETS["llama3-8b"] and asked == ["meta-llama/Llama-3.1-8B"]
