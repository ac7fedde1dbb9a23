"""What surrounds the steps of a training run: it resumes, records, traces and saves."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from common.config import TrainConfig
from common.data.batches import Batches
from common.process_groups import Mesh
from common.record.run_record import RunRecord
from common.tracing.tracer import Tracer
from step01_single_gpu.mixed_precision import Optimizer
from step01_single_gpu.save_resume import Checkpoints
from step01_single_gpu.slow_device import SlowDevice


class Run:
    """One run. All ranks take its steps together.

        with Run(config, mesh, batches, optimizer) as run:
            for step in run.steps():
                run.log(train_step(step, ..., run.tracer))

    Raises UsageError as `Checkpoints.resume` and `RunRecord` do.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, batches: Batches, optimizer: Optimizer):
        self.config, self.optimizer = config, optimizer
        self.checkpoints = Checkpoints(config, mesh, batches, optimizer)
        self.first_step = self.checkpoints.resume()
        self.record = RunRecord(config, mesh, batches, self.first_step)
        self.tracer = Tracer(config.trace_range, mesh, config.run_dir, config.profile, config.memory_snapshot)
        self.device = SlowDevice(1e9 * config.compute) if config.compute else nullcontext()
        self._steps = self._each_step()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, error, *_) -> None:
        self._steps.close()  # ends the contexts of a step that an error has left
        if error is None:  # after an error, other ranks may be gone
            self.checkpoints.close()
            self.tracer.close()
            self.record.close()

    def steps(self) -> Iterator[int]:
        """The steps that are left to take. Each is timed and traced while the loop's body runs, and may be saved."""
        return self._steps

    def _each_step(self) -> Iterator[int]:
        for step in range(self.first_step, self.config.steps):
            with self.record.step(step) as self.measured, self.tracer.step(step), self.device:
                self.measured["lr"] = self.config.learning_rate(step)
                yield step
            self.checkpoints.save(step + 1)

    def log(self, numbers: dict[str, torch.Tensor]) -> None:
        """Put a step's numbers into the record: loss, grad_norm and whatever else there is, as 0-d float64 tensors.

        Reading them waits for the device. Otherwise the host waits nowhere in a step but in layers with experts.
        """
        values = dict(zip(numbers, torch.stack(list(numbers.values())).tolist()))
        if self.optimizer.scaler.accept(values["grad_norm"]):  # float16 may have skipped this step
            self.optimizer.updates += 1
        self.measured |= values
