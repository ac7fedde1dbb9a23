"""Model shapes by name, and from any Hugging Face Llama- or Mixtral-style configuration.

Shapes are those of the published configuration files. `deepseek-v3-like` keeps DeepSeek-V3's layers, widths and experts
(arXiv:2412.19437, section 4.2) with grouped-query attention in the place of its latent attention.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from common.errors import UsageError
from common.model_config import ModelConfig, RopeScaling

_LLAMA_31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
_LLAMA_32 = replace(_LLAMA_31, factor=32.0)


def _smollm(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(49152, hidden, layers, heads, kv_heads, ffn, tie_embeddings=True, max_positions=2048)


def _llama3(hidden, layers, heads, kv_heads, ffn, tie_embeddings=False, scaling=_LLAMA_31) -> ModelConfig:
    return ModelConfig(
        *(128256, hidden, layers, heads, kv_heads, ffn, tie_embeddings),
        rope_theta=500000.0,
        rope_scaling=scaling,
        max_positions=131072,
    )


PRESETS = {
    "debug": ModelConfig(384, 128, 4, 8, 4, 384, tie_embeddings=False),
    "smollm-135m": _smollm(576, 30, 9, 3, 1536),
    "smollm-360m": _smollm(960, 32, 15, 5, 2560),
    "smollm-1.7b": _smollm(2048, 24, 32, 32, 8192),
    "llama3-1b": _llama3(2048, 16, 32, 8, 8192, tie_embeddings=True, scaling=_LLAMA_32),
    "llama3-8b": _llama3(4096, 32, 32, 8, 14336),
    "llama3-70b": _llama3(8192, 80, 64, 8, 28672),
    "llama3-405b": _llama3(16384, 126, 128, 8, 53248),
    "mixtral-8x7b": ModelConfig(
        *(32000, 4096, 32, 32, 8, 14336, False),
        **{"rope_theta": 1e6, "max_positions": 32768, "experts": 8, "top_k": 2, "expert_ffn": 14336},
    ),
    "deepseek-v3-like": ModelConfig(
        *(129280, 7168, 61, 128, 8, 18432, False),
        **{"head_dim": 128, "max_positions": 4096, "norm_eps": 1e-6},
        **{"experts": 256, "top_k": 8, "shared_experts": 1, "dense_layers": 3, "expert_ffn": 2048},
    ),
}


def resolve(name: str) -> ModelConfig:
    """The configuration called `name`: a preset, a config.json or the folder that holds one, or a Hub name.

    Raises UsageError when it is none of these, or describes a model that this decoder is not.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name, "config.json") if os.path.isdir(name) else Path(name)
    if os.path.isfile(path):  # unlike Path.is_file, False for whatever cannot be a path
        try:
            values = json.loads(path.read_text())
        except (ValueError, OSError, RecursionError) as error:
            raise UsageError(f"--model {name} is not a readable JSON configuration: {error}") from None
        return from_huggingface(values, f"--model {name}")
    if name.count("/") == 1 and name[0] not in "./~" and path.suffix != ".json":
        from transformers import AutoConfig

        quiet_hub()
        try:
            values = AutoConfig.from_pretrained(name).to_dict()
        except Exception as error:  # the client passes on the errors of several libraries
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(f"--model {name} could not be read from the Hub: {reason}") from None
        return from_huggingface(values, f"--model {name}")
    raise UsageError(f"--model {name} is no preset ({', '.join(PRESETS)}), configuration file or Hub name")


def quiet_hub() -> None:
    """Keep the Hub's client from logging every retry: the one error that follows says what was wrong."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()


def from_huggingface(values: dict, source: str) -> ModelConfig:
    """ModelConfig from the entries of a Hugging Face `config.json`; `source` says in messages where it comes from.

    Raises UsageError for what ModelConfig cannot express, for what is missing and for values of the wrong kind.
    """
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in ("llama", "mistral", "mixtral"):
        raise UsageError(f"{source} has model_type {kind}; llama, mistral and mixtral can be read")
    for key in ("attention_bias", "mlp_bias", "sliding_window"):
        if values.get(key):
            raise UsageError(f"{source} sets {key}, which this decoder does not have")
    if values.get("hidden_act", "silu") != "silu":
        raise UsageError(f"{source} has hidden_act {values['hidden_act']}; this decoder has silu")
    needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    needed += ["num_local_experts"] if kind == "mixtral" else []
    if missing := [key for key in needed if values.get(key) is None]:
        raise UsageError(f"{source} lacks {', '.join(missing)}")
    tied = values.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise UsageError(f"{source} has tie_word_embeddings {tied!r}, which is neither true nor false")
    # transformers 5 keeps both in rope_parameters, earlier files have rope_theta and rope_scaling
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UsageError(f"{source} has rope_scaling {rope!r}, which is no JSON object")
    rope_kind = rope.get("rope_type", rope.get("type", "default"))
    if rope_kind not in ("default", "llama3"):
        raise UsageError(f"{source} has rope_type {rope_kind}; default and llama3 can be read")
    scaling = None
    if rope_kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if missing := [key for key in keys if rope.get(key) is None]:
            raise UsageError(f"{source} lacks {', '.join(missing)} of rope_type llama3")
        scaling = RopeScaling(*(_number(rope, key, source) for key in keys[:3]), _integer(rope, keys[3], source))
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise UsageError(f"{source} has a low_freq_factor that is not below its high_freq_factor")
    heads, ffn = _integer(values, "num_attention_heads", source), _integer(values, "intermediate_size", source)
    experts = _integer(values, "num_local_experts", source) if kind == "mixtral" else 0
    return ModelConfig(
        vocab=_integer(values, "vocab_size", source),
        hidden=_integer(values, "hidden_size", source),
        layers=_integer(values, "num_hidden_layers", source),
        heads=heads,
        kv_heads=_integer(values, "num_key_value_heads", source, heads),
        ffn=ffn,
        tie_embeddings=tied,
        head_dim=_integer(values, "head_dim", source),
        norm_eps=_number(values, "rms_norm_eps", source, 1e-6),
        rope_theta=_number(values if rope.get("rope_theta") is None else rope, "rope_theta", source, 10000.0),
        rope_scaling=scaling,
        max_positions=_integer(values, "max_position_embeddings", source, 2048),
        experts=experts,
        top_k=_integer(values, "num_experts_per_tok", source, 2) if experts else 0,
        expert_ffn=ffn if experts else 0,
    )


def _integer(values: dict, key: str, source: str, default: int | None = None) -> int | None:
    """A whole number from 1 on; `default` where the entry is missing or null."""
    value = values.get(key)
    if value is None:
        return default
    if type(value) is not int or value < 1:  # a bool is an int, too
        raise UsageError(f"{source} has {key} {value!r}, which is no whole number from 1 on")
    return value


def _number(values: dict, key: str, source: str, default: float | None = None) -> float | None:
    """A finite positive number; `default` where the entry is missing or null."""
    value = values.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:  # NaN fails, too
        raise UsageError(f"{source} has {key} {value!r}, which is no positive number")
    return float(value)
