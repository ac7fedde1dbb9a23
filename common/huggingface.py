"""Weights from and for Hugging Face: a rank reads only what it holds; `transformers` opens what is exported.

A checkpoint folder is Hugging Face's: `config.json`, and `model.safetensors` or several files that
`model.safetensors.index.json` lists. Only dense Llama-style models are read and written so far.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from common.errors import UsageError
from common.model import Decoder
from common.model_config import ModelConfig
from common.parameter import ParameterSpec
from common.presets import from_huggingface, quiet_hub

# What a part of the model is called here, and there. All other parts have the same name in both.
NAMES = {
    "embedding": "embed_tokens",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "head": "lm_head",
}
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # of one exported file
BYTE_VOCAB = 259  # ids of the byte tokenizer: pad, eos, unk and 256 bytes


def huggingface_name(name: str) -> str:
    """`layers.0.attention.q_proj.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    there = ".".join(NAMES.get(part, part) for part in name.split("."))
    return there if there.startswith("lm_head.") else "model." + there


def whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the whole model. A tied head has none of its own."""
    if config.experts:
        raise UsageError("models with experts cannot be read from or written for Hugging Face yet")
    return {p.spec.name: p.spec.global_shape for p in Decoder(config).parameters()}


def stored_values(name_or_path: str, config: ModelConfig):
    """Fills tensors that have specs from the weights in a folder or on the Hub; see `load_weights`."""
    return lambda tensors: load_weights(Decoder(config), name_or_path, list(tensors))


# ---- loading -----------------------------------------------------------------------------------------------


def load_weights(model: nn.Module, name_or_path: str, tensors: Iterable[torch.Tensor] | None = None) -> None:
    """Fill `model` (all layers of `model.config` or a range of them) in place from a folder or a Hub name.

    Of each parameter only `spec.box` is read from disk; rows that pad it become zero.

    Args:
        tensors: fill these instead of the parameters: parts of them, each with its spec.

    Raises UsageError when the checkpoint is not there, is of another model, or lacks a weight, has an unknown
    one or one of another shape.
    """
    folder = checkpoint_folder(name_or_path)
    _check_config(model.config, folder)
    shapes = whole_shapes(model.config)
    files = _files(folder)
    expected = {huggingface_name(name) for name in shapes}
    ignored = {"lm_head.weight"} if model.config.tie_embeddings else set()  # some files hold the tied head twice
    for there in sorted(expected - files.keys()):
        raise UsageError(f"--init-from {folder} lacks the weight {there}")
    for there in sorted(files.keys() - expected - ignored):
        if not there.endswith("rotary_emb.inv_freq"):  # old files hold RoPE's frequencies, which are no parameters
            raise UsageError(f"--init-from {folder} has a weight that this model lacks: {there}")

    for tensor in model.parameters() if tensors is None else tensors:
        there = huggingface_name(tensor.spec.name)
        for box, part in tensor.spec.boxes(tensor.detach()):
            part.copy_(_read(files[there], there, dataclasses.replace(tensor.spec, box=box, flat_range=None)))


def checkpoint_folder(name_or_path: str) -> Path:
    """The local folder of a checkpoint; one on the Hub is downloaded into Hugging Face's cache first.

    Raises UsageError when there is neither a folder nor a Hub checkpoint of that name.
    """
    if not name_or_path.strip():
        raise UsageError("--init-from is empty")
    if os.path.isdir(name_or_path):  # unlike Path.is_dir, False for whatever cannot be a path
        return Path(name_or_path)
    if name_or_path.count("/") != 1 or name_or_path[0] in "./~":
        raise UsageError(f"--init-from {name_or_path} is neither a folder nor a Hub name such as owner/model")
    import huggingface_hub

    quiet_hub()
    wanted = ["config.json", "model.safetensors", "model-*.safetensors", INDEX]
    try:
        return Path(huggingface_hub.snapshot_download(name_or_path, allow_patterns=wanted))
    except Exception as error:  # the client passes on the errors of several libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--init-from {name_or_path} could not be read from the Hub: {reason}") from None


def _check_config(config: ModelConfig, folder: Path) -> None:
    """Weights of the right shape can still be of another model: other heads, other RoPE, another epsilon."""
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--init-from {folder} has no readable config.json: {error}") from None
    theirs = from_huggingface(values, f"--init-from {folder}")
    for name in (field.name for field in dataclasses.fields(ModelConfig)):
        name = "head_width" if name == "head_dim" else name
        there, here = getattr(theirs, name), getattr(config, name)
        if there != here and name != "max_positions":  # a longer context changes no weight
            raise UsageError(f"--init-from {folder} is another model: its {name} is {there}, that of --model {here}")


def _files(folder: Path) -> dict[str, Path]:
    """The file that holds each weight, by Hugging Face's name."""
    from safetensors import SafetensorError, safe_open

    single, index = folder / "model.safetensors", folder / INDEX
    try:
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        if index.is_file():
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(f"--init-from {folder} is damaged: {error}") from None
    raise UsageError(f"--init-from {folder} holds neither model.safetensors nor {INDEX}")


def _read(path: Path, there: str, spec: ParameterSpec) -> torch.Tensor:
    """`spec.box` of the weight called `there`, in the file's type on the CPU; zero where it is padding."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            stored = file.get_slice(there)
            shape, kind = tuple(stored.get_shape()), stored.get_dtype()
            if shape != spec.global_shape:
                raise UsageError(f"--init-from {path}: {there} has shape {shape} instead of {spec.global_shape}")
            if kind not in ("F64", "F32", "F16", "BF16"):
                raise UsageError(f"--init-from {path}: {there} is quantised ({kind}), which cannot be read")
            box = inside(spec)
            if any(start == stop for start, stop in box):  # nothing but padding
                return torch.zeros([stop - start for start, stop in spec.box])
            values = stored[tuple(slice(*bounds) for bounds in box)]
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--init-from {path} is damaged at {there}: {error}") from None
    if box == spec.box:
        return values
    padded = values.new_zeros([stop - start for start, stop in spec.box])
    padded[tuple(slice(size) for size in values.shape)] = values
    return padded


# ---- export ------------------------------------------------------------------------------------------------


def inside(spec: ParameterSpec) -> tuple[tuple[int, int], ...]:
    """`spec.box` without what lies outside the whole tensor: the rows that pad the vocabulary."""
    sizes = zip(spec.box, spec.global_shape, strict=True)
    return tuple((min(start, size), min(stop, size)) for (start, stop), size in sizes)


def owned_boxes(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[ParameterSpec, tuple, torch.Tensor]]:
    """(spec, box within the whole tensor, its values) of everything that this rank owns, without padding."""
    for parameter in parameters:
        spec, box = parameter.spec, inside(parameter.spec)
        if spec.owner and all(start < stop for start, stop in box):
            yield spec, box, parameter.detach()[tuple(slice(stop - start) for start, stop in box)]


def whole_tensors(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, CPU tensor) of every parameter, for `export`, on the one rank that owns all of them.

    Raises UsageError where this rank holds only a part: gathering parts is what a checkpoint does.
    """
    for spec, box, values in owned_boxes(parameters):
        if box != tuple((0, size) for size in spec.global_shape):
            raise UsageError(f"cannot export {spec.name} from one rank of several: it holds only {box} of it")
        yield spec.name, values.cpu()


def export(
    tensors: dict[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    config: ModelConfig,
    folder: str | Path,
    tokenizer: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` opens. One process calls it.

    Args:
        tensors: every parameter of the whole model: name here -> whole CPU tensor, all of one type. An
            iterator is consumed a file at a time, so that the model need not fit into memory.
        folder: new or empty; nothing is left there when something is wrong.
        tokenizer: as --tokenizer: a Hugging Face name or path, None for bytes (saved as ByT5Tokenizer, which
            ends what it encodes with eos: leave that out of a prompt with `add_special_tokens=False`).
        shard_bytes: start another file before one grows beyond this.

    Raises:
        UsageError: a parameter is missing, unknown or of another shape, or the folder is not empty or cannot be made.
    """
    folder = Path(folder)
    if config.hidden % config.heads:
        raise UsageError(f"transformers cannot open a Llama whose heads ({config.heads}) do not divide {config.hidden}")
    try:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is not an empty folder; an export would mix two models")
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except (OSError, ValueError) as error:  # ValueError: "." has no name
        raise UsageError(f"{folder} cannot be made: {error}") from None
    try:
        pairs = tensors.items() if isinstance(tensors, dict) else tensors
        dtype = _write_weights(pairs, whole_shapes(config), partial, shard_bytes)
        special = _write_tokenizer(tokenizer, config.vocab, partial)
        values = _config_json(config, dtype) | special
        (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        (partial / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
        partial.rename(folder)  # all or nothing
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_weights(pairs, shapes: dict[str, tuple[int, ...]], folder: Path, shard_bytes: int) -> torch.dtype:
    """Weight files, and the index if there are several. Returns the weights' type."""
    from safetensors.torch import save_file

    waiting, dtypes, sizes, shards = {}, set(), {}, []

    def flush() -> None:
        save_file(waiting, folder / f"{len(shards)}", metadata={"format": "pt"})
        shards.append(list(waiting))
        waiting.clear()

    for name, tensor in pairs:
        if name not in shapes or huggingface_name(name) in sizes:
            raise UsageError(f"cannot export {name}: the model has no such parameter, or it came twice")
        if tuple(tensor.shape) != shapes[name]:
            raise UsageError(f"cannot export {name}: its shape is {tuple(tensor.shape)} instead of {shapes[name]}")
        dtypes.add(tensor.dtype)
        if waiting and sum(each.nbytes for each in waiting.values()) + tensor.nbytes > shard_bytes:
            flush()
        waiting[huggingface_name(name)] = tensor.contiguous()
        sizes[huggingface_name(name)] = tensor.nbytes
    for name in shapes:
        if huggingface_name(name) not in sizes:
            raise UsageError(f"cannot export: the parameter {name} is missing")
    if len(dtypes) > 1:
        raise UsageError(f"cannot export parameters of several types: {', '.join(sorted(map(str, dtypes)))}")
    flush()
    if len(shards) == 1:
        (folder / "0").rename(folder / "model.safetensors")
        return dtypes.pop()
    weight_map = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{index}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    listing = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(listing, indent=2) + "\n")
    return dtypes.pop()


def _write_tokenizer(name: str | None, vocab: int, folder: Path) -> dict[str, int | None]:
    """Save the tokenizer; the ids of its special tokens. A vocabulary too small for bytes goes without."""
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    if name is None and vocab < BYTE_VOCAB:
        return dict.fromkeys(ids)
    from transformers import AutoTokenizer, ByT5Tokenizer

    quiet_hub()
    try:
        loaded = ByT5Tokenizer() if name is None else AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--tokenizer {name} could not be read: {reason}") from None
    loaded.save_pretrained(folder)
    return {key: getattr(loaded, key) for key in ids}


def _config_json(config: ModelConfig, dtype: torch.dtype) -> dict:
    """The entries of `config.json`: RoPE and type in the older form, which transformers 4 and 5 both read."""
    scaling = config.rope_scaling and dataclasses.asdict(config.rope_scaling) | {"rope_type": "llama3"}
    if scaling:
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_positions")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.ffn,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
