"""Pictures of traces: what each rank does during a step, one row per lane, in milliseconds."""

from pathlib import Path

from common.experiments.figures import COLOURS, new_figure, write_png
from common.tracing.chrome_trace import Trace

WAITING = {"facecolor": "white", "edgecolor": "#555555", "hatch": "/////", "linewidth": 0.5}
LABEL_SHARE = 0.015  # what fills at least this share of the axis shows its label: a phase the number of its micro-batch
LIGHT = ("reduce_scatter", "all_gather", "all_to_all")  # under words these colours want black
ISSUE_SHARE = 0.003  # issuing a collective is drawn only if it fills this share of the axis


def draw_timelines(runs: list[tuple[str, Trace]], path: str | Path, step: int | None = None) -> Path:
    """Draw one step (default: the last traced one) of one or several runs as PNG, above each other. Returns the path.

    Args:
        runs: (title, trace) of each; an empty title stands for the step. Time zero is where the first rank begins it.

    Raises UsageError for a step that a run did not trace, and if `path` cannot be written.
    """
    from matplotlib.patches import Patch

    panels, longest = [], 0.0
    for title, trace in runs:
        number = trace.steps[-1] if step is None and trace.steps else step
        windows = [trace.window(rank, number) for rank in trace.ranks]
        origin = min(start for start, _ in windows)
        longest = max(longest, (max(end for _, end in windows) - origin) / 1000)
        panels.append((title or f"step {number}", _rows(trace, number), origin))

    heights = [sum(height for _, height, _ in rows) for _, rows, _ in panels]
    height = 0.33 * sum(heights) + 0.45 * len(runs) + 0.8
    figure, _ = new_figure(len(runs), width=10, height=height, sharex=True, height_ratios=heights)
    drawn = set()
    for axis, (title, rows, origin) in zip(figure.axes, panels):
        drawn |= _draw(axis, rows, origin, longest)
        axis.set_title(title, loc="left", fontsize=10)
    axis.set(xlim=(0, longest), xlabel="ms since the start of the step")
    looks = {name: {"facecolor": colour} for name, colour in COLOURS.items()} | {"blocked": WAITING}
    handles = [Patch(label=name.replace("_", "-"), **look) for name, look in looks.items() if name in drawn]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9, frameon=False)
    return write_png(figure, path)


def _rows(trace: Trace, step: int) -> list[tuple[str, float, list[dict]]]:
    """(label, height, spans): a high row for each rank's compute lane, and low ones for its lanes of communication."""
    result = []
    for rank in trace.ranks:
        lanes = {f"rank {rank}": []}
        for span in trace.spans[rank]:
            lane, arguments = f"rank {rank}", span["args"]
            if span["cat"] == "communication":
                lane = arguments["group"] + (f" {arguments['op']}" if "peer" in arguments else "")
            if arguments["step"] == step and span["cat"] != "step":
                lanes.setdefault(lane, []).append(span)
        result += [(lane, 1.0 if lane == f"rank {rank}" else 0.55, spans) for lane, spans in lanes.items()]
    return result


def _draw(axis, rows: list[tuple[str, float, list[dict]]], origin: float, longest: float) -> set[str]:
    """Draw the rows of one run. Returns the names of what was drawn, for the legend."""
    top, places, drawn = 0.0, [], set()
    for _, height, spans in rows:
        places.append(top + height / 2)
        if height == 1.0 and top:
            axis.axhline(top - 0.04, color="#999999", linewidth=0.6)
        for span in spans:
            start, width = (span["ts"] - origin) / 1000, span["dur"] / 1000
            if span["cat"] == "issue" and width < ISSUE_SHARE * longest:
                continue
            name, look = "blocked", WAITING
            if span["cat"] in ("phase", "communication"):
                name = span["name"] if span["name"] in COLOURS else "other"
                look = {"facecolor": COLOURS[name], "edgecolor": "white", "linewidth": 0.4}
            axis.broken_barh([(start, width)], (top + 0.06, height - 0.12), **look)
            drawn.add(name)
            words = span["args"].get("micro_batch" if span["cat"] == "phase" else "label")
            if words is not None and width > LABEL_SHARE * longest:
                ink = "black" if name in LIGHT else "white"
                axis.text(start + width / 2, top + height / 2, words, ha="center", va="center", fontsize=7, color=ink)
        top += height
    axis.set_ylim(top, 0)
    axis.set_yticks(places, [label for label, _, _ in rows], fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.grid(visible=False, axis="y")
    return drawn
