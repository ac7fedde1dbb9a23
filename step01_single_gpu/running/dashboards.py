"""`--log-to`: the run record as curves in TensorBoard or Weights & Biases, packages that not everybody has.

Rank 0 hands over each line of `metrics.jsonl` when it is written; what has been recorded is there, too.
"""

import importlib.util
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from common.errors import UsageError, first_line


def check_installed(name: str) -> None:
    """Raises UsageError if the package of `--log-to NAME` is not installed."""
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"--log-to {name} needs a package that is not installed: pip install {name}")


def numbers_of(record: dict) -> dict[str, float]:
    """The numbers in the record of a step; those of a group by its name, such as `comm_bytes/dp_cp`."""
    flat = {}
    for name, value in record.items():
        flat |= {f"{name}/{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return {name: value for name, value in flat.items() if isinstance(value, int | float) and name != "step"}


def open_dashboard(name: str, folder: Path, facts: dict, kept: int) -> tuple[Callable[[dict], None], Callable]:
    """Return two functions, of which one takes the record of a step, and one ends the log, which is in the run folder.

    A log that is there already goes on if the run resumes, as its record does: the first `kept` steps stay.

    Raises UsageError, with one line, for whatever the package does not like.
    """
    try:
        return {"tensorboard": _tensorboard, "wandb": _wandb}[name](folder, facts, kept)
    except Exception as error:  # packages have errors of their own
        raise UsageError(f"--log-to {name}: {first_line(error)}") from error


def _tensorboard(folder: Path, facts: dict, kept: int) -> tuple[Callable[[dict], None], Callable]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=kept)  # hides what an earlier process did after that
    writer.add_text("config", "".join(f"    {key}: {value}\n" for key, value in sorted(facts.items())), kept)

    def write(record: dict) -> None:
        for name, value in numbers_of(record).items():
            writer.add_scalar(name, value, record["step"])
        writer.flush()  # it survives the end of the process, as in metrics.jsonl

    return write, writer.close


def _wandb(folder: Path, facts: dict, kept: int) -> tuple[Callable[[dict], None], Callable]:
    """Nothing leaves this machine unless WANDB_MODE says so: training needs no account, and waits for no network."""
    import wandb

    mode, file = os.environ.get("WANDB_MODE", "offline"), folder / "wandb-id.txt"
    if not (kept and file.exists()):  # another run
        file.write_text(f"{uuid.uuid4().hex[:8]}\n", encoding="utf-8")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "ultra-scale-steps"),
        name=folder.resolve().name,
        id=file.read_text(encoding="utf-8").strip(),
        resume="allow" if kept and mode == "online" else None,  # offline, it is `wandb sync` that joins the parts
        dir=str(folder),
        mode=mode,
        config=facts,
    )
    run.define_metric("*", step_metric="step")  # wandb's own count would refuse steps that are taken once more
    return lambda record: run.log({"step": record["step"]} | numbers_of(record)), run.finish
