"""What must be equal on all ranks when a run starts: nodes may have got other flags, files or versions.

Ranks that differ would wait for each other for ever, or crash on messages of another size, or train on in silence, each
its own way. So they are compared before they form groups. Texts are compared where they are read
(`step01_single_gpu.data.batches`), and so are checkpoints (`common.checkpoints.checkpoint`).
"""

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

from common.config import ROLES, TrainConfig, flag_names, spelled
from common.errors import UsageError
from common.launching.all_ranks import on_all_ranks
from common.launching.command_line import STEP_NAMES
from common.presets import weights_folder
from common.process_groups import Mesh

# A rank may have its own: where it writes, what it records, which hardware it has or simulates
OWN = ("run_dir", "device", "timeout", "profile", "memory_snapshot", "measure_memory", "peak_tflops")
OWN += ("link", "compute", "layer_delay")
PATHS = ("model", "data", "tokenizer", "init_from", "schedule_file")  # what is found there counts, not where it is
PIECES, PIECE = 64, 4096  # of a file of weights that are looked at, and their bytes


def agree(mesh: Mesh, function: Callable[[], dict]) -> None:
    """Call `function` on every rank for facts, by name, that must be equal on all of them.

    All ranks come here together. If facts differ, all raise the same UsageError, which says which, and on which ranks.
    Errors of `function` as in `on_all_ranks`.
    """
    everywhere = on_all_ranks(mesh, function)
    names = dict.fromkeys(name for facts in everywhere for name in facts)
    values = {name: [facts.get(name) for facts in everywhere] for name in names}
    lines = [f"{name} is {_by_rank(each)}" for name, each in values.items() if any(value != each[0] for value in each)]
    if lines:
        raise UsageError(f"all ranks must agree, but {'; '.join(lines)}")


def _by_rank(values: list) -> str:
    """`0.1 on ranks 0 to 2, 0.2 on rank 3`, from a value of each rank; the first three values are enough."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("none" if value is None else str(value), []).append(rank)
    parts = [f"{value} on {_listed(where)}" for value, where in itertools.islice(ranks.items(), 3)]
    return ", ".join(parts) + ", and so on" * (len(ranks) > 3)


def _listed(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0 to 3, 8 to 11`; the first four stretches are enough."""
    stretches = [[pair[1] for pair in each] for _, each in itertools.groupby(enumerate(ranks), lambda p: p[1] - p[0])]
    parts = [f"{each[0]} to {each[-1]}" if len(each) > 1 else str(each[0]) for each in stretches[:4]]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}{' ...' * (len(stretches) > 4)}"


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
    ours = [name for name in sys.modules if name.partition(".")[0] in ("__main__", "common", *STEP_NAMES)]
    files = [getattr(sys.modules[name], "__file__", None) for name in sorted(ours)]
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
