"""The profiling tracer: what each rank computes, sends and waits for, as one Chrome/Perfetto trace.

    tracer = Tracer(config.trace_range, mesh, config.run_dir)
    for step in range(...):
        with tracer.step(step):
            with tracer.phase("forward", micro_batch=0): ...
    tracer.close()  # RUN_DIR/trace.json, for ui.perfetto.dev or chrome://tracing

`python -m common.tracer RUN_DIR` prints the report of `trace_report.py` and draws RUN_DIR/timeline.png.

A trace has a process a rank and a thread a lane. The compute lane nests step > phase > what the rank does for
communication: `issue` (start a collective) and `wait` (blocked until it has completed). Each group that
communicates has a lane of its own, and for messages two, send and receive. On such a lane collectives follow
each other as on an NCCL stream: one is drawn from the completion of the one issued before it; `issue_us` and
`completion_us` in its arguments say what was measured. Arrows lead from where a message was sent to where its
receiver was done waiting for it.

On CPU the times are those of a monotonic clock. A collective has completed when its future says so, a message
(gloo has no future there) when its wait returns. On CUDA the times are those of events on the streams, read
when the run is over: a span is what the GPU did, not when Python launched it.
"""

import contextlib
import json
import sys
import warnings
from pathlib import Path

import torch

from common import collectives
from common.errors import UsageError
from common.process_groups import GROUP_NAMES, Mesh, coordinates
from common.tracing.chrome_trace import merge
from common.tracing.clocks import CpuClock, CudaClock

SNAPSHOT_EVENTS = 200_000  # allocations and frees that the memory snapshot holds at most


class _Phase:
    """A phase while nothing is recorded: only `collectives.phase` changes."""

    __slots__ = ("_before", "_name")

    def __init__(self, name: str):
        self._name = name

    def __enter__(self):
        self._before, collectives.phase = collectives.phase, self._name

    def __exit__(self, *_):
        collectives.phase = self._before


class _Span:
    """A recorded span."""

    __slots__ = ("_annotation", "_arguments", "_category", "_lane", "_name", "_phase", "_start", "_tracer")

    def __init__(self, tracer: "Tracer", name: str, category: str, lane: str, arguments: dict):
        self._tracer, self._name, self._category = tracer, name, category
        self._lane, self._arguments = lane, arguments
        self._phase = _Phase(name) if category == "phase" else None
        self._annotation = torch.profiler.record_function(name) if tracer.profiler is not None else None

    def __enter__(self):
        if self._phase:
            self._phase.__enter__()
        self._tracer.time_source.push(" ".join([self._name, *map(str, self._arguments.values())]))
        if self._annotation:
            self._annotation.__enter__()
        self._start = self._tracer.clock()

    def __exit__(self, *_):
        end = self._tracer.clock()
        if self._annotation:
            self._annotation.__exit__(None, None, None)
        self._tracer.time_source.pop()
        if self._phase:
            self._phase.__exit__()
        self._tracer.add_span(self._name, self._category, self._lane, self._start, end, self._arguments)


_NOTHING = contextlib.nullcontext()


