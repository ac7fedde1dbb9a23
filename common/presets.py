"""Model shapes by name, and from any Hugging Face Llama- or Mixtral-style configuration.

Shapes are those of the published configuration files. `deepseek-v3-like` keeps DeepSeek-V3's layers, widths and experts
(arXiv:2412.19437, section 4.2) with grouped-query attention in the place of its latent attention.
"""

import json
from dataclasses import replace
from pathlib import Path

from common.config import ModelConfig, RopeScaling, UsageError

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
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            return from_huggingface(json.loads(path.read_text()), f"--model {name}")
        except (ValueError, OSError) as error:
            raise UsageError(f"--model {name} is not a readable JSON configuration: {error}") from None
    if name.count("/") == 1 and name[0] not in "./~" and path.suffix != ".json":
        from transformers import AutoConfig

        try:
            return from_huggingface(AutoConfig.from_pretrained(name).to_dict(), f"--model {name}")
        except (OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(f"--model {name} could not be read from the Hub: {reason}") from None
    raise UsageError(f"--model {name} is no preset ({', '.join(PRESETS)}), configuration file or Hub name")


def from_huggingface(values: dict, source: str) -> ModelConfig:
    """ModelConfig from the entries of a Hugging Face `config.json`; `source` says in messages where it comes from.

    Raises UsageError for what ModelConfig cannot express, and for what is missing.
    """
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in ("llama", "mistral", "mixtral"):
        raise UsageError(f"{source} has model_type {kind}; llama, mistral and mixtral can be read")
    for key in ("attention_bias", "mlp_bias", "sliding_window"):
        if values.get(key):
            raise UsageError(f"{source} sets {key}, which this decoder does not have")
    if values.get("hidden_act", "silu") != "silu":
        raise UsageError(f"{source} has hidden_act {values['hidden_act']}; this decoder has silu")
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    if missing := [key for key in needed if key not in values]:
        raise UsageError(f"{source} lacks {', '.join(missing)}")
    heads, experts = values["num_attention_heads"], values.get("num_local_experts") or 0
    # transformers 5 keeps both in rope_parameters, earlier files have rope_theta and rope_scaling
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope_kind = rope.get("rope_type", rope.get("type", "default"))
    if rope_kind not in ("default", "llama3"):
        raise UsageError(f"{source} has rope_type {rope_kind}; default and llama3 can be read")
    scaling = None
    if rope_kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if missing := [key for key in keys if key not in rope]:
            raise UsageError(f"{source} lacks {', '.join(missing)} of rope_type llama3")
        scaling = RopeScaling(*(rope[key] for key in keys))
    return ModelConfig(
        vocab=values["vocab_size"],
        hidden=values["hidden_size"],
        layers=values["num_hidden_layers"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        ffn=values["intermediate_size"],
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        head_dim=values.get("head_dim"),
        norm_eps=values.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 10000.0))),
        rope_scaling=scaling,
        max_positions=values.get("max_position_embeddings", 2048),
        experts=experts,
        top_k=values.get("num_experts_per_tok", 0) if experts else 0,
        expert_ffn=values["intermediate_size"] if experts else 0,
    )
