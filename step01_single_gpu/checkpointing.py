"""What a run's checkpoint holds, and what must agree for a run to go on from it."""

import dataclasses

from common import checkpoint
from common.config import TrainConfig, UsageError
from common.data import Batches
from common.process_groups import Mesh
from step01_single_gpu.mixed_precision import LossScaler, Optimizer


def identity(config: TrainConfig, batches: Batches) -> dict:
    """The fields that make the curve what it is: model, data and update rule. Layout, steps and logging are free."""
    names = ("seq_len", "global_batch", "seed", "tokenizer")
    names += ("optimizer", "lr", "warmup", "weight_decay", "clip")
    model = {f"model.{name}": value for name, value in dataclasses.asdict(config.model_config).items()}
    return model | {name: getattr(config, name) for name in names} | {"corpus": batches.corpus.sha256}


def save(
    config: TrainConfig, mesh: Mesh, batches: Batches, optimizer: Optimizer, scaler: LossScaler, step: int
) -> None:
    """Write a checkpoint of the run after `step` steps, when --save-every asks for one."""
    if config.save_every and (step % config.save_every == 0 or step == config.steps):
        extra = {"identity": identity(config, batches), "updates": optimizer.updates}
        extra |= {"loss_scale": scaler.scale, "good_steps": scaler.good_steps}
        checkpoint.save(config.run_dir, step, optimizer.slices(), extra, mesh)


def resume(config: TrainConfig, mesh: Mesh, batches: Batches, optimizer: Optimizer, scaler: LossScaler) -> int:
    """Load the checkpoint that --resume names, if any. The step to go on with: data need nothing else.

    Raises UsageError when the checkpoint is not one, is damaged or belongs to another run, and when --run-dir holds
    checkpoints that this run would leave behind as its own.
    """
    folder = checkpoint.resolve(config.resume, config.run_dir) if config.resume else None
    first_step = 0
    if folder is not None:
        extra = checkpoint.load(folder, optimizer.slices(), mesh, identity(config, batches))
        optimizer.loaded(extra["updates"])
        scaler.scale, scaler.good_steps = extra["loss_scale"], extra["good_steps"]
        first_step = extra["step"]
        if first_step > config.steps:
            raise UsageError(f"--resume: {folder} is after step {first_step}, and --steps {config.steps} ends before")
        if first_step == config.steps and mesh.rank == 0:
            print(f"{folder} is after the last of --steps {config.steps}: nothing is left to train")
    newest = checkpoint.newest(config.run_dir) if config.run_dir else None
    if newest is not None and int(newest.name.removeprefix("step-")) > first_step:
        raise UsageError(  # its steps would be written anew, but a later --resume auto would take the old checkpoint
            f"--run-dir {config.run_dir} holds {newest.name} of an earlier run: add --resume auto to go on from there, "
            "or take another folder"
        )
    return first_step
