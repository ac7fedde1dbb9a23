"""Model shapes by name, and from the configuration of a Hugging Face model.

Presets have the shapes of the published configuration files, except for `deepseek-v3-like`: it has the layers, widths
and experts of `deepseek-v3` (arXiv:2412.19437, section 4.2), but grouped-query attention instead of latent attention.
`deepseek-v3` trains as it was pretrained, with 4,096 positions; its longer contexts came from YaRN afterwards.
`deepseek-v3-tiny` is ours: the same parts in a size for laptops, with widths that FP8's tiles of 128 divide.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

from common.errors import UsageError, first_line
from common.model_config import LatentShape, ModelConfig
from common.rope_scaling import RopeScaling, YarnScaling

_LLAMA_31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
_LLAMA_32 = replace(_LLAMA_31, factor=32.0)
_LLAMA_3 = {"rope_theta": 5e5, "rope_scaling": _LLAMA_31, "max_positions": 131072}
_MIXTRAL = {"rope_theta": 1e6, "max_positions": 32768, "experts": 8, "top_k": 2, "expert_ffn": 14336}
_DEEPSEEK = {"experts": 256, "top_k": 8, "shared_experts": 1, "dense_layers": 3, "expert_ffn": 2048}
_DEEPSEEK |= {"gate": "sigmoid", "gate_scale": 2.5, "expert_groups": 8, "groups_per_token": 4}
_DEEPSEEK |= {"head_dim": 128, "max_positions": 4096, "norm_eps": 1e-6}
_LATENT = LatentShape(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
_DEEPSEEK_V3 = _DEEPSEEK | {"head_dim": None, "latent": _LATENT}
_TINY = _DEEPSEEK_V3 | {"latent": LatentShape(128, 128, 96, 32, 128), "experts": 16, "top_k": 4, "expert_ffn": 128}
_TINY |= {"dense_layers": 1, "expert_groups": 4, "groups_per_token": 2}

PRESETS = {  # vocabulary, hidden width, layers, heads, K/V heads, SwiGLU width, tied embeddings
    "debug": ModelConfig(384, 128, 4, 8, 4, 384, False),
    "smollm-135m": ModelConfig(49152, 576, 30, 9, 3, 1536, True, max_positions=2048),
    "smollm-360m": ModelConfig(49152, 960, 32, 15, 5, 2560, True, max_positions=2048),
    "smollm-1.7b": ModelConfig(49152, 2048, 24, 32, 32, 8192, True, max_positions=2048),
    "llama3-1b": ModelConfig(128256, 2048, 16, 32, 8, 8192, True, **(_LLAMA_3 | {"rope_scaling": _LLAMA_32})),
    "llama3-8b": ModelConfig(128256, 4096, 32, 32, 8, 14336, False, **_LLAMA_3),
    "llama3-70b": ModelConfig(128256, 8192, 80, 64, 8, 28672, False, **_LLAMA_3),
    "llama3-405b": ModelConfig(128256, 16384, 126, 128, 8, 53248, False, **_LLAMA_3),
    "mixtral-8x7b": ModelConfig(32000, 4096, 32, 32, 8, 14336, False, **_MIXTRAL),
    "deepseek-v3-like": ModelConfig(129280, 7168, 61, 128, 8, 18432, False, **_DEEPSEEK),
    "deepseek-v3": ModelConfig(129280, 7168, 61, 128, 128, 18432, False, **_DEEPSEEK_V3),
    "deepseek-v3-tiny": ModelConfig(384, 128, 4, 4, 4, 384, False, **_TINY),
}
# What the fields of ModelConfig are called in transformers' configurations
HUGGINGFACE_NAMES = {"vocab": "vocab_size", "hidden": "hidden_size", "layers": "num_hidden_layers"}
HUGGINGFACE_NAMES |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
HUGGINGFACE_NAMES |= {"ffn": "intermediate_size", "tie_embeddings": "tie_word_embeddings", "norm_eps": "rms_norm_eps"}
HUGGINGFACE_NAMES |= {"max_positions": "max_position_embeddings"}
SIGMOID = "glm4_moe", "deepseek_v3"  # model types whose gates are
_MOE = {"experts": "num_local_experts", "top_k": "num_experts_per_tok"}
_GLM = {"expert_ffn": "moe_intermediate_size", "shared_experts": "n_shared_experts", "expert_groups": "n_group"}
_GLM |= {"groups_per_token": "topk_group", "gate_scale": "routed_scaling_factor", "normalize_gates": "norm_topk_prob"}
_GLM |= {"dense_layers": "first_k_dense_replace"}
# By model type; glm4_moe has the experts of DeepSeek-V3, but ordinary attention
EXPERT_NAMES = {"mixtral": _MOE | {"expert_ffn": "intermediate_size"}} | dict.fromkeys(SIGMOID, _MOE | _GLM)
LATENT_NAMES = {"q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "nope_dim": "qk_nope_head_dim"}
LATENT_NAMES |= {"rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim"}
TYPES = ("llama", "mistral", *EXPERT_NAMES)  # model types that are a `Decoder`
ROPE_SCALINGS = {"llama3": RopeScaling, "yarn": YarnScaling}  # by transformers' rope_type


def resolve(name: str, flag: str = "--model") -> ModelConfig:
    """Return the preset called `name`, else the shape in a Hugging Face file config.json, its folder, or on the Hub.

    Raises UsageError, which names `flag`, when it is none of these, or a model that this decoder cannot express.
    """
    if name in PRESETS:
        return PRESETS[name]
    if not (here := os.path.exists(name)) and (name.count("/") != 1 or name[0] in "./~" or name.endswith(".json")):
        raise UsageError(f"{flag} {name} is no preset ({', '.join(PRESETS)}), configuration file or Hub name")
    from transformers import AutoConfig  # here, since it takes seconds

    with hub_errors_in_one_line(f"{flag} {name}{'' if here else ', which is no file or folder here,'}"):
        if here:
            _check_sizes(Path(name), f"{flag} {name}")
        result = _expressed(AutoConfig.from_pretrained(name, trust_remote_code=False), f"{flag} {name}")
    try:
        result.check()
    except UsageError as error:
        raise UsageError(f"{flag} {name}: {error}") from None
    return result


def _check_sizes(path: Path, what: str) -> None:
    """Raise UsageError if a file lacks a size of the model, for which transformers would take one of another model."""
    values = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    if values.get("model_type") not in TYPES:
        return  # which `_expressed` tells
    for key in (HUGGINGFACE_NAMES[name] for name in ("vocab", "hidden", "layers", "heads", "ffn")):
        if not isinstance(values.get(key), int) or values[key] < 1:
            raise UsageError(f"{what} needs a whole number above 0 for {key}, which is {values.get(key, 'missing')}")


def _expressed(theirs, what: str) -> ModelConfig:
    """The shape that a configuration of transformers describes. Raises UsageError for what changes the computation, be
    it in training only, and is not in this decoder.
    """
    expressible = {"model_type": TYPES, "hidden_act": ("silu",), "is_causal": (None, True)}
    expressible |= dict.fromkeys(("attention_bias", "mlp_bias", "use_qk_norm", "is_heterogeneous"), (None, False))
    expressible |= dict.fromkeys(("attention_dropout", "router_jitter_noise"), (None, 0))
    expressible |= {"sliding_window": (None,), "tie_word_embeddings": (True, False)}  # not every version looks
    for key, values in expressible.items():
        if getattr(theirs, key, None) not in values:
            words = "; a plan can do with a config.json of its sizes that says llama, without QK norm and the like"
            hint = words if key == "model_type" else ""
            raise UsageError(f"{what} has {key} {getattr(theirs, key, None)}, which this decoder does not have{hint}")
    values = {ours: getattr(theirs, key, None) for ours, key in HUGGINGFACE_NAMES.items()}
    rope = theirs.rope_parameters
    kind, whole = ROPE_SCALINGS.get(rope["rope_type"]), rope.get("partial_rotary_factor", 1) == 1
    whole &= rope["rope_theta"] > 0 and rope.get("attention_factor") is None and rope.get("truncate", True)
    if kind:
        given = {ours: rope.get(key) for ours, key in rope_names(kind).items()}
        values["rope_scaling"] = scaling = kind(**{ours: each for ours, each in given.items() if each is not None})
        whole &= scaling.is_sound
    if not whole or not kind and rope["rope_type"] != "default":
        raise UsageError(f"{what} has rope_parameters {rope}, which this decoder does not have")
    values |= {ours: getattr(theirs, key) for ours, key in EXPERT_NAMES.get(theirs.model_type, {}).items()}
    values["gate"] = "sigmoid" if theirs.model_type in SIGMOID else "softmax"
    if theirs.model_type == "deepseek_v3":
        values |= {"latent": _latent(theirs, what), "head_dim": None}
        if theirs.first_k_dense_replace >= theirs.num_hidden_layers:  # then its experts have no layer
            values = {name: value for name, value in values.items() if name not in EXPERT_NAMES["deepseek_v3"]}
            values["gate"] = "softmax"
    return ModelConfig(rope_theta=rope["rope_theta"], **values)


def rope_names(kind: type) -> dict[str, str]:
    """What the fields of a kind of RoPE scaling are called in transformers' rope_parameters."""
    theirs = {"original_max_positions": "original_max_position_embeddings"}
    return {field.name: theirs.get(field.name, field.name) for field in fields(kind)}


