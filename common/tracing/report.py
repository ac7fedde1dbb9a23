"""What a trace says about a run: interval arithmetic, the report of each step, the table of GPU kernels.

A rank's step falls into three parts, `compute + exposed + idle = step time`:

- *exposed* communication: the rank is issuing a collective, or is blocked in a wait while one is under way;
- *compute*: the rank is in a phase, or another span of its compute lane, and not in exposed communication;
- *idle*: the rest (loading data, logging, gaps between phases).

*Communication* is the union of the intervals from issue to completion of all collectives: several under way
at once count once. *Overlapped* communication is the part of it that compute covers; the overlap share is
overlapped / communication. What is neither overlapped nor exposed ran while the rank was idle.

On CUDA these intervals come from events on the streams, so a phase in which the GPU waits for Python to
launch kernels counts as compute. The table of kernels, from torch.profiler's trace, shows such gaps.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

from common.errors import UsageError
from common.tracing.chrome_trace import Trace, read_trace

__all__ = ["Trace", "read_trace"]  # so that experiments import from here only

Interval = tuple[float, float]  # (start, end)

# ---- intervals ---------------------------------------------------------------------------------------------


def union(intervals: list[Interval]) -> list[Interval]:
    """The same points in time as disjoint intervals in order. Empty intervals vanish."""
    result = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif end > start:
            result.append((start, end))
    return result


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Points in time that lie in both, as disjoint intervals in order."""
    first, second, result = union(first), union(second), []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            result.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def difference(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Points in time of the first that do not lie in the second, as disjoint intervals in order."""
    edges = [edge for interval in union(second) for edge in interval]
    outside = list(zip([float("-inf"), *edges[1::2]], [*edges[0::2], float("inf")]))
    return intersection(first, outside)


def length(intervals: list[Interval]) -> float:
    """Time that the union of the intervals covers."""
    return sum(end - start for start, end in union(intervals))


# ---- the report of a step ----------------------------------------------------------------------------------


@dataclass
class StepRow:
    """One step of one rank (`rank` None: a mean). Times in seconds, see the top of this file."""

    step: int | None
    rank: int | None
    step_time_s: float
    compute_s: float
    exposed_s: float
    idle_s: float
    communication_s: float
    overlapped_s: float
    sent_bytes: dict[str, float] = field(default_factory=dict)  # model bytes, by group
    calls: dict[str, float] = field(default_factory=dict)  # number of collectives, by op

    @property
    def overlap_share(self) -> float:
        """Overlapped / communication; 0 where there was none."""
        return self.overlapped_s / self.communication_s if self.communication_s else 0.0


def report(trace: Trace, step: int | None = None) -> list[StepRow]:
    """A row for each traced step (or only `step`) and rank. Raises UsageError when `step` was not traced."""
    rows = []
    for number in trace.steps if step is None else [step]:
        rows += [_row(trace, number, rank) for rank in trace.ranks]
    return rows


def _row(trace: Trace, step: int, rank: int) -> StepRow:
    window = [trace.window(rank, step)]
    communication = intersection(trace.intervals(rank, "communication"), window)
    exposed = intersection(trace.intervals(rank, "issue", "wait"), communication)
    compute = difference(intersection(trace.intervals(rank, "phase", "span"), window), exposed)
    sent, calls = Counter(), Counter()
    for span in trace.spans[rank]:
        if span["cat"] == "communication" and span["args"]["step"] == step:
            sent[span["args"]["group"]] += span["args"]["bytes"]
            calls[span["args"]["op"]] += 1
    overlapped = intersection(communication, compute)
    idle = difference(window, compute + exposed)
    times = [1e-6 * length(each) for each in (window, compute, exposed, idle, communication, overlapped)]
    return StepRow(step, rank, *times, dict(sent), dict(calls))


def mean(rows: list[StepRow]) -> StepRow:
    """The mean of rows, of several ranks, steps or both. Its overlap share is that of the summed times."""
    steps = {row.step for row in rows}
    result = {"step": steps.pop() if len(steps) == 1 else None, "rank": None}
    for each in fields(StepRow)[2:]:
        values = [getattr(row, each.name) for row in rows]
        if isinstance(values[0], dict):
            names = dict.fromkeys(name for value in values for name in value)
            result[each.name] = {name: sum(value.get(name, 0) for value in values) / len(rows) for name in names}
        else:
            result[each.name] = sum(values) / len(rows)
    return StepRow(**result)


MANY_RANKS = 8  # with more, the report has only the mean and the extremes


def print_report(trace: Trace, step: int | None = None, file=None) -> None:
    """Print the table of `report` in milliseconds, and what was sent."""
    file = file or sys.stdout
    rows = report(trace, step)
    if not rows:
        raise UsageError("the trace has no steps: the run ended before the first step of --trace")
    degrees = " ".join(f"{axis} {degree}" for axis, degree in trace.metadata["degrees"].items() if degree > 1)
    where = f"{len(trace.ranks)} ranks ({degrees})" if degrees else "1 rank"
    print(f"{where}, times in ms; step time = compute + exposed + idle", file=file)
    print(
        f"{'step':>5} {'rank':>5} {'step time':>10} {'compute':>9} {'exposed':>9} {'idle':>9} "
        f"{'communication':>14} {'overlapped':>11} {'share':>6} {'sent MB':>9} {'collectives':>12}",
        file=file,
    )
    for number in dict.fromkeys(row.step for row in rows):
        of_step = [row for row in rows if row.step == number]
        shown = of_step
        if len(of_step) > MANY_RANKS:
            shown = [min(of_step, key=lambda row: row.exposed_s), max(of_step, key=lambda row: row.exposed_s)]
        if len(of_step) > 1:
            shown = shown + [mean(of_step)]
        for row in shown:
            print(
                f"{row.step:>5} {'mean' if row.rank is None else row.rank:>5} {1e3 * row.step_time_s:>10.2f} "
                f"{1e3 * row.compute_s:>9.2f} {1e3 * row.exposed_s:>9.2f} {1e3 * row.idle_s:>9.2f} "
                f"{1e3 * row.communication_s:>14.2f} {1e3 * row.overlapped_s:>11.2f} "
                f"{row.overlap_share:>6.1%} {sum(row.sent_bytes.values()) / 1e6:>9.2f} "
                f"{sum(row.calls.values()):>12g}",
                file=file,
            )
    overall = mean(rows)
    sent = ", ".join(f"{group} {size / 1e6:.3f} MB" for group, size in overall.sent_bytes.items())
    calls = ", ".join(f"{count:g} {op}" for op, count in overall.calls.items())
    print(f"a step of a rank, on average: {calls or 'no collectives'}; sent: {sent or 'nothing'}", file=file)


# ---- kernels: the trace of torch.profiler on CUDA ----------------------------------------------------------

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cuda_runtime", "cuda_driver")
_BLOCKING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpyAsync",
)


@dataclass
class KernelTimes:
    """What a GPU did between its first and its last activity. Times in seconds.

    `span = compute + exposed + copies + idle`: a kernel that is not NCCL's runs; only NCCL's do; a memcpy or
    memset alone; nothing. `communication` is any NCCL kernel, `overlapped` the part that compute covers.

    Two hints at launch overhead: `starved` is the part of `idle` in which nothing was launched that had yet
    to start, so the GPU waited for Python; `launch_gap` is the median time from the return of a launch to the
    start of its kernel: microseconds mean that the host is no further than the GPU, milliseconds that it is
    well ahead. `blocking` lists host calls that synchronise or copy: name -> (number, seconds).
    """

    span_s: float
    compute_s: float
    exposed_s: float
    copies_s: float
    idle_s: float
    communication_s: float
    overlapped_s: float
    starved_s: float
    launch_gap_s: float
    kernels: int
    blocking: dict[str, tuple[int, float]]

    @property
    def overlap_share(self) -> float:
        """Overlapped / communication; 0 where there was none."""
        return self.overlapped_s / self.communication_s if self.communication_s else 0.0


def classify_kernels(kineto_events: list[dict]) -> KernelTimes | None:
    """Sort the GPU's activities in a Kineto trace (its `traceEvents`) into NCCL, compute and copies.

    Returns None when there are none (a run without CUDA).
    """
    activities = [event for event in kineto_events if event.get("ph") == "X" and event.get("cat") in _GPU]
    if not activities:
        return None
    kinds = {"nccl": [], "compute": [], "copies": []}
    for event in activities:
        kind = "copies" if event["cat"] != "kernel" else "nccl" if "nccl" in event["name"].lower() else "compute"
        kinds[kind].append((event["ts"], event["ts"] + event["dur"]))
    everything = [interval for intervals in kinds.values() for interval in intervals]
    span = [(min(start for start, _ in everything), max(end for _, end in everything))]

    launches, blocking = {}, {}
    for event in kineto_events:
        if event.get("ph") == "X" and event.get("cat") in _HOST:
            launches[event.get("args", {}).get("correlation")] = event["ts"] + event["dur"]
            if event["name"] in _BLOCKING:
                number, seconds = blocking.get(event["name"], (0, 0.0))
                blocking[event["name"]] = (number + 1, seconds + 1e-6 * event["dur"])
    queued = []  # launched, but not started yet
    for event in activities:
        launched = launches.get(event.get("args", {}).get("correlation"))
        if launched is not None:
            queued.append((min(launched, event["ts"]), event["ts"]))
    gaps = sorted(end - start for start, end in queued)

    exposed = difference(kinds["nccl"], kinds["compute"])
    idle = difference(span, everything)
    parts = {
        "span_s": span,
        "compute_s": kinds["compute"],
        "exposed_s": exposed,
        "copies_s": difference(kinds["copies"], kinds["compute"] + kinds["nccl"]),
        "idle_s": idle,
        "communication_s": kinds["nccl"],
        "overlapped_s": intersection(kinds["nccl"], kinds["compute"]),
        "starved_s": difference(idle, queued),
    }
    return KernelTimes(
        **{name: 1e-6 * length(intervals) for name, intervals in parts.items()},
        launch_gap_s=1e-6 * gaps[len(gaps) // 2] if gaps else 0.0,
        kernels=len(kinds["nccl"]) + len(kinds["compute"]),
        blocking=blocking,
    )


def print_kernels(run_dir: str | Path, file=None) -> None:
    """Print the table of GPU kernels from RUN_DIR/profile/rank-*.json; nothing where there are none."""
    file = file or sys.stdout
    tables = {}
    for path in sorted((Path(run_dir) / "profile").glob("rank-*.json")):
        times = classify_kernels(json.loads(path.read_text())["traceEvents"])
        if times:
            tables[int(path.stem.removeprefix("rank-"))] = times
    if not tables:
        return
    print(
        "\nGPU kernels of all profiled steps, times in ms; span = compute + exposed + copies + idle",
        file=file,
    )
    names = [each.name for each in fields(KernelTimes) if each.name.endswith("_s")]
    print(
        " rank " + " ".join(f"{name.removesuffix('_s'):>13}" for name in names) + "  share  kernels",
        file=file,
    )
    for rank, times in sorted(tables.items()):
        values = " ".join(f"{1e3 * getattr(times, name):>13.3f}" for name in names)
        print(f"{rank:>5} {values} {times.overlap_share:>6.1%} {times.kernels:>8}", file=file)
        for name, (number, seconds) in times.blocking.items():
            print(f"      {name}: {number} calls, {1e3 * seconds:.3f} ms of host time", file=file)
