"""What experiments read from traces."""

from common.tracing.chrome_trace import Trace, time_by_state
from common.tracing.report import StepRow, mean, report


def quietest(trace: Trace) -> StepRow:
    """Return the mean over ranks of the shortest step: other work on the machine can only make a step longer."""
    return min((mean(report(trace, step)) for step in trace.steps), key=lambda row: row.step_time_s)


def computation(trace: Trace, phase: str) -> float:
    """Return the seconds of a phase in the shortest step, without the time it was blocked; the mean over ranks."""
    step, total = quietest(trace).step, 0.0
    for rank in trace.ranks:
        spans = [span for span in trace.spans[rank] if span["name"] == phase and span["args"]["step"] == step]
        phases = [(span["ts"], span["ts"] + span["dur"]) for span in spans]
        total += 1e-6 * time_by_state(phases, trace.intervals(rank, "issue", "wait"))[True, False]
    return total / len(trace.ranks)
