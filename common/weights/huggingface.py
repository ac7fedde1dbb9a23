"""Weights in Hugging Face's format (safetensors): what they are called there, and initial values read from them."""

import dataclasses
import os
from collections.abc import Callable, Iterable

import torch

from common.checkpoints import boxes
from common.errors import UsageError
from common.model import Decoder
from common.model_config import ModelConfig
from common.presets import hub_errors_in_one_line, resolve

# What a part of the model is called here, and there. All other parts have the same name in both.
NAMES = {"embedding": "embed_tokens", "attention_norm": "input_layernorm", "attention": "self_attn"}
NAMES |= {"mlp_norm": "post_attention_layernorm", "head": "lm_head"}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # others are quantised


def huggingface_name(name: str) -> str:
    """`layers.0.attention.q_proj.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    there = ".".join(NAMES.get(part, part) for part in name.split("."))
    return there if there.startswith("lm_head.") else "model." + there


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
    _check_config(folder, config)
    _check_weights(folder, stored, config)

    def fill(tensors: Iterable[torch.Tensor]) -> None:
        wanted = []
        for tensor in tensors:
            name, shape = huggingface_name(tensor.spec.name), tensor.spec.global_shape
            parts = tensor.spec.boxes(tensor.detach().zero_())
            wanted += [boxes.SavedBox(name, shape, box, part) for box, part in parts]
        boxes.read(reader, wanted)

    return fill


def _check_config(folder: str, config: ModelConfig) -> None:
    """Raise UsageError for another model. Another RoPE or number of heads may fit all shapes."""
    there = resolve(folder, "--init-from")
    for name in ("head_width", *(field.name for field in dataclasses.fields(config))):
        ours, theirs = getattr(config, name), getattr(there, name)
        if ours != theirs and name not in ("head_dim", "max_positions"):  # a longer context changes no weight
            raise UsageError(f"--init-from {folder} is another model: its {name} is {theirs}, that of --model {ours}")


def _check_weights(folder: str, stored: dict, config: ModelConfig) -> None:
    """Raise UsageError unless `stored` describes the weights of the whole model; so all ranks refuse the same."""
    shapes = {huggingface_name(p.spec.name): tuple(p.spec.global_shape) for p in Decoder(config).parameters()}
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()  # some files hold a tied head twice
    for name in sorted(shapes.keys() | stored.keys() - ignored):
        expected, found = shapes.get(name), tuple(stored[name].size) if name in stored else None
        if expected != found and not name.endswith(".inv_freq"):  # old files hold RoPE's frequencies
            raise UsageError(f"--init-from {folder}: the shape of {name} is {found}, that of --model is {expected}")
        if expected and stored[name].properties.dtype not in DTYPES:
            raise UsageError(f"--init-from {folder}: {name} is quantised ({stored[name].properties.dtype})")
