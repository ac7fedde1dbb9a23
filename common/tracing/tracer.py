"""The profiling tracer: what each rank computes, sends and waits for, as one Chrome/Perfetto trace.

    tracer = Tracer(config.trace_range, mesh, config.run_dir)
    for step in range(...):
        with tracer.step(step):
            with tracer.phase("forward", micro_batch=0): ...
    tracer.close()  # RUN_DIR/trace.json, for ui.perfetto.dev; `python -m common.tracer RUN_DIR` reports and draws it

`chrome_trace.py` says what is in the file, `common/tracer.py` what it tells.
"""

import contextlib
import json
from collections import Counter
from pathlib import Path

import torch

from common import collectives
from common.process_groups import Mesh, coordinates
from common.tracing.chrome_trace import COMPUTE, Event, chrome_events
from common.tracing.clocks import CpuClock, CudaClock


class Tracer:
    """Records the steps `first_last` (both included; None: no step) of this rank; rank 0 writes RUN_DIR/trace.json.

    `Tracer()` records nothing, and needs no mesh.
    """

    def __init__(self, first_last: tuple[int, int] | None = None, mesh: Mesh | None = None, run_dir=None, clock=None):
        self._first, self._last = first_last or (0, -1)
        self._mesh, self._run_dir = mesh, Path(run_dir or ".")
        self._clock = clock or (CudaClock(mesh) if mesh and mesh.device.type == "cuda" else CpuClock())
        self._step = None  # number of the traced step in progress
        self._open = []  # the spans in progress, the step first: name, category, arguments, start
        self._events: list[Event] = []
        self._launches = []  # (step, calls of one launch, mark of its return)
        self._calls = Counter()  # how many of each kind have got their `id`

    @contextlib.contextmanager
    def step(self, number: int):
        """Context manager around optimizer step `number`."""
        if self._first <= number <= self._last:
            self._clock.begin_step()
            self._step = number
            try:
                with collectives.record(self._clock.mark, self._launched), self._span(f"step {number}", "step"):
                    yield
            finally:
                self._step = None
        else:
            yield

    @contextlib.contextmanager
    def phase(self, name: str, **arguments):
        """Context manager for forward, backward or optimizer. `arguments`, such as micro_batch, go into the trace."""
        outer, collectives.phase = collectives.phase, name
        try:
            with self._span(name, "phase", **arguments):
                yield
        finally:
            collectives.phase = outer

    @contextlib.contextmanager
    def interrupted(self):
        """Context manager around something else that runs meanwhile: phases in progress end, and go on after it."""
        phases, self._open = self._open[1:], self._open[:1]
        for phase in phases:
            self._end(*phase)
        yield
        self._open += [(*phase[:-1], self._clock.mark()) for phase in phases]

    @contextlib.contextmanager
    def _span(self, name: str, category: str, **arguments):
        if self._step is None:
            yield
            return
        with torch.profiler.record_function(name):  # for --profile
            self._open.append((name, category, arguments, self._clock.mark()))
            yield
            self._end(*self._open.pop())

    def _end(self, name: str, category: str, arguments: dict, start) -> None:
        self._events.append(Event(self._step, name, category, COMPUTE, start, self._clock.mark(), arguments))

    def _launched(self, handles: list, calls: list[collectives.Call], done_at: float) -> None:
        """`collectives` has launched one collective, or one batch of messages."""
        self._launches.append((self._step, calls, self._clock.mark()))
        self._clock.watch(handles, calls, done_at)

    def close(self) -> Path | None:
        """Write the trace; all ranks call this together. Returns its path, or None if no step was traced: a run that
        resumes after the steps to trace leaves the trace that is there.
        """
        if not self._events:
            return None
        for launch in self._launches:
            self._add_calls(*launch)
        resolve = self._clock.resolve
        events = [event._replace(start=resolve(event.start), end=resolve(event.end)) for event in self._events]
        mesh, degrees = self._mesh, self._mesh.degrees
        indices = coordinates(mesh.rank, degrees) | {"ep": mesh.ep.rank}
        place = "".join(f", {axis} {index}" for axis, index in indices.items() if getattr(degrees, axis) > 1)
        ranks = dict(enumerate(collectives.all_gather_objects((f"rank {mesh.rank}{place}", events), mesh.world)))
        result = self._run_dir / "trace.json"
        if mesh.rank == 0:
            metadata = {"ranks": list(ranks), "steps": sorted({event.step for event in events})}
            metadata |= {"degrees": {axis: getattr(degrees, axis) for axis in indices}, "clock": self._clock.name}
            content = {"traceEvents": chrome_events(ranks), "displayTimeUnit": "ms", "metadata": metadata}
            self._run_dir.mkdir(parents=True, exist_ok=True)
            result.write_text(json.dumps(content), encoding="utf-8")
        return result

    def _add_calls(self, step: int, calls: list[collectives.Call], launched) -> None:
        """Turn what is known of one launch into events: its issue and wait, and each collective or message."""
        first, last = calls[0], calls[-1]
        shared = {"group": first.group, "phase": first.phase}
        name = first.op if len(calls) == 1 else "exchange"
        for kind, start, end in (("issue", first.issue, launched), ("wait", first.wait_start, last.wait_end)):
            if end is not None:
                self._events.append(Event(step, f"{kind} {name}", kind, COMPUTE, start, end, shared))
        for call in calls:
            details = {name: getattr(call, name) for name in ("op", "group_size", "bytes", "elements", "dtype")}
            details |= {"id": self._identity(step, call), "link_us": 1e6 * call.link_seconds}
            lane = call.group
            if call.peer is not None:
                lane, details["peer"] = f"{call.group} {call.op}", call.peer
            end = call.completion or launched  # nobody waited for this message
            self._events.append(Event(step, call.op, "communication", lane, call.issue, end, shared | details))

    def _identity(self, step: int, call: collectives.Call) -> str:
        """Return what all ranks of a call name it by, without asking each other.

        They issue the collectives of a group, and the messages between two ranks over a group, in the same order.
        """
        who = (getattr(self._mesh, call.group).ranks[0],)
        if call.peer is not None:
            who = (self._mesh.rank, call.peer) if call.op == "send" else (call.peer, self._mesh.rank)
        key = step, call.group, who
        self._calls[key] += 1
        return repr((key, self._calls[key]))
