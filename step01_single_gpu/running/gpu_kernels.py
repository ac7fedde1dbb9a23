"""What the GPU did between its kernels' starts and ends: tables from the trace of torch.profiler (`--profile`).

    python -m step01_single_gpu.running.gpu_kernels RUN_DIR

The tracer's spans count a phase as compute even while the GPU waits for Python. The first table shows such gaps, the
second which kernels take longest.
"""

import collections
import json
from pathlib import Path
from typing import NamedTuple

from common.drawing.tables import print_table
from common.launching.command_line import OneLineParser, one_line_errors, summary
from common.tracing.chrome_trace import time_by_state


class GpuState(NamedTuple):
    """What happens at a moment between the first and the last activity of a GPU."""

    span: bool
    nccl: bool  # a kernel of NCCL runs
    compute: bool  # some other kernel runs
    copies: bool  # a memcpy or memset runs
    queued: bool  # a launch has returned whose kernel has not started


TIMES = {  # span = compute + exposed + copies + idle
    "span": lambda now: now.span,
    "compute": lambda now: now.compute,
    "exposed": lambda now: now.nccl and not now.compute,
    "copies": lambda now: now.copies and not (now.nccl or now.compute),
    "idle": lambda now: now.span and not (now.nccl or now.compute or now.copies),
    "communication": lambda now: now.nccl,
    "overlapped": lambda now: now.nccl and now.compute,
    "starved": lambda now: now.span and not any(now[1:]),  # idle because Python has launched nothing
}


def classify_kernels(kineto_events: list[dict]) -> dict[str, float]:
    """Return the seconds of each of `TIMES` from the `traceEvents` of a Kineto trace; {} if no GPU was used."""
    intervals = {name: [] for name in GpuState._fields}
    complete = [event for event in kineto_events if event.get("ph") == "X"]
    launches = {
        event.get("args", {}).get("correlation"): event["ts"] + event["dur"]
        for event in complete
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    for event in complete:
        kernel = "nccl" if "nccl" in event["name"].lower() else "compute"
        kind = {"kernel": kernel, "gpu_memcpy": "copies", "gpu_memset": "copies"}.get(event.get("cat"))
        if kind:
            start, end = event["ts"], event["ts"] + event["dur"]
            intervals[kind].append((start, end))
            launched = launches.get(event.get("args", {}).get("correlation"), start)
            intervals["queued"].append((min(launched, start), start))
    activities = intervals["nccl"] + intervals["compute"] + intervals["copies"]
    if not activities:
        return {}
    intervals["span"] = [(min(start for start, _ in activities), max(end for _, end in activities))]
    states = [(GpuState(*state), 1e-6 * time) for state, time in time_by_state(*intervals.values()).items()]
    return {name: sum(time for now, time in states if holds(now)) for name, holds in TIMES.items()}


def longest_kernels(kineto_events: list[dict], count: int = 25) -> list[tuple[str, int, float]]:
    """Return the names of the `count` kernels on which a GPU spent most time, how often each ran, and its seconds."""
    calls, seconds = collections.Counter(), collections.Counter()
    for event in kineto_events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            calls[event["name"]] += 1
            seconds[event["name"]] += 1e-6 * event["dur"]
    return [(name, calls[name], total) for name, total in seconds.most_common(count)]


def print_kernels(run_dir: str | Path) -> None:
    """Print `classify_kernels` of each RUN_DIR/profile/rank-N.json as a table, and the first one's `longest_kernels`.

    Prints nothing if no GPU was profiled.
    """
    rows, longest = [], []
    for path in sorted((Path(run_dir) / "profile").glob("rank-*.json"), key=lambda path: (len(path.name), path.name)):
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        if times := classify_kernels(events):
            rows.append((path.stem, *(f"{1e3 * seconds:.3f}" for seconds in times.values())))
            longest = longest or longest_kernels(events)
    if rows:
        title = "GPU kernels of all profiled steps, in ms: span = compute + exposed + copies + idle"
        print_table(title, ("", *TIMES), rows)
        cells = [(f"{1e3 * seconds:.3f}", calls, name[:80]) for name, calls, seconds in longest]
        print_table(f"The longest kernels of {rows[0][0]}, in ms", ("ms", "calls", "kernel"), cells)


@one_line_errors
def main() -> None:
    """Print the tables of the run that the command line names."""
    parser = OneLineParser(prog="python -m step01_single_gpu.running.gpu_kernels", description=summary(__doc__))
    parser.add_argument("run_dir", help="folder of a run with --profile, on a GPU")
    print_kernels(parser.parse_args().run_dir)


if __name__ == "__main__":
    raise SystemExit(main())
