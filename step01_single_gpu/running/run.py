"""What surrounds the steps of a training run: it resumes, records, traces and saves."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

from common.checkpoints import checkpoint, files
from common.config import TrainConfig, flag_names
from common.errors import Diverged, UsageError
from common.launching.all_ranks import from_rank_0
from common.process_groups import Mesh
from common.tracing.tracer import Tracer
from step01_single_gpu.data.batches import Batches
from step01_single_gpu.mixed_precision import Optimizer
from step01_single_gpu.running.background_saves import BackgroundSaves
from step01_single_gpu.running.profilers import Profilers
from step01_single_gpu.running.run_record import RunRecord
from step01_single_gpu.running.slow_device import SlowDevice


class Run:
    """One run. All ranks take its steps together.

        with Run(config, mesh, batches, optimizer) as run:
            for step in run.steps():
                run.log(train_step(step, ..., run.tracer))

    Raises UsageError as `resume`, `RunRecord` and `checkpoint.save` do, and Diverged as `check_finite` does.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, batches: Batches, optimizer: Optimizer):
        self.config, self.mesh, self.batches, self.optimizer = config, mesh, batches, optimizer
        self.updates = 0  # how many the optimizer has made, before this process as well
        self.first_step, recorded = self.resume()
        self.background = BackgroundSaves(mesh, config.timeout) if config.async_save else None
        self.record = RunRecord(config, mesh, batches, recorded)
        self.tracer = Tracer(config.trace_range, mesh, config.run_dir)
        self.profilers = Profilers(config, mesh.rank)
        self.device = SlowDevice(1e9 * config.compute) if config.compute else nullcontext()
        self._steps = self._each_step()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, error, *_) -> None:
        self._steps.close()  # ends the contexts of a step that an error has left
        if error in (None, Diverged):  # after another error, other ranks may be gone
            try:
                if self.background:
                    self.background.wait()
                self.profilers.close()
                self.tracer.close()
                self.record.close()
            except OSError as full:
                raise UsageError(f"--run-dir {self.config.run_dir} cannot be written: {full.strerror}") from None

    def steps(self) -> Iterator[int]:
        """The steps that are left to take. Each is timed and traced while the loop's body runs, and may be saved."""
        return self._steps

    def _each_step(self) -> Iterator[int]:
        for step in range(self.first_step, self.config.steps):
            recorded, profiled, traced = (each.step(step) for each in (self.record, self.profilers, self.tracer))
            with recorded as self.measured, profiled, traced, self.device:
                self.measured["lr"] = self.config.learning_rate(step)
                yield step
            self.check_finite(step)
            self.save(step + 1)

    def log(self, numbers: dict[str, torch.Tensor]) -> None:
        """Put a step's numbers into the record: loss, grad_norm and whatever else there is, as 0-d float64 tensors.

        Reading them waits for the device. Otherwise the host waits nowhere in a step but in layers with experts.
        """
        values = dict(zip(numbers, torch.stack(list(numbers.values())).tolist()))
        self.updates += self.optimizer.scaler.accept(values["grad_norm"])  # float16 may have skipped this step
        self.measured |= values

    def check_finite(self, step: int) -> None:
        """Raises Diverged, alike on all ranks, if the update of this step has made the weights useless.

        Such a step is recorded, but not saved: with --keep, it would replace a checkpoint that is intact. (float16 has
        skipped the update: its loss scale was too large.)
        """
        numbers = {name: self.measured[name] for name in ("loss", "grad_norm")}
        bad = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if bad and not self.optimizer.scaler.dynamic:
            raise Diverged(f"step {step}: {' and '.join(bad)}; the run ends here, and saves nothing of this step")

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Save the run after `step` steps if --save-every asks for it, in the background with --async-save."""
        config, scaler = self.config, self.optimizer.scaler
        if config.save_every and (step % config.save_every == 0 or step == config.steps):
            extra = {"identity": self.identity(), "model": asdict(config.model_config), "dtype": config.dtype}
            extra |= {"tokenizer": config.tokenizer, "end": self.batches.corpus.end}
            extra |= {"updates": self.updates}
            extra |= {"loss_scale": scaler.scale if scaler.dynamic else None}  # float16 alone has one
            extra |= {"good_steps": scaler.good_steps}
            arguments = config.run_dir, step, self.optimizer.slices(), extra
            if self.background:
                self.background.save(*arguments, keep=config.keep)
            else:
                checkpoint.save(*arguments, self.mesh, keep=config.keep)

    def identity(self) -> dict:
        """What must be equal for the curve to go on: the model's shape, the data and the update rule.

        The data are equal if the token ids are, wherever text and tokenizer were read from. Layout, numbers of steps
        and logging are free.
        """
        corpus, sources = self.batches.corpus, ("data", "tokenizer")
        made = f"--data {corpus.name} (text {corpus.sha256[:8]})"
        made += f", --tokenizer {self.config.tokenizer} (tokens {corpus.tokens_sha256[:8]})"
        shape = {f"model.{name}": value for name, value in asdict(self.config.model_config).items()}
        flags = {name: getattr(self.config, name) for name in flag_names("data", "update") if name not in sources}
        return shape | flags | {"data": {"sha256": corpus.tokens_sha256, "of": made}}

    def resume(self) -> tuple[int, int]:
        """Load the checkpoint that --resume names, if any. Return the step to continue with, and how many earlier steps
        --run-dir holds the record of: all of them if the checkpoint is in there too, else none.

        Raises UsageError when there is no intact checkpoint, when it belongs to another run or to a step after the
        last, and when --run-dir holds a later one. Rank 0 looks for all ranks, since a shared storage may show them
        different things.
        """
        config, mesh, first_step, recorded = self.config, self.mesh, 0, 0
        if config.resume:
            found = from_rank_0(mesh, lambda: files.candidates(config.resume, config.run_dir))
            if found:  # "auto" also starts a run
                folder, extra = checkpoint.load_intact(found, self.optimizer.slices(), mesh, self.identity())
                self.updates = extra["updates"]
                self.optimizer.loaded(self.updates)
                scaler = self.optimizer.scaler
                if scaler.dynamic and extra["loss_scale"] is not None:
                    scaler.scale, scaler.good_steps = extra["loss_scale"], extra["good_steps"]
                first_step = extra["step"]
                inside = config.run_dir and folder.resolve().is_relative_to(Path(config.run_dir).resolve())
                recorded = first_step if inside else 0
        if first_step > config.steps:
            raise UsageError(f"--resume: {folder} is after step {first_step}, and --steps {config.steps} ends before")
        if first_step and first_step == config.steps and mesh.rank == 0:
            print(f"{folder} is after the last of --steps {config.steps}: nothing is left to train")
        elif first_step and config.trace_range and first_step > config.trace_range[1] and mesh.rank == 0:
            print(f"--trace {config.trace} ends before step {first_step}, where this run goes on: nothing is traced")
        later = config.run_dir and from_rank_0(mesh, lambda: files.complete(config.run_dir, after=first_step))
        if later:  # this run would write its steps once more, but a later --resume auto would take that checkpoint
            there = f"--run-dir {config.run_dir} holds {later[0].name} of an earlier run"
            raise UsageError(f"{there}: add --resume auto to go on from there, or take another folder")
        return first_step, recorded
