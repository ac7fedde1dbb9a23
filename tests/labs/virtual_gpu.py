"""A GPU that does not exist: `torch.cuda`'s streams and events on a virtual clock, and a trace as Kineto writes it.

Operations compute on the CPU at once, so that numbers are right whatever waits for what. When each would have run is
worked out as on a GPU: in order on its stream, after the events that the stream waits for, and not before its launch.
"""

import contextlib
import itertools
import json
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COPY, PRODUCT, OTHER, LAUNCH = 100.0, 150.0, 10.0, 1.0  # microseconds


class VirtualGPU(TorchDispatchMode):
    """Also stands for the profiler: it notes what runs while it is entered."""

    def __init__(self, copy: float = COPY):
        super().__init__()
        self.now, self.events, self.copy, self.numbers = 0.0, [], copy, itertools.count(7)
        self.streams = [self.stream()]

    def stream(self, *_, **__) -> SimpleNamespace:
        made = SimpleNamespace(free=0.0, number=next(self.numbers))
        made.wait_event = lambda event: setattr(made, "free", max(made.free, event.at))
        made.wait_stream = lambda other: setattr(made, "free", max(made.free, other.free))
        made.record_event = lambda: self.event(made)
        made.synchronize = lambda: setattr(self, "now", max(self.now, made.free))
        return made

    def event(self, stream=None, **_) -> SimpleNamespace:
        made = SimpleNamespace(at=stream.free if stream else 0.0)
        made.record = lambda of=None: setattr(made, "at", (of or self.streams[-1]).free)
        made.synchronize = lambda: setattr(self, "now", max(self.now, made.at))
        made.wait = lambda of=None: (of or self.streams[-1]).wait_event(made)
        return made

    @contextlib.contextmanager
    def on(self, stream):
        self.streams.append(stream)
        yield
        self.streams.pop()

    def wait(self) -> None:
        self.now = max([self.now, *(event["ts"] + event["dur"] for event in self.events)])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in ("copy_", "_to_copy"):
            waits = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            self.run("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", self.copy, waits, bytes=args[0].nbytes)
        elif name == "mm":
            self.run("kernel", "gemm", PRODUCT)
        elif name == "relu":
            self.run("kernel", "elementwise", OTHER)
        return None if name == "record_stream" else function(*args, **kwargs)

    def run(self, category: str, name: str, lasts: float, waits: bool = False, **details) -> None:
        stream, self.now = self.streams[-1], self.now + LAUNCH
        start = max(stream.free, self.now)
        stream.free = start + lasts
        args = {"stream": stream.number} | details
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": lasts, "args": args})
        self.now = stream.free if waits else self.now

    def export_chrome_trace(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *self.events]}, file)

    def stand_in(self, monkeypatch) -> None:
        """Let `torch.cuda` and `torch.profiler.profile` be this."""
        for name, value in {
            "Stream": self.stream,
            "Event": self.event,
            "stream": self.on,
            "current_stream": lambda *_: self.streams[-1],
            "default_stream": lambda *_: self.streams[0],
            "synchronize": self.wait,
            "is_available": lambda: True,
            "get_device_name": lambda: "a virtual GPU",
            "reset_peak_memory_stats": lambda: None,
            "memory_allocated": lambda: 0,
            "max_memory_allocated": lambda: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(torch.profiler, "profile", lambda: self)
