"""Pictures of traces: what each rank does during a step, one row a lane, in milliseconds."""

from pathlib import Path

from common.errors import UsageError
from common.process_groups import GROUP_NAMES
from common.tracing.chrome_trace import Trace

# Okabe and Ito's palette, which colour-blind readers can tell apart
PHASES = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73"}
OTHER = "#BBBBBB"
GROUPS = ("#E69F00", "#CC79A7", "#D55E00", "#F0E442")
WAITING = {"facecolor": "white", "edgecolor": "#555555", "hatch": "/////", "linewidth": 0.5}

LABEL_SHARE = 0.02  # of the axis: a phase at least this wide shows the number of its micro-batch
ISSUE_SHARE = 0.003  # of the axis: issuing a collective is drawn only if it took this long
HEIGHTS = {"compute": 1.0, "communication": 0.55}


def draw_timeline(trace: Trace, path: str | Path, step: int | None = None) -> Path:
    """Draw one step (default: the last traced one) of every rank as PNG. Returns the path."""
    return draw_timelines([("", trace)], path, step)


def draw_timelines(runs: list[tuple[str, Trace]], path: str | Path, step: int | None = None) -> Path:
    """Draw one step (default: the last traced one) of several runs above each other, on one axis of time.

    Args:
        runs: (title, trace) of each. Zero is where its first rank begins the step.

    Raises UsageError for a step that a run did not trace, and where `path` cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    numbers = [trace.steps[-1] if step is None and trace.steps else step for _, trace in runs]
    windows = [
        [trace.window(rank, number) for rank in trace.ranks] for (_, trace), number in zip(runs, numbers, strict=True)
    ]
    lanes = [_lanes(trace, number) for (_, trace), number in zip(runs, numbers)]
    duration = max(max(end for _, end in each) - min(start for start, _ in each) for each in windows) / 1000
    used = {lane.partition(" ")[0] for each in lanes for _, lane, _ in each if lane}
    groups = [name for name in GROUP_NAMES if name in used] + sorted(used - set(GROUP_NAMES))
    colours = PHASES | {name: GROUPS[index % len(GROUPS)] for index, name in enumerate(groups)}

    heights = [sum(HEIGHTS["communication" if lane else "compute"] for _, lane, _ in each) for each in lanes]
    figure = Figure(figsize=(10, 0.33 * sum(heights) + 0.45 * len(runs) + 0.8), layout="constrained")
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    drawn = set()
    for axis, (title, _), number, window, rows in zip(axes, runs, numbers, windows, lanes):
        drawn |= _draw(axis, rows, min(start for start, _ in window), duration, colours)
        axis.set_title(title or f"step {number}", loc="left", fontsize=10)
    axes[-1].set_xlim(0, duration)
    axes[-1].set_xlabel("ms since the start of the step", fontsize=9)
    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items() if name in drawn]
    if "other" in drawn:
        handles.append(Patch(facecolor=OTHER, label="other"))
    if "wait" in drawn:
        handles.append(Patch(**WAITING, label="blocked"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9, frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # no such folder, or a format that matplotlib does not know
        raise UsageError(f"cannot draw {path}: {error}") from None
    return Path(path)


def _lanes(trace: Trace, step: int) -> list[tuple[int, str, list[dict]]]:
    """(rank, lane, spans) of every row of the picture. Lane "" is the compute lane."""
    result = []
    for rank in trace.ranks:
        lanes = {"": []}
        for span in trace.spans[rank]:
            arguments = span["args"]
            if arguments["step"] != step:
                continue
            if span["cat"] == "communication":
                message = "peer" in arguments
                lane = f"{arguments['group']} {arguments['op']}" if message else arguments["group"]
                lanes.setdefault(lane, []).append(span)
            elif span["tid"] == 0:
                lanes[""].append(span)
        result += [(rank, lane, spans) for lane, spans in lanes.items()]
    return result


def _draw(axis, rows, origin: float, duration: float, colours: dict[str, str]) -> set[str]:
    """Draw one run. Returns what was drawn, for the legend."""
    top, ticks, drawn = 0.0, [], set()
    for rank, lane, spans in rows:
        height = HEIGHTS["communication" if lane else "compute"]
        ticks.append((top + height / 2, lane or f"rank {rank}"))
        if not lane and rank:
            axis.axhline(top - 0.04, color="#999999", linewidth=0.6)
        for span in spans:
            start, width = (span["ts"] - origin) / 1000, span["dur"] / 1000
            box = {"xranges": [(start, width)], "yrange": (top + 0.06, height - 0.12)}
            if lane:
                group = span["args"]["group"]
                axis.broken_barh(**box, facecolor=colours[group], edgecolor="white", linewidth=0.4)
                drawn.add(group)
            elif span["cat"] == "wait" or (span["cat"] == "issue" and width > ISSUE_SHARE * duration):
                axis.broken_barh(**box, **WAITING)
                drawn.add("wait")
            elif span["cat"] in ("phase", "span"):
                kind = span["name"] if span["name"] in PHASES else "other"
                axis.broken_barh(**box, facecolor=colours.get(kind, OTHER), edgecolor="white", linewidth=0.4)
                drawn.add(kind)
                if "micro_batch" in span["args"] and width > LABEL_SHARE * duration:
                    x, y = start + width / 2, top + height / 2
                    axis.text(x, y, span["args"]["micro_batch"], ha="center", va="center", fontsize=7, color="white")
        top += height
    axis.set_ylim(top, 0)
    axis.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.5)
    axis.set_axisbelow(True)
    return drawn
