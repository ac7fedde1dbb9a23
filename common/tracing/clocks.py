"""The tracer's clocks: where a point in time comes from, and when a collective has completed.

A mark is what a clock notes on the way; `resolve` turns it into wall-clock time after the run. Ranks on one
machine agree on it closely, nodes as well as their system clocks do.
"""

import time

import torch

from common.process_groups import Mesh


class CpuClock:
    """Marks are `time.perf_counter_ns()`, which all processes of a machine share."""

    name = "cpu"
    mark = staticmethod(time.perf_counter_ns)

    def __init__(self):
        readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(20)]
        before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])  # the least disturbed
        self._offset = wall - (before + after) // 2

    def anchor(self) -> None:
        """Called at the start of a traced step; what it returns goes into `resolve`."""

    def settle(self) -> None:
        """Called once before the first `resolve`."""

    def resolve(self, mark: int, anchor: None) -> int:
        """Nanoseconds since the epoch."""
        return mark + self._offset

    def watch(self, handle, calls: list, done_at: float) -> None:
        """Set the calls' completion when the handle's future comes, and no earlier than `done_at`.

        `done_at` is when the simulated link is through, in seconds of `time.perf_counter`.
        """
        if calls[0].op in ("send", "receive"):
            return  # gloo's messages have no future: Work.wait sets the completion

        def done(_) -> None:  # on gloo's thread, before its wait returns
            now = max(time.perf_counter_ns(), int(done_at * 1e9))
            for call in calls:
                call.completion = now

        handle.get_future().add_done_callback(done)

    def push(self, name: str) -> None:
        """A range for an outer profiler begins."""

    def pop(self) -> None:
        """It ends."""


class CudaClock:
    """Marks are CUDA events, recorded on the current stream and read when the run is over."""

    name = "cuda"

    def __init__(self, mesh: Mesh, cuda=torch.cuda):
        self._backend, self._cuda = mesh.world.backend, cuda
        self._streams = {}  # by group: a side stream that does nothing but wait for the group's collectives
        self.push, self.pop = cuda.nvtx.range_push, cuda.nvtx.range_pop

    def mark(self):
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def anchor(self) -> tuple:
        """An event and the wall time at which it took place: the step starts with an idle GPU."""
        self._cuda.synchronize()
        readings = []
        for _ in range(5):
            before, event = time.time_ns(), self.mark()
            event.synchronize()
            after = time.time_ns()
            readings.append((after - before, event, (before + after) // 2))
        return min(readings, key=lambda reading: reading[0])[1:]

    def settle(self) -> None:
        self._cuda.synchronize()  # every event has taken place

    def resolve(self, mark, anchor: tuple) -> int:
        event, wall = anchor
        return wall + round(event.elapsed_time(mark) * 1e6)  # elapsed_time is in milliseconds

    def watch(self, handle, calls: list, done_at: float) -> None:
        """Let a side stream wait for the collective, and record there when that is over.

        The first wait on a handle makes torch let go of the tensors in flight; `collectives.Work` holds them.
        """
        if self._backend != "nccl":
            return  # gloo, staged through the CPU: the wait blocks the host and sets the completion
        group = calls[0].group
        if group not in self._streams:
            self._streams[group] = self._cuda.Stream()
        with self._cuda.stream(self._streams[group]):
            handle.wait()
            completion = self.mark()
        for call in calls:
            call.completion = completion
