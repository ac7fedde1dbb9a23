"""Pictures of traces: what each rank does during a step, one row per lane, in milliseconds."""

from pathlib import Path

from common.drawing.figures import COLOURS, write_png
from common.drawing.lanes import Lane, Span, panels_of_lanes
from common.tracing.chrome_trace import Trace

LEAST_ISSUE = 0.003  # issuing a collective is drawn only if it fills this part of the axis
NAMES = {name: name.replace("_", "-") for name in COLOURS} | {"blocked": "blocked"}


def draw_timelines(runs: list[tuple[str, Trace]], path: str | Path, step: int | None = None) -> Path:
    """Draw one step (default: the last traced one) of one or several runs as PNG, above each other. Returns the path.

    Args:
        runs: (title, trace) of each; an empty title stands for the step. Time zero is where the first rank begins it.

    Raises UsageError for a step that a run did not trace, and if `path` cannot be written.
    """
    panels = []
    for title, trace in runs:
        number = trace.steps[-1] if step is None and trace.steps else step
        panels.append((title or f"step {number}", lanes_of(trace, number)))
    return write_png(panels_of_lanes(panels, "ms since the start of the step", NAMES), path)


def lanes_of(trace: Trace, step: int) -> list[Lane]:
    """A high lane for what each rank computes, where phases show their micro-batch, and flat ones for what it sends."""
    windows = [trace.window(rank, step) for rank in trace.ranks]
    origin = min(start for start, _ in windows)
    shortest = LEAST_ISSUE * (max(end for _, end in windows) - origin)
    result = []
    for rank in trace.ranks:
        spans: dict[str, list[Span]] = {f"rank {rank}": []}
        for each in trace.spans[rank]:
            kind, arguments, lane, name = each["cat"], each["args"], f"rank {rank}", "blocked"
            if arguments["step"] != step or kind == "step" or (kind == "issue" and each["dur"] < shortest):
                continue
            if kind == "communication":
                lane = arguments["group"] + (f" {arguments['op']}" if "peer" in arguments else "")
            if kind in ("phase", "communication"):
                name = each["name"] if each["name"] in COLOURS else "other"
            words = arguments.get("micro_batch" if kind == "phase" else "label", "")
            box = Span((each["ts"] - origin) / 1000, each["dur"] / 1000, name, str(words))
            spans.setdefault(lane, []).append(box)
        result += [Lane(lane, boxes, 1.0 if lane == f"rank {rank}" else 0.55) for lane, boxes in spans.items()]
    return result
