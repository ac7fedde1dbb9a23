"""What must be equal on all ranks when a run starts: nodes may have got other flags, files or versions.

Ranks that differ would wait for each other for ever, or crash on messages of another size, or train on in silence, each
its own way. So they are compared before they form groups. Texts are compared where they are read
(`step01_single_gpu.data.batches`), and so are checkpoints (`common.checkpoints.checkpoint`).
"""

import dataclasses
import hashlib
import sys
from importlib import metadata
from pathlib import Path

import torch

from common.config import ROLES, TrainConfig, flag_names, spelled
from common.errors import UsageError
from common.presets import weights_folder

# A rank may have its own: where it writes, what it records, which hardware it has or simulates
OWN = ("run_dir", "device", "timeout", "profile", "memory_snapshot", "measure_memory", "peak_tflops")
OWN += ("link", "compute", "layer_delay")
PATHS = ("model", "data", "tokenizer", "init_from", "schedule_file")  # what is found there counts, not where it is
PIECES, PIECE = 64, 4096  # of a file of weights that are looked at, and their bytes


def facts_of(config: TrainConfig) -> dict:
    """What the command line, files and versions of this rank say about the run; one-line values by their names.

    Raises UsageError if a file that a flag names cannot be read.
    """
    flags = flag_names(*ROLES)
    facts = {"the step": config.step_name}
    facts |= {spelled(name): getattr(config, name) for name in flags if name not in (*OWN, *PATHS)}
    for name, value in dataclasses.asdict(config.model_config).items():  # what has become of these flags and --model
        facts[spelled(name) if name in flags else f"the model's {name}"] = value
    facts["--run-dir"] = "given" if config.run_dir else None
    facts["the content of --schedule-file"] = config.schedule_file and _digest([Path(config.schedule_file)])
    facts["the content of --init-from"] = config.init_from and weights_digest(config.init_from)
    return facts | versions()


def versions() -> dict:
    """Of whatever decides what is computed: PyTorch, the compiler of kernels, and this project's loaded modules."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    ours = {name: module for name, module in sys.modules.items() if name.startswith(("common", "step0", "__main__"))}
    files = [getattr(ours[name], "__file__", None) for name in sorted(ours)]
    source = _digest([Path(file) for file in files if file])
    return {"torch": torch.__version__, "triton": triton, "this project's source": source}


def weights_digest(name_or_path: str) -> str:
    """A hash of the weights in a folder or on the Hub: of each file its size and PIECES pieces at equal distances.

    Reading all of a large model on every rank would take minutes. Training changes all weights of a model, so a few of
    them tell two models apart; what it does not notice is a file that was damaged in between.
    """
    files = sorted(weights_folder(name_or_path).glob("*.safetensors"))
    return _digest(files, PIECES)


def _digest(files: list[Path], pieces: int | None = None) -> str:
    """The beginning of the SHA-256 of files, or of so many pieces of each."""
    sha256 = hashlib.sha256()
    try:
        for path in files:
            size = path.stat().st_size
            sha256.update(f"{size} bytes ".encode())
            with path.open("rb") as file:
                for place in range(0, size, max(PIECE, size // pieces) if pieces else PIECE):
                    file.seek(place)
                    sha256.update(file.read(PIECE))
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from None
    return sha256.hexdigest()[:12]
