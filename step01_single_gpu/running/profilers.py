"""PyTorch's own profilers over the traced steps: torch.profiler, and the history of the CUDA allocator."""

import contextlib
from pathlib import Path

import torch

from common.config import TrainConfig


class Profilers:
    """Runs what `--profile` and `--memory-snapshot` ask for, during the steps of `--trace`.

    RUN_DIR/profile/rank-N.json receives Kineto's trace, RUN_DIR/memory-rank-N.pickle the history of the allocator for
    pytorch.org/memory_viz. torch.profiler warms up during the step before, if the run has one.
    """

    def __init__(self, config: TrainConfig, rank: int):
        (self._first, self._last), self._rank = config.trace_range or (0, -1), rank
        self._run_dir = Path(config.run_dir or ".")
        self._profile, self._memory_snapshot = config.profile, config.memory_snapshot  # what is still to be started
        self._running = contextlib.ExitStack()
        self.profiler = None  # torch.profiler.profile while it runs

    @contextlib.contextmanager
    def step(self, number: int):
        """Context manager around optimizer step `number`: starts what begins with it, and stops what ends."""
        self._begin(number)
        yield
        if self.profiler:
            self.profiler.step()
        if number == self._last:
            self.close()

    def _begin(self, number: int) -> None:
        if self._profile and self._first - 1 <= number <= self._last:
            active = self._last - max(self._first, number) + 1
            schedule = torch.profiler.schedule(wait=0, warmup=int(number < self._first), active=active, repeat=1)
            path = self._run_dir / "profile" / f"rank-{self._rank}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            # No stacks and no memory: a step of a real model would be a file of 100 MB, and slower than the others
            self.profiler = torch.profiler.profile(
                schedule=schedule,
                record_shapes=True,
                on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            )
            self._running.enter_context(self.profiler)
            self._profile = False
        if self._memory_snapshot and self._first <= number <= self._last:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
            self._running.callback(self._write_snapshot)
            self._memory_snapshot = False

    def _write_snapshot(self) -> None:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self._run_dir / f"memory-rank-{self._rank}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)

    def close(self) -> None:
        """Stop what still runs and write its file. Called again when the run ends, perhaps before the last step."""
        self._running.close()
        self.profiler = None
