"""The tracer on a GPU: times from events on streams, and the table of kernels."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from common.collectives import all_reduce, exchange
from common.process_groups import GROUP_NAMES, Degrees, Group, Mesh
from common.tracing.chrome_trace import read_trace
from common.tracing.clocks import CudaClock
from common.tracing.report import TIMES, report
from common.tracing.tracer import Tracer
from step01_single_gpu.recording.gpu_kernels import classify_kernels


class FakeCuda:
    """Streams as clocks, in milliseconds: all work is queued at once and runs in the order of its stream."""

    def __init__(self):
        self.main = self.current = SimpleNamespace(time=0.0)
        self.streams = [self.main, SimpleNamespace(time=0.0)]  # the second one is NCCL's

    def Event(self, enable_timing):
        event = SimpleNamespace(synchronize=lambda: None)
        event.record = lambda: setattr(event, "time", self.current.time)
        event.elapsed_time = lambda later: later.time - event.time
        return event

    def Stream(self):
        self.streams.append(SimpleNamespace(time=0.0))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self):
        for stream in self.streams:
            stream.time = max(each.time for each in self.streams)

    def collective(self, milliseconds):
        """Starts when the current stream comes to it, as on NCCL; `wait` blocks the then current stream."""
        self.streams[1].time = end = max(self.streams[1].time, self.current.time) + milliseconds
        return SimpleNamespace(wait=lambda: setattr(self.current, "time", max(self.current.time, end)))


def test_cuda_events_on_their_streams(tmp_path, monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr("common.tracing.clocks.time", SimpleNamespace(time_ns=lambda: round(cuda.main.time * 1e6)))
    groups = {name: Group(name, (0,), 0, None, "nccl") for name in GROUP_NAMES}
    groups["dp"] = Group("dp", (0, 1), 0, None, "nccl")
    mesh = Mesh(degrees=Degrees(), device=torch.device("cpu"), **groups)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, *_, **__: cuda.collective(8))
    monkeypatch.setattr("torch.distributed.batch_isend_irecv", lambda messages: [cuda.collective(6)])
    monkeypatch.setattr("torch.distributed.P2POp", lambda *message: message)
    monkeypatch.setattr("common.gloo.serves", lambda *_: False)
    tracer = Tracer((1, 3), mesh, tmp_path, clock=CudaClock(mesh, cuda))
    for step in range(4):
        with tracer.step(step):
            with tracer.phase("backward"):
                cuda.main.time += 10
                work = all_reduce(torch.ones(4), mesh.dp, async_op=True)
                cuda.main.time += 5
                work.wait()
            if step == 1:
                carried = all_reduce(torch.ones(4), mesh.dp, async_op=True)
                cuda.main.time += 1
            elif step == 2:
                with tracer.phase("optimizer"):
                    carried.wait()
                    cuda.main.time += 2
            elif step == 3:
                with tracer.phase("forward"):
                    work = exchange([(torch.ones(4), 1)], [(torch.ones(4), 1)], mesh.dp, async_op=True)
                    cuda.main.time += 10
                work.wait()  # the batch took 6 ms
    assert len(cuda.streams) == 3, "one side stream per group, and none outside the traced steps"
    first, second, third = report(read_trace(tracer.close().parent))
    # 5 ms of kernels cover the all-reduce of 8 ms; of the second one, 1 ms is in the step, outside its phases
    assert [1e3 * getattr(first, name) for name in TIMES] == pytest.approx([19, 15, 3, 0, 1, 9, 5], abs=1e-3)
    found = [1e3 * second.step_time_s, 1e3 * second.exposed_s, first.collectives, second.collectives]
    assert found == pytest.approx([20, 3, 2, 1], abs=1e-3)
    assert [1e3 * getattr(third, name) for name in TIMES] == pytest.approx([28, 25, 3, 0, 0, 14, 11], abs=1e-3)


def test_kernels_of_a_kineto_trace():
    names = ("cat", "name", "ts", "dur", "args")
    rows = [
        ("cuda_runtime", "cudaLaunchKernel", 0, 2, {"correlation": 1}),
        ("cuda_driver", "cuLaunchKernelEx", 3, 1, {"correlation": 2}),
        ("cuda_runtime", "cudaLaunchKernel", 60, 2, {"correlation": 3}),
        ("cuda_runtime", "cudaMemcpyAsync", 70, 4, {"correlation": 4}),
        ("kernel", "ampere_sgemm_128x64_nn", 10, 20, {"correlation": 1}),  # 10-30
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 30, {"correlation": 2}),  # 20-50
        ("kernel", "vectorized_layer_norm_kernel", 65, 10, {"correlation": 3}),  # 65-75
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 80, 20, {"correlation": 4}),  # 80-100
    ]
    events = [{"ph": "X"} | dict(zip(names, row)) for row in rows]
    microseconds = {name: round(1e6 * seconds, 3) for name, seconds in classify_kernels(events).items()}
    parts = {"span": 90, "compute": 30, "exposed": 20, "copies": 20, "idle": 20}  # idle 50-65 and 75-80
    assert microseconds == parts | {"communication": 30, "overlapped": 10, "starved": 12}  # starved 50-62
    assert classify_kernels(events[:4]) == {}, "no GPU"
