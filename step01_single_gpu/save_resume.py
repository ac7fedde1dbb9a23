"""What a run's checkpoints hold, when they are written, and what must agree for a run to go on from one."""

import dataclasses

from common.checkpoints import checkpoint
from common.checkpoints import files as checkpoint_files
from common.config import TrainConfig
from common.data.batches import Batches
from common.errors import UsageError
from common.process_groups import Mesh
from step01_single_gpu.mixed_precision import LossScaler, Optimizer


class Checkpoints:
    """The checkpoints of one run: `resume` before the first step, `save` after each, `close` after the last."""

    def __init__(self, config: TrainConfig, mesh: Mesh, batches: Batches, optimizer: Optimizer, scaler: LossScaler):
        self.config, self.mesh, self.batches = config, mesh, batches
        self.optimizer, self.scaler = optimizer, scaler
        self.background = checkpoint.BackgroundSaves(mesh, config.timeout) if config.async_save else None

    def identity(self) -> dict:
        """The fields that make the curve what it is: model, data and update rule. Layout, steps, logging are free."""
        names = ("seq_len", "global_batch", "seed", "tokenizer")
        names += ("optimizer", "lr", "warmup", "weight_decay", "clip")
        model = {f"model.{name}": value for name, value in dataclasses.asdict(self.config.model_config).items()}
        return model | {name: getattr(self.config, name) for name in names} | {"corpus": self.batches.corpus.sha256}

    def save(self, step: int) -> None:
        """Write a checkpoint of the run after `step` steps, when --save-every asks for one."""
        config = self.config
        if config.save_every and (step % config.save_every == 0 or step == config.steps):
            extra = {"identity": self.identity(), "updates": self.optimizer.updates}
            extra |= {"loss_scale": self.scaler.scale if self.scaler.dynamic else None}  # float16 alone has one
            extra |= {"good_steps": self.scaler.good_steps}
            what = config.run_dir, step, self.optimizer.slices(), extra
            if self.background:
                self.background.save(*what, keep=config.keep)
            else:
                checkpoint.save(*what, self.mesh, keep=config.keep)

    def close(self) -> None:
        """Return when the last checkpoint is complete. Raises UsageError when it cannot be."""
        if self.background:
            self.background.wait()

    def resume(self) -> int:
        """Load the checkpoint that --resume names, if any. The step to go on with: data need nothing else.

        Raises UsageError when the checkpoint is not one, is damaged or belongs to another run, and when --run-dir
        holds checkpoints that this run would leave behind as its own. Rank 0 looks for all, so that ranks to which a
        shared storage shows something else agree.
        """
        config, mesh, first_step = self.config, self.mesh, 0
        found = config.resume and checkpoint.from_rank_0(
            mesh, lambda: checkpoint_files.candidates(config.resume, config.run_dir)
        )
        if found:
            folder, extra = checkpoint.load_intact(found, self.optimizer.slices(), mesh, self.identity())
            self.optimizer.loaded(extra["updates"])
            if self.scaler.dynamic and extra["loss_scale"] is not None:
                self.scaler.scale, self.scaler.good_steps = extra["loss_scale"], extra["good_steps"]
            first_step = extra["step"]
            if first_step > config.steps:
                raise UsageError(
                    f"--resume: {folder} is after step {first_step}, and --steps {config.steps} ends before"
                )
            if first_step == config.steps and mesh.rank == 0:
                print(f"{folder} is after the last of --steps {config.steps}: nothing is left to train")
        newest = config.run_dir and checkpoint.from_rank_0(mesh, lambda: checkpoint_files.newest(config.run_dir))
        if newest and checkpoint_files.step_of(newest) > first_step:
            raise UsageError(  # its steps would be written anew, but a later --resume auto would take that checkpoint
                f"--run-dir {config.run_dir} holds {newest.name} of an earlier run: add --resume auto to go on from "
                "there, or take another folder"
            )
        return first_step