class Tracer:
    """Records the steps `first_last` (both included; None: none) of this rank and writes RUN_DIR/trace.json.

    Args:
        run_dir: a folder that all ranks see.
        profile: run torch.profiler over the same steps (the step before them warms it up), one Kineto trace a
            rank in RUN_DIR/profile/. It slows Python down, so the spans of such a run are longer.
        memory_snapshot: CUDA only: write the allocator's history of these steps to
            RUN_DIR/memory-rank-N.pickle, for pytorch.org/memory_viz.
        time_source: a clock such as `CpuClock`; default: that of the mesh's device.

    While a step is recorded this object is `collectives.recorder`.
    """

    def __init__(
        self,
        first_last: tuple[int, int] | None,
        mesh: Mesh,
        run_dir: str | Path | None,
        profile: bool = False,
        memory_snapshot: bool = False,
        time_source=None,
    ):
        self.calls = []  # collectives.Call of the step under way, in order of issue
        self.profiler = None  # torch.profiler.profile while it runs
        self.recording = False
        if first_last is None:
            self.first, self.last, self._from = 0, -1, 0
            return
        self.first, self.last = first_last
        self._from = self.first - 1 if profile else self.first
        self._mesh, self._run_dir = mesh, Path(run_dir)
        self._profile, self._memory_snapshot, self._remembers = profile, memory_snapshot, False
        self.time_source = time_source or (CudaClock(mesh) if mesh.device.type == "cuda" else CpuClock())
        self.clock = self.time_source.mark
        self._number, self._anchor = None, None  # of the step under way
        self._spans, self._works = [], []  # with marks, which become times in `close`

    def step(self, number: int):
        """Context manager around optimizer step `number`."""
        return self._step(number) if self._from <= number <= self.last else _NOTHING

    def phase(self, name: str, **arguments):
        """Context manager: forward, backward or optimizer. `arguments`, such as micro_batch, are recorded."""
        return _Span(self, name, "phase", "compute", arguments) if self.recording else _Phase(name)

    def span(self, name: str, lane: str = "compute", **arguments):
        """Context manager: something else worth seeing. On the compute lane it counts as compute."""
        return _Span(self, name, "span", lane, arguments) if self.recording else _NOTHING

    def close(self) -> Path | None:
        """Write the trace; all ranks call it together. Returns its path, or None when none was asked for."""
        if self.last < self.first:
            return None
        self._finish_profiles()
        rank = self._mesh.rank
        place = coordinates(rank, self._mesh.degrees) | {"ep": self._mesh.ep.rank}
        groups = {name: getattr(self._mesh, name).ranks for name in GROUP_NAMES}
        part = {
            "rank": rank,
            "clock": self.time_source.name,
            "degrees": vars(self._mesh.degrees),
            "place": {axis: index for axis, index in place.items() if getattr(self._mesh.degrees, axis) > 1},
            "groups": {name: ranks for name, ranks in groups.items() if len(ranks) > 1},
            "events": self._events(),
        }
        self._run_dir.mkdir(parents=True, exist_ok=True)
        paths = [self._run_dir / f"trace-rank-{each}.json" for each in self._mesh.world.ranks]
        paths[rank].write_text(json.dumps(part))
        collectives.barrier(self._mesh.world)  # every part is written
        result, self.last = self._run_dir / "trace.json", self.first - 1
        if rank == 0:
            seen = [path for path in paths if path.exists()]
            if len(seen) < len(paths):
                print(f"warning: {result} lacks ranks whose {self._run_dir} is another folder", file=sys.stderr)
            result.write_text(json.dumps(merge([json.loads(path.read_text()) for path in seen])))
            for path in seen:
                path.unlink()
        return result

    # ---- the recorder of `collectives` ---------------------------------------------------------------------

    def watch(self, handle, calls: list, done_at: float) -> None:
        """`collectives` has launched `calls` (one collective, or a batch of messages) with `handle`."""
        self._works.append((calls, self.clock(), self._number, self._anchor))
        self.time_source.watch(handle, calls, done_at)

    # ---- recording -----------------------------------------------------------------------------------------

    def add_span(self, *span) -> None:
        """(name, category, lane, start mark, end mark, arguments) of the step under way."""
        self._spans.append((*span, self._number, self._anchor))

    @contextlib.contextmanager
    def _step(self, number: int):
        if self._profile and self.profiler is None:
            self._start_profiler(number)
        if number >= self.first:
            if self._memory_snapshot and not self._remembers:
                torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
                self._remembers = True
            self.calls.clear()
            self._number, self._anchor = number, self.time_source.anchor()
            self.recording, collectives.recorder = True, self
            try:
                with _Span(self, f"step {number}", "step", "compute", {}):
                    yield
            finally:
                self.recording, collectives.recorder = False, None
        else:
            yield
        if self.profiler is not None:
            self.profiler.step()
        if number == self.last:
            self._finish_profiles()

    def _events(self) -> list[dict]:
        """All spans and collectives, with times in nanoseconds since the epoch."""
        self.time_source.settle()
        events = []

        def add(name, category, lane, start, end, arguments, number, anchor) -> None:
            start, end = (self.time_source.resolve(mark, anchor) for mark in (start, end))
            event = {"name": name, "cat": category, "lane": lane, "start": start, "end": max(start, end)}
            events.append(event | {"args": {"step": number} | arguments})

        for span in self._spans:
            add(*span)
        for calls, launched, *step in self._works:
            group = calls[0].group
            shared = {"group": group, "phase": calls[0].phase}
            what = calls[0].op if len(calls) == 1 else "exchange"
            add(f"issue {what}", "issue", "compute", calls[0].issue, launched, shared, *step)
            waited = calls[0].wait_start is not None and calls[-1].wait_end is not None
            if waited:
                marks = calls[0].wait_start, calls[-1].wait_end
                add(f"wait {what}", "wait", "compute", *marks, shared, *step)
            for call in calls:
                details = {"op": call.op, "group_size": call.group_size, "bytes": call.bytes}
                details |= {"elements": call.elements, "dtype": call.dtype}
                end, lane = call.completion, group
                if end is None:  # a message for which nobody waited in a traced step
                    end, details["unfinished"] = launched, True
                if call.peer is not None:
                    lane, details["peer"] = f"{group} {call.op}", call.peer
                add(call.op, "communication", lane, call.issue, end, shared | details, *step)
                if call.op == "receive":  # where its arrow ends
                    events[-1]["ready"] = self.time_source.resolve(call.wait_end if waited else end, step[1])
        return events

    # ---- other profilers -----------------------------------------------------------------------------------

    def _start_profiler(self, number: int) -> None:
        path = self._run_dir / "profile" / f"rank-{self._mesh.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():  # a run may start at the first traced step: no warm-up then
            warnings.simplefilter("ignore")
            schedule = torch.profiler.schedule(
                wait=0,
                warmup=max(0, self.first - number),
                active=self.last - max(self.first, number) + 1,
                repeat=1,
            )
        self.profiler = torch.profiler.profile(
            schedule=schedule,  # its wait is over: the steps before the warm-up run without a profiler
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
        )
        self.profiler.start()

    def _finish_profiles(self) -> None:
        """Write what is not written yet: after the last traced step, or when the run ends before it."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None
        if self._remembers:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._run_dir / f"memory-rank-{self._mesh.rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._remembers = False


def main(argv: list[str] | None = None) -> int:
    """`python -m common.tracer RUN_DIR`: the report as text, the timeline as PNG."""
    from common.command_line import OneLineParser
    from common.tracing.report import print_kernels, print_report, read_trace
    from common.tracing.timeline_picture import draw_timeline

    parser = OneLineParser(prog="python -m common.tracer", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--step", type=int, metavar="K", help="only this step (default: report all, draw the last)")
    parser.add_argument("--out", type=Path, metavar="PNG", help="where to draw (default: RUN_DIR/timeline.png)")
    options = parser.parse_or_exit(argv)
    try:
        trace = read_trace(options.run_dir)
        print_report(trace, options.step)
        print_kernels(options.run_dir)
        path = draw_timeline(trace, options.out or options.run_dir / "timeline.png", options.step)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\ntimeline: {path}\ntrace: {options.run_dir / 'trace.json'} (open it in ui.perfetto.dev)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
