"""Weights in Hugging Face's format (safetensors): what they are called there, and initial values read from them."""

import dataclasses
import os
from collections.abc import Callable, Iterable

import torch

from common.checkpoints import boxes
from common.checkpoints.boxes import SavedBox
from common.errors import UsageError
from common.model import Decoder
from common.model_config import ModelConfig
from common.parameter import ParameterSpec
from common.presets import hub_errors_in_one_line, resolve

# What a part of the model is called here, and there. All other parts have the same name in both.
NAMES = {"embedding": "embed_tokens", "attention_norm": "input_layernorm", "attention": "self_attn"}
NAMES |= {"mlp_norm": "post_attention_layernorm", "head": "lm_head"}
NAMES |= {"router": "gate", "bias": "e_score_correction_bias", "shared": "shared_experts"}
MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # others are quantised


def huggingface_name(name: str, mixtral: bool = False) -> str:
    """`layers.0.attention.q_proj.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    names = NAMES | MIXTRAL if mixtral else NAMES
    there = ".".join(names.get(part, part) for part in name.split("."))
    return there if there.startswith("lm_head.") else "model." + there


def model_type(config: ModelConfig) -> str:
    """The type of transformers' models that have such experts, or none."""
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


def stored_values(name_or_path: str, config: ModelConfig) -> Callable[[Iterable[torch.Tensor]], None]:
    """Return a function that fills tensors with the weights in a folder or on the Hub, converted to their types.

    It reads only the boxes that the tensors' specs describe. Rows that pad the vocabulary become zero. Raises
    UsageError when there is no checkpoint, when it is damaged or quantised or belongs to another model than `config`,
    and when it lacks a weight, has an unknown one or one of another shape.
    """
    from huggingface_hub import snapshot_download
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    folder = name_or_path
    with hub_errors_in_one_line(f"--init-from {name_or_path}"):
        if not os.path.isdir(folder):
            folder = snapshot_download(folder, allow_patterns=["config.json", "model*.safetensors"])
        reader = HuggingFaceStorageReader(folder)
        stored = reader.read_metadata().state_dict_metadata
        if not stored:
            raise FileNotFoundError("it holds no .safetensors files")
    check_config("--init-from", folder, config)
    _check_weights(folder, stored, config)

    def fill(tensors: Iterable[torch.Tensor]) -> None:
        wanted: list[SavedBox] = []
        for tensor in tensors:
            wanted += as_stored(tensor.spec, tensor.detach().zero_(), config)
        boxes.read(reader, wanted)

    return fill


def check_config(what: str, folder: str, config: ModelConfig) -> None:
    """Raise UsageError if `folder` is for another model. Another RoPE or number of heads may fit all shapes."""
    there, ignored = resolve(folder, what), {"head_dim", "max_positions"}  # a longer context changes no weight
    if config.experts and not config.dense_layers:
        ignored.add("ffn")
    for name in ("head_width", *(field.name for field in dataclasses.fields(config))):
        ours, theirs = getattr(config, name), getattr(there, name)
        if ours != theirs and name not in ignored:
            raise UsageError(f"{what} {folder} is another model: its {name} is {theirs}, that of --model {ours}")


def _check_weights(folder: str, stored: dict, config: ModelConfig) -> None:
    """Raise UsageError unless `stored` describes the whole model's weights; so all ranks refuse the same."""
    mixtral, ignored = model_type(config) == "mixtral", ("lm_head.weight",) * config.tie_embeddings  # some repeat it
    for layer in range(config.dense_layers, config.layers if config.experts else 0):
        ignored += (huggingface_name(f"layers.{layer}.mlp.", mixtral),)  # ranks hold, and look for, different experts
    shapes = {huggingface_name(p.spec.name, mixtral): tuple(p.shape) for p in Decoder(config).parameters()}
    for name in sorted(each for each in shapes.keys() | stored.keys() if not each.startswith(ignored)):
        expected, found = shapes.get(name), tuple(stored[name].size) if name in stored else None
        if expected != found and not name.endswith(".inv_freq"):  # old files hold RoPE's frequencies
            raise UsageError(f"--init-from {folder}: the shape of {name} is {found}, that of --model is {expected}")
        if expected and stored[name].properties.dtype not in DTYPES:
            raise UsageError(f"--init-from {folder}: {name} is quantised ({stored[name].properties.dtype})")
