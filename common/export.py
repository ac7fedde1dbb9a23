"""Make a Hugging Face model folder of a training checkpoint.

    python -m common.export RUN_DIR_OR_CHECKPOINT OUT

`transformers.AutoModelForCausalLM.from_pretrained(OUT)` then loads it. The checkpoint may come from any layout.
"""

import json
import os
import sys
from pathlib import Path

import torch

from common.checkpoints import checkpoint
from common.checkpoints import files as checkpoint_files
from common.checkpoints.boxes import SavedBox
from common.command_line import OneLineParser
from common.errors import UsageError
from common.huggingface import export
from common.model import Decoder
from common.model_config import ModelConfig, RopeScaling
from common.process_groups import Degrees, build_mesh


def export_checkpoint(source: str, out: str) -> Path:
    """Export the checkpoint `source` (or the newest of the run folder `source`) in the run's training type.

    Raises UsageError when there is none, when it is damaged, or when `out` exists already.
    """
    try:
        [folder] = checkpoint_files.candidates(os.path.join(".", source), None)  # a folder called auto is a folder
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--resume ")) from None
    try:
        run = json.loads((folder.parent.parent / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder.parent.parent}/config.json tells the model's shape and cannot be read: {error}"
        ) from None
    values = run["model_config"]
    values["rope_scaling"] = values["rope_scaling"] and RopeScaling(**values["rope_scaling"])
    config = ModelConfig(**values)
    tensors = {
        p.spec.name: (p.spec, torch.empty(p.spec.global_shape, dtype=getattr(torch, run["dtype"])))
        for p in Decoder(config).parameters()
    }
    slices = [part for spec, tensor in tensors.values() for part in SavedBox.of("parameter", spec, tensor)]
    checkpoint.load(folder, slices, build_mesh(Degrees(), torch.device("cpu")))
    export({name: tensor for name, (_, tensor) in tensors.items()}, config, out, tokenizer=run["tokenizer"])
    return folder


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 2, after one line, for what cannot be exported."""
    parser = OneLineParser(prog="python -m common.export", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="run folder (its newest checkpoint) or checkpoint")
    parser.add_argument("out", help="folder to make")
    arguments = parser.parse_or_exit(argv)
    try:
        folder = export_checkpoint(arguments.source, arguments.out)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder} -> {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
