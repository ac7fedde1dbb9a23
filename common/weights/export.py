"""Make a folder that `transformers.AutoModelForCausalLM` opens of a training checkpoint, whatever layout wrote it.

python -m common.export RUN_DIR_OR_CHECKPOINT OUT
"""

import json
import os
import sys

import torch

from common.checkpoints import checkpoint, files
from common.checkpoints.boxes import SavedBox
from common.command_line import OneLineParser
from common.errors import UsageError, first_line
from common.model import Decoder
from common.model_config import ModelConfig, RopeScaling
from common.presets import HUGGINGFACE_NAMES, ROPE_SCALING_NAMES, hub_errors_in_one_line
from common.process_groups import Degrees, build_mesh
from common.weights.huggingface import huggingface_name


def export_checkpoint(source: str, out: str) -> str:
    """Export the checkpoint `source`, or the newest of the run folder `source`, in the run's --dtype; return which."""
    from transformers import AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    [folder] = files.candidates(os.path.join(".", source), "")  # a folder called auto is a folder
    run = json.loads((folder.parent.parent / "config.json").read_text())
    rope, scaling = {"rope_type": "default"}, run["model_config"]["rope_scaling"]
    if scaling:
        rope = {"rope_type": "llama3", **dict(zip(ROPE_SCALING_NAMES, scaling.values(), strict=True))}
        run["model_config"]["rope_scaling"] = RopeScaling(**scaling)
    config = ModelConfig(**run["model_config"])
    weights, boxes = {}, []
    for parameter in Decoder(config).parameters():
        values = torch.empty(parameter.shape, dtype=getattr(torch, run["dtype"]))
        weights[huggingface_name(parameter.spec.name)] = values
        boxes += SavedBox.of("parameter", parameter.spec, values)
    checkpoint.load(folder, boxes, build_mesh(Degrees(), torch.device("cpu")))

    with hub_errors_in_one_line(f"--tokenizer {run['tokenizer']}"):
        tokenizer = AutoTokenizer.from_pretrained(run["tokenizer"]) if run["tokenizer"] else ByT5Tokenizer()
    options = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    options |= {name: getattr(config, ours) for ours, name in HUGGINGFACE_NAMES.items()}
    os.makedirs(out, exist_ok=True)
    if os.listdir(out):
        raise UsageError(f"{out} is not empty; an export would mix two models")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**options, rope_parameters=rope | {"rope_theta": config.rope_theta}))
    model.to(values.dtype).save_pretrained(out, state_dict=weights)
    if len(tokenizer) <= config.vocab:  # a run on synthetic tokens may have a smaller vocabulary
        tokenizer.save_pretrained(out)
    return str(folder)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 2, after one line on stderr, for what cannot be exported."""
    parser = OneLineParser(prog="python -m common.export", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="run folder (its newest checkpoint) or checkpoint")
    parser.add_argument("out", help="folder to make")
    arguments = parser.parse_or_exit(argv)
    try:
        print(f"{export_checkpoint(arguments.source, arguments.out)} -> {arguments.out}")
    except (UsageError, OSError, ValueError) as error:
        print(f"error: {first_line(error).removeprefix('--resume ')}", file=sys.stderr)
        return 2
    return 0
