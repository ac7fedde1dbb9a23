"""What a trace says about a run, step by step; `python -m common.tracer RUN_DIR` prints it and draws the timeline.

A rank's step has four parts, `compute + exposed + waiting + idle = step time`. In exposed communication it does nothing
but communicate. While it waits, nothing of its own is in flight: another rank has not sent yet what it needs, or not
issued its part of a collective. A pipeline's bubble is waiting, and so is what a slow rank costs the others. Idle is
the rest (loading data, logging). Overlapped communication is the part of all communication that compute covers. On CUDA
the times are those of events on the streams, so a phase in which the GPU waits for Python counts as compute.
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from common.drawing.tables import print_table
from common.errors import UsageError
from common.launching.command_line import OneLineParser, one_line_errors, summary
from common.tracing.chrome_trace import Trace, read_trace, time_by_state
from common.tracing.timelines import draw_timelines


class Now(NamedTuple):
    """What a rank does at a moment."""

    step: bool  # this step is in progress
    phase: bool  # a forward, a backward or an optimizer phase is in progress
    communication: bool  # a collective or message has started, and has not completed
    blocked: bool  # the rank is issuing a collective, or waiting for one


TIMES = {
    "step_time_s": lambda now: now.step,
    "compute_s": lambda now: now.step and now.phase and not now.blocked,
    "exposed_s": lambda now: now.step and now.blocked and now.communication,
    "waiting_s": lambda now: now.step and now.blocked and not now.communication,
    "idle_s": lambda now: now.step and not now.phase and not now.blocked,
    "communication_s": lambda now: now.step and now.communication,
    "overlapped_s": lambda now: now.step and now.communication and now.phase and not now.blocked,
}


@dataclass
class StepRow:
    """One step of one rank (`rank` is None for a mean). Times in seconds, as defined by `TIMES`."""

    step: int | None
    rank: int | None
    step_time_s: float
    compute_s: float
    exposed_s: float
    waiting_s: float
    idle_s: float
    communication_s: float
    overlapped_s: float
    sent_bytes: float  # model bytes
    collectives: float  # number of them; each message counts

    @property
    def overlap_share(self) -> float:
        """Overlapped / communication; 0 if there was no communication."""
        return self.overlapped_s / self.communication_s if self.communication_s else 0.0

    @property
    def ratio(self) -> float:
        """Compute / communication; infinite without communication. From 1 on, all of it could hide."""
        return self.compute_s / self.communication_s if self.communication_s else math.inf


def report(trace: Trace, step: int | None = None) -> list[StepRow]:
    """Return a row for each traced step (or only `step`) and rank. Raises UsageError if `step` was not traced."""
    return [_row(trace, number, rank) for number in (trace.steps if step is None else [step]) for rank in trace.ranks]


def _row(trace: Trace, step: int, rank: int) -> StepRow:
    categories = ("phase",), ("communication",), ("issue", "wait")
    states = time_by_state([trace.window(rank, step)], *(trace.intervals(rank, *each) for each in categories))
    moments = [(Now(*state), 1e-6 * time) for state, time in states.items()]
    times = {name: sum(time for now, time in moments if holds(now)) for name, holds in TIMES.items()}
    calls = [call for call in trace.calls(rank) if call["step"] == step]
    return StepRow(step, rank, **times, sent_bytes=sum(call["bytes"] for call in calls), collectives=len(calls))


def mean(rows: list[StepRow]) -> StepRow:
    """Return the mean of rows of several ranks, steps or both. Its overlap share is that of the summed times."""
    averages = [sum(getattr(row, each.name) for row in rows) / len(rows) for each in fields(StepRow)[2:]]
    return StepRow(rows[0].step if len({row.step for row in rows}) == 1 else None, None, *averages)


def print_report(trace: Trace, step: int | None = None) -> None:
    """Print the rows of `report`, in milliseconds, and the mean of each step."""
    if not (rows := report(trace, step)):
        raise UsageError("the trace has no steps: the run ended before the first step of --trace")
    cells = []
    for number in dict.fromkeys(row.step for row in rows):
        ranks = [row for row in rows if row.step == number]
        for row in [*ranks, mean(ranks)] if len(ranks) > 1 else ranks:
            times = (f"{1e3 * getattr(row, name):.2f}" for name in TIMES)
            ratio = f"{row.ratio:.2f}" if math.isfinite(row.ratio) else "-"
            counts = f"{row.overlap_share:.1%}", ratio, f"{row.sent_bytes / 1e6:.2f}", f"{row.collectives:g}"
            cells.append((row.step, "mean" if row.rank is None else row.rank, *times, *counts))
    degrees = " ".join(f"{axis} {degree}" for axis, degree in trace.degrees.items() if degree > 1)
    where = f"{len(trace.ranks)} ranks ({degrees})" if degrees else "1 rank"
    names = (name.removesuffix("_s").replace("_", " ") for name in TIMES)
    header = ("step", "rank", *names, "hidden", "compute / communication", "sent MB", "collectives")
    print_table(f"{where}, times in ms; step time = compute + exposed + waiting + idle", header, cells)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Print the report and draw the timeline."""
    parser = OneLineParser(prog="python -m common.tracer", description=summary(main.__doc__))
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--step", type=int, metavar="K", help="only this step (default: report all, draw the last)")
    parser.add_argument("--out", type=Path, metavar="PNG", help="where to draw (default: RUN_DIR/timeline.png)")
    options = parser.parse_args(argv)
    trace = read_trace(options.run_dir)
    print_report(trace, options.step)
    path = draw_timelines([("", trace)], options.out or options.run_dir / "timeline.png", options.step)
    print(f"\ntimeline: {path}\ntrace: {options.run_dir / 'trace.json'} (open it in ui.perfetto.dev)")


if __name__ == "__main__":
    raise SystemExit(main())