def _latent(theirs, what: str) -> LatentShape:
    """The widths of latent attention in a configuration of transformers. Raises UsageError for what ours is not."""
    if not theirs.rope_interleave:
        raise UsageError(f"{what} has rope_interleave false, where our latent attention turns neighbors")
    return LatentShape(**{ours: getattr(theirs, name) or 0 for ours, name in LATENT_NAMES.items()})


def weights_folder(name_or_path: str) -> Path:
    """The folder with the weights that --init-from names, which are downloaded if they are on the Hub."""
    from huggingface_hub import snapshot_download

    if os.path.isdir(name_or_path):
        return Path(name_or_path)
    with hub_errors_in_one_line(f"--init-from {name_or_path}"):
        return Path(snapshot_download(name_or_path, allow_patterns=["config.json", "model*.safetensors*"]))


@contextmanager
def hub_errors_in_one_line(what: str) -> Iterator[None]:
    """Turn what Hugging Face's libraries raise in here into a UsageError of one line: "`what` cannot be read (...)".

    Or, if it is their cache that cannot be used (in a home that is read-only, say), a line that says so.
    """
    from huggingface_hub.constants import HF_HOME
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # otherwise the Hub's client logs every retry
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # no network, no such name, a damaged file: each library has types of its own
        file = str(isinstance(error, OSError) and error.filename or "")
        if file and (Path(HF_HOME).is_relative_to(file) or Path(file).is_relative_to(HF_HOME)):
            line = f"{what} needs the cache of Hugging Face's libraries in {HF_HOME} ({first_line(error)})"
            raise UsageError(f"{line}; HF_HOME names another folder") from error
        raise UsageError(f"{what} cannot be read ({first_line(error)})") from error
