"""When a run saves a checkpoint, what the checkpoint holds, and which checkpoint a run may resume from."""

import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch

from common.all_ranks import from_rank_0
from common.checkpoints import checkpoint, files
from common.checkpoints.boxes import SavedBox
from common.checkpoints.files import DamagedCheckpoint
from common.config import TrainConfig, flag_names
from common.data.batches import Batches
from common.errors import UsageError
from common.process_groups import Mesh, separate
from step01_single_gpu.mixed_precision import Optimizer


class Checkpoints:
    """The checkpoints of one run: `resume` before the first step, `save` after each, `close` after the last."""

    def __init__(self, config: TrainConfig, mesh: Mesh, batches: Batches, optimizer: Optimizer):
        self.config, self.mesh, self.batches = config, mesh, batches
        self.optimizer, self.scaler = optimizer, optimizer.scaler
        self.background = BackgroundSaves(mesh, config.timeout) if config.async_save else None

    def identity(self) -> dict:
        """What must be equal for the curve to go on: the model's shape, the data and the update rule.

        The data are equal if the text is, wherever it was read from. Layout, numbers of steps and logging are free.
        """
        shape = {f"model.{name}": value for name, value in asdict(self.config.model_config).items()}
        flags = {name: getattr(self.config, name) for name in flag_names("data", "update") if name != "data"}
        return shape | flags | {"corpus": self.batches.corpus.sha256}

    def save(self, step: int) -> None:
        """Save the run after `step` steps if --save-every asks for it, in the background with --async-save."""
        config = self.config
        if config.save_every and (step % config.save_every == 0 or step == config.steps):
            extra = {"identity": self.identity(), "updates": self.optimizer.updates}
            extra |= {"loss_scale": self.scaler.scale if self.scaler.dynamic else None}  # float16 alone has one
            extra |= {"good_steps": self.scaler.good_steps}
            arguments = config.run_dir, step, self.optimizer.slices(), extra
            if self.background:
                self.background.save(*arguments, keep=config.keep)
            else:
                checkpoint.save(*arguments, self.mesh, keep=config.keep)

    def close(self) -> None:
        """Return when the last checkpoint is complete. Raises UsageError when it cannot be written."""
        if self.background:
            self.background.wait()

    def resume(self) -> int:
        """Load the checkpoint that --resume names, if any, and return the step to continue with.

        Raises UsageError when there is no intact checkpoint, when it belongs to another run or to a step after the
        last, and when --run-dir holds a later one. Rank 0 looks for all ranks, since a shared storage may show them
        different things.
        """
        config, mesh, first_step = self.config, self.mesh, 0
        if config.resume:
            found = from_rank_0(mesh, lambda: files.candidates(config.resume, config.run_dir))
            if found:  # "auto" also starts a run
                folder, extra = load_intact(found, self.optimizer.slices(), mesh, self.identity())
                self.optimizer.loaded(extra["updates"])
                if self.scaler.dynamic and extra["loss_scale"] is not None:
                    self.scaler.scale, self.scaler.good_steps = extra["loss_scale"], extra["good_steps"]
                first_step = extra["step"]
        if first_step > config.steps:
            raise UsageError(f"--resume: {folder} is after step {first_step}, and --steps {config.steps} ends before")
        if first_step and first_step == config.steps and mesh.rank == 0:
            print(f"{folder} is after the last of --steps {config.steps}: nothing is left to train")
        later = config.run_dir and from_rank_0(mesh, lambda: files.complete(config.run_dir, after=first_step))
        if later:  # this run would write its steps once more, but a later --resume auto would take that checkpoint
            there = f"--run-dir {config.run_dir} holds {later[0].name} of an earlier run"
            raise UsageError(f"{there}: add --resume auto to go on from there, or take another folder")
        return first_step


class BackgroundSaves:
    """Saves copies while the training goes on, one checkpoint at a time.

    A save's collectives fall between those of the training, at other moments on every rank. So they have a process
    group of their own, on gloo since what they exchange is on the CPU.
    """

    def __init__(self, mesh: Mesh, timeout: float = 600.0):
        self.mesh = replace(mesh, world=separate(mesh.world, timeout))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future | None = None
        self.copies: list[torch.Tensor] = []  # kept from save to save, since new memory costs more time than the copy

    def save(self, run_dir: str | Path, step: int, held: Iterable[SavedBox], extra: dict, keep: int = 0) -> None:
        """Return when the tensors may change again: the previous save is complete, and this one has its copies.

        Arguments are those of `checkpoint.save`, whose errors the next `wait` raises.
        """
        self.wait()
        owned = [replace(each, tensor=each.tensor.detach()) for each in held if each.owner]
        if [copy.shape for copy in self.copies] != [box.tensor.shape for box in owned]:
            # A GPU writes to pinned memory without the host's help
            self.copies = [torch.empty_like(box.tensor, device="cpu", pin_memory=box.tensor.is_cuda) for box in owned]
        for copy, box in zip(self.copies, owned, strict=True):
            copy.copy_(box.tensor, non_blocking=True)
        if any(copy.is_pinned() for copy in self.copies):
            torch.cuda.current_stream().synchronize()
        owned = [replace(box, tensor=copy) for copy, box in zip(self.copies, owned, strict=True)]
        self.pending = self.thread.submit(checkpoint.save, run_dir, step, owned, extra, self.mesh, keep)

    def wait(self) -> None:
        """Return when the last checkpoint is complete. Raises what went wrong with it, the same on all ranks."""
        if self.pending is not None:
            self.pending.result()


def load_intact(folders: list[Path], held: Iterable[SavedBox], mesh: Mesh, identity: dict) -> tuple[Path, dict]:
    """`checkpoint.load` the first of `folders` that is not damaged, and return that folder and its `extra`.

    Rank 0 names and renames the damaged ones before it. Raises DamagedCheckpoint, and renames none, if all are damaged.
    """
    held, damaged = list(held), {}
    for folder in folders:
        try:
            extra = checkpoint.load(folder, held, mesh, identity)
            break
        except DamagedCheckpoint as error:
            damaged[folder] = error
    else:
        raise DamagedCheckpoint("; ".join(map(str, damaged.values())))

    def set_aside() -> None:
        for each, error in damaged.items():
            print(f"{error}; renamed to {files.set_aside(each).name}, going on from {folder.name}", file=sys.stderr)

    from_rank_0(mesh, set_aside)
    return folder, extra
