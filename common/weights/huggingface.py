"""Weights in Hugging Face's format (safetensors): what they are called there, and in which boxes."""

import dataclasses
from collections.abc import Container

import torch

from common.checkpoints.boxes import SavedBox
from common.errors import UsageError
from common.model import Decoder
from common.model_config import ModelConfig
from common.parameter import ParameterSpec
from common.presets import resolve

# What a part of the model is called here, and there. All other parts have the same name in both.
NAMES = {"embedding": "embed_tokens", "attention_norm": "input_layernorm", "attention": "self_attn"}
NAMES |= {"mlp_norm": "post_attention_layernorm", "head": "lm_head"}
NAMES |= {"q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm", "kv_a_proj": "kv_a_proj_with_mqa"}
NAMES |= {"router": "gate", "bias": "e_score_correction_bias", "shared": "shared_experts"}
MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def huggingface_name(name: str, mixtral: bool = False) -> str:
    """`layers.0.attention.q_proj.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    names = NAMES | MIXTRAL if mixtral else NAMES
    there = ".".join(names.get(part, part) for part in name.split("."))
    return there if there.startswith("lm_head.") else "model." + there


def model_type(config: ModelConfig) -> str:
    """The type of transformers' models that have such attention and experts, or none."""
    if config.latent:
        if config.experts and config.gate != "sigmoid":
            raise UsageError("transformers' deepseek_v3 has no --gate softmax beside latent attention")
        return "deepseek_v3"
    return "llama" if not config.experts else "mixtral" if config.gate == "softmax" else "glm4_moe"


def as_stored(spec: ParameterSpec, tensor: torch.Tensor, config: ModelConfig) -> list[SavedBox]:
    """The boxes of `tensor`, which has this spec, as boxes of weights called as there. Each expert has its own."""
    mixtral = model_type(config) == "mixtral"
    name, parts = huggingface_name(spec.name, mixtral), spec.boxes(tensor)
    if ".experts." not in name:
        without = mixtral and name.endswith("bias")  # its routers have none
        return [SavedBox(name, spec.global_shape, box, part) for box, part in parts if not without]
    before, after = name.split(".experts.")
    return [
        SavedBox(f"{before}.experts.{each}.{after}.weight", spec.global_shape[1:], box, part[each - first])
        for ((first, last), *box), part in parts
        for each in range(first, last)
    ]


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a whole model, by its name there. Each expert has weights of its own."""

    def swiglu(name: str, ffn: int) -> dict[str, tuple[int, ...]]:
        shapes = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
        return {f"{name}.{projection}.weight": shape for projection, shape in shapes.items()}

    hidden, mixtral = config.hidden, model_type(config) == "mixtral"
    whole = Decoder(dataclasses.replace(config, layers=config.blocks))
    shapes = {parameter.spec.name: tuple(parameter.shape) for parameter in whole.parameters()}
    if config.mtp:
        last = f"layers.{config.layers}"
        shapes |= {f"{last}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes[f"{last}.eh_proj.weight"] = hidden, 2 * hidden
    for mlp in (f"layers.{layer}.mlp" for layer in config.expert_layers):
        for name in swiglu(mlp, config.ffn):
            del shapes[name]
        shapes[f"{mlp}.router.weight"] = config.experts, hidden
        if not mixtral:  # whose routers have none
            shapes[f"{mlp}.router.bias"] = (config.experts,)
        if config.shared_experts:
            shapes |= swiglu(f"{mlp}.shared", config.shared_experts * config.expert_ffn)
        for expert in range(config.experts):
            shapes |= swiglu(f"{mlp}.experts.{expert}", config.expert_ffn)
    return {huggingface_name(name, mixtral): shape for name, shape in shapes.items()}


def is_optional(name: str, stored: Container[str], config: ModelConfig) -> bool:
    """Whether a folder with the weights `stored` may have this one although `weight_shapes` does not ask for it: a tied
    head, RoPE's frequencies in old files, and of multi-token prediction all if it is not trained, and the tables that
    it shares.
    """
    behind, shared = f"model.layers.{config.layers}.", ("embed_tokens.weight", "shared_head.head.weight")
    of_prediction = name.startswith(behind) and f"{behind}eh_proj.weight" in stored
    of_prediction &= not config.mtp or name.removeprefix(behind) in shared
    return of_prediction or name.endswith(".inv_freq") or name == "lm_head.weight" and config.tie_embeddings


def check_config(what: str, folder: str, config: ModelConfig) -> None:
    """Raise UsageError if `folder` is for another model. Another RoPE or number of heads may fit all shapes."""
    # A longer context changes no weight, and of multi-token prediction the weights tell
    there, ignored = resolve(folder, what), {"head_dim", "max_positions", "mtp"}
    if config.experts and not config.dense_layers:
        ignored.add("ffn")
    for name in ("head_width", *(field.name for field in dataclasses.fields(config))):
        ours, theirs = getattr(config, name), getattr(there, name)
        if ours != theirs and name not in ignored:
            raise UsageError(f"{what} {folder} is another model: its {name} is {theirs}, that of --model {ours}")
