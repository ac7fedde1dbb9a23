"""Make a folder that `transformers.AutoModelForCausalLM` opens of a training checkpoint, whatever layout wrote it.

python -m common.export RUN_DIR_OR_CHECKPOINT OUT
"""

import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import common.entry  # noqa: F401

# isort: split
import torch

from common.checkpoints import checkpoint, files
from common.checkpoints.boxes import SavedBox
from common.errors import UsageError, first_line
from common.launching.command_line import OneLineParser, one_line_errors, summary
from common.layers import at_least_float32
from common.model_config import LatentShape, ModelConfig
from common.parameter import ParameterSpec
from common.presets import (
    EXPERT_NAMES,
    HUGGINGFACE_NAMES,
    LATENT_NAMES,
    ROPE_SCALINGS,
    SIGMOID,
    hub_errors_in_one_line,
    rope_names,
)
from common.process_groups import Degrees, build_mesh
from common.rope_scaling import RopeScaling, YarnScaling
from common.weights.byte_tokenizer import byte_tokenizer
from common.weights.huggingface import as_stored, check_config, model_type


def export_checkpoint(source: str, out: str, tokenizer: str | None = None) -> Path:
    """Export the checkpoint `source`, or the newest of the run folder `source`, in the run's --dtype; return which.

    All that it needs is in the checkpoint, which may have been moved, except for the tokenizer: that of the run, or the
    one given. `out` gets its files last and at once. Raises UsageError, and leaves nothing in `out`, for a checkpoint
    that cannot be read or that transformers cannot express, and when there is something in `out` already.
    """
    [folder] = files.candidates(os.path.join(".", source), "")  # a folder called auto is a folder
    target = Path(out).absolute()
    if os.path.lexists(target) and not (target.is_dir() and not os.listdir(target)):
        raise UsageError(f"{out} is not an empty folder; an export would mix two models")
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an export that was killed
    try:
        _write(folder, unfinished, tokenizer)
        target.mkdir(exist_ok=True)
        for file in unfinished.iterdir():
            file.rename(target / file.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _write(folder: Path, out: Path, tokenizer: str | None) -> None:
    """Write the checkpoint in `folder` as a model of transformers to the new folder `out`."""
    from torch.distributed.checkpoint import FileSystemReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    quiet_transformers()
    config, dtype, extra = described(folder)
    rope, scaling = {"rope_type": "default"}, config.rope_scaling
    given, tokenizer = tokenizer, tokenizer or extra["tokenizer"]
    if scaling:
        [name] = (name for name, kind in ROPE_SCALINGS.items() if isinstance(scaling, kind))
        stored = {theirs: getattr(scaling, ours) for ours, theirs in rope_names(type(scaling)).items()}
        rope = {"rope_type": name} | stored
    weights, boxes = {}, []
    for name, stored in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        kind, name = name.split("/")
        if kind == "parameter":
            wide = name.endswith(".bias")  # a router's, which moves in small steps
            values = torch.empty(stored.size, dtype=at_least_float32(dtype) if wide else dtype)
            spec = ParameterSpec(name, tuple(stored.size), tuple((0, size) for size in stored.size), None)
            weights |= {each.name: each.tensor for each in as_stored(spec, values, config)}
            boxes += SavedBox.of(kind, spec, values)
    checkpoint.load(folder, boxes, build_mesh(Degrees(), torch.device("cpu")))
    kind, biases = model_type(config), [each.tensor for each in boxes if each.name.endswith(".bias")]
    if kind == "mixtral" and any(bias.any() for bias in biases):
        raise UsageError(f"{folder} was trained with --balance bias, which transformers' {kind} cannot express")

    with hub_errors_in_one_line(f"--tokenizer {tokenizer}"):
        loaded = AutoTokenizer.from_pretrained(tokenizer) if tokenizer else byte_tokenizer()
    end = extra.get("end", loaded.eos_token_id)  # older checkpoints do not say what ended a document
    same = end == loaded.eos_token_id  # not if tokens were synthetic: then there is no tokenizer
    if given and not same:
        raise UsageError(f"--tokenizer {given} ends a document with {loaded.eos_token_id}, and {folder} with {end}")
    options = {f"{each}_token_id": getattr(loaded, f"{each}_token_id") if same else None for each in ("bos", "pad")}
    options |= {"eos_token_id": end}
    names = HUGGINGFACE_NAMES | EXPERT_NAMES.get(kind, {})
    options |= {name: getattr(config, ours) for ours, name in names.items()} | {"head_dim": config.head_width}
    if kind in SIGMOID:
        options |= {"partial_rotary_factor": 1.0}
    # transformers leaves the blocks of multi-token prediction out, and so it opens what we export
    options |= {"num_nextn_predict_layers": config.mtp} if config.mtp or kind in SIGMOID else {}
    if config.latent:
        options |= {name: getattr(config.latent, ours) for ours, name in LATENT_NAMES.items()}
        options |= {"q_lora_rank": config.latent.q_rank or None, "head_dim": config.latent.rope_dim}
        if not config.experts:
            options |= {"first_k_dense_replace": config.layers, "num_experts_per_tok": 1, "n_routed_experts": 1}
    with torch.device("meta"):
        theirs = AutoConfig.for_model(kind, **options, rope_parameters=rope | {"rope_theta": config.rope_theta})
        model = AutoModelForCausalLM.from_config(theirs)
    # Without shared experts, their weights are empty tensors, which from_pretrained would report as missing
    empty = {name: each.shape for name, each in model.state_dict().items() if not each.numel()}
    weights |= {name: torch.empty(shape, dtype=dtype) for name, shape in empty.items()}
    theirs.save_pretrained(out)
    check_config("an export to", str(out), config)
    model.to(dtype).save_pretrained(out, state_dict=weights)
    if same and len(loaded) <= config.vocab:  # older checkpoints of synthetic tokens may have a smaller vocabulary
        loaded.save_pretrained(out)


def quiet_transformers() -> None:
    """Let transformers show its progress where somebody looks, and not in files, and be silent about empty tensors."""
    from transformers.utils import logging

    warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # shared experts of a model without them
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def described(folder: Path) -> tuple[ModelConfig, torch.dtype, dict]:
    """The model and the --dtype of the run that wrote the checkpoint `folder`, and all that EXTRA says."""
    try:
        extra = json.loads((folder / files.EXTRA).read_text(encoding="utf-8"))
        shape = dict(extra["model"])
        if scaling := shape["rope_scaling"]:
            shape["rope_scaling"] = (YarnScaling if "beta_fast" in scaling else RopeScaling)(**scaling)
        if latent := shape.get("latent"):  # older checkpoints do not know it
            shape["latent"] = LatentShape(**latent)
        return ModelConfig(**shape), getattr(torch, extra["dtype"]), extra | {"tokenizer": extra["tokenizer"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder}/{files.EXTRA} does not describe a model ({error!r})") from None


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Export what the command line names."""
    parser = OneLineParser(prog="python -m common.export", description=summary(__doc__))
    parser.add_argument("source", help="run folder (its newest checkpoint) or checkpoint")
    parser.add_argument("out", help="folder to make")
    parser.add_argument("--tokenizer", help="Hugging Face name or path (default: the run's)")
    arguments = parser.parse_args(argv)
    if sys.flags.optimize > 1:
        raise UsageError("transformers needs docstrings to save a model, and python -OO removes them")
    try:
        print(f"{export_checkpoint(arguments.source, arguments.out, arguments.tokenizer)} -> {arguments.out}")
    except (UsageError, OSError, ValueError) as error:
        raise UsageError(first_line(error).removeprefix("--resume ")) from error


if __name__ == "__main__":
    raise SystemExit(main())
