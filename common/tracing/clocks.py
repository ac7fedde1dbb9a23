"""The tracer's two clocks: how a point in time is noted during a run, and when a collective has completed.

A clock notes a *mark*, which is cheap, and turns it into wall-clock time after the run. Ranks of one machine then agree
closely; ranks of different machines agree as well as the system clocks of these machines do.
"""

import time
from functools import partial

import torch

from common.process_groups import Mesh


class CpuClock:
    """Marks are readings of `time.perf_counter_ns`, a monotonic clock that all processes of a machine share."""

    name = "cpu"
    mark = staticmethod(time.perf_counter_ns)

    def __init__(self):
        readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(20)]
        before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])  # the least disturbed one
        self._offset = wall - (before + after) // 2

    def begin_step(self) -> None:
        """Called at the start of each traced step."""

    def resolve(self, mark: int) -> int:
        """Return the mark's time in nanoseconds since the epoch."""
        return mark + self._offset

    def watch(self, handles: list, calls: list, done_at: float) -> None:
        """Let the futures of a collective or of its messages set the completion, or the simulated link if it is later.

        In another thread: where `Work.wait` has returned already, it has set the completion to that moment.
        """
        each = [[call] for call in sorted(calls, key=lambda call: call.op == "send")]  # launched in this order
        for handle, completed in zip(handles, each if len(handles) > 1 else [calls]):
            handle.get_future().add_done_callback(partial(_note_completion, completed, done_at))


def _note_completion(calls: list, done_at: float, _) -> None:
    for call in calls:
        call.completion = call.completion or max(time.perf_counter_ns(), int(done_at * 1e9))


class CudaClock:
    """Marks are CUDA events on the current stream: a span says what the GPU did, not when Python launched it.

    An event only knows the time to another event, in 32-bit milliseconds. So each step begins with an event whose
    wall-clock time is known, and a mark is a pair of an event and that of its step.
    """

    name = "cuda"

    def __init__(self, mesh: Mesh, cuda=torch.cuda):
        self._backend, self._cuda = mesh.world.backend, cuda
        self._streams = {}  # group -> a stream that only waits for the collectives of this group
        self._anchor = None  # (event, its wall-clock time in ns)

    def mark(self) -> tuple:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event, self._anchor

    def begin_step(self) -> None:
        self._cuda.synchronize()  # on an idle GPU an event takes place as soon as it is recorded
        before, (event, _) = time.time_ns(), self.mark()
        event.synchronize()
        self._anchor = event, (before + time.time_ns()) // 2

    def resolve(self, mark: tuple) -> int:
        event, (start, wall) = mark
        event.synchronize()
        return wall + round(start.elapsed_time(event) * 1e6)

    def watch(self, handles: list, calls: list, done_at: float) -> None:
        """Let a side stream wait for the collective or the batch of messages, and record its completion there.

        The first wait on a handle makes torch release the tensors in flight, but `collectives.Work` still holds them.
        """
        if self._backend != "nccl":
            return  # with gloo the host itself waits, and `Work.wait` sets the completion
        group = calls[0].group
        if group not in self._streams:
            self._streams[group] = self._cuda.Stream()
        with self._cuda.stream(self._streams[group]):
            for handle in handles:
                handle.wait()
            completion = self.mark()
        for call in calls:
            call.completion = completion
