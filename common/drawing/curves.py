"""The picture of a comparison: the curves of all runs, and how far each run is from the reference."""

import math
from pathlib import Path

from common.drawing.figures import SERIES

REFERENCE, ZERO, FAILED = "#CFCFCF", "#F0F0F0", "#FCEDE8"
DOTS = ({"marker": "o", "markersize": 5}, {"marker": "D", "markersize": 9, "markerfacecolor": "none"})  # one per key
PERIOD = 24  # points after which the dashes of the curves repeat
HUGE = 1e6  # a larger difference, or an infinite one, is drawn as an arrow at the right edge


def plot(rows: list, path: Path | str, tolerance: float | None = None) -> None:
    """Draw the `rows` of `compare.compare`, of which the first is the reference, into the picture `path`.

    Above is a panel per key with the curves of all runs. They usually coincide: the reference is a wide grey band, and
    in every dash each colour leaves room for the next ones. Below, each run has a line with its largest relative
    difference in each key; exact zeros are in the grey band on the left, what exceeds the tolerance is on red.
    """
    from matplotlib.figure import Figure

    keys, others = list(rows[0].worst), rows[1:]
    kinds = [row.name if len(others) <= len(SERIES) else row.name.split()[0] for row in others]  # one colour each
    places = {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
    colours = [SERIES[places[kind] % len(SERIES)] for kind in kinds]
    figure = Figure(figsize=(10, 4.6 + 0.25 * len(others)), dpi=130, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3.4, 1.2 + 0.25 * len(others)))
    for axis, key in zip(above.subplots(1, len(keys), squeeze=False)[0], keys):
        for row, kind, colour in zip(rows, [None, *kinds], [REFERENCE, *colours]):
            free = places.get(kind, 0) / max(1, len(places))  # the part of a dash that earlier colours have
            dashes = (0, (PERIOD * (1 - free) / 2, PERIOD * free / 2)) if free else "-"  # in units of the width, 2
            values, width = [row.run.value(step, key) for step in row.steps], 2 if kind else 7
            axis.plot(row.steps, values, color=colour, linestyle=dashes, linewidth=width)
        axis.set_xlabel("step")
        axis.locator_params(axis="x", integer=True)
        _decorate(axis, key.replace("_", " "))
    if others:
        axis = below.subplots()
        _differences(axis, others, keys, colours, tolerance)
        _decorate(axis, f"largest relative difference from {rows[0].name}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _differences(axes, rows: list, keys: list[str], colours: list[str], tolerance: float | None) -> None:
    """A line per run with a dot per key, on a scale that is logarithmic from `least` on and ends with zero."""
    drawn = [worst[0] for row in rows for worst in row.worst.values()] + [tolerance or 0.0]
    drawn = [value for value in drawn if 0 < value < HUGE] or [1e-16]
    least = 10.0 ** math.floor(math.log10(min(drawn)))
    decades = math.ceil(math.log10(max(drawn) / least) + 0.3)
    edge = least * 10.0**decades
    axes.set_xscale("symlog", linthresh=least, linscale=0.7)
    axes.set_xlim(-0.7 * least, edge)
    axes.set_xticks([0.0] + [least * 10.0**power for power in range(0, decades + 1, math.ceil(decades / 10))])
    axes.minorticks_off()
    axes.axvspan(-0.7 * least, least, color=ZERO, zorder=0)
    for line, (row, colour) in enumerate(zip(rows, colours)):
        for index, key in enumerate(keys):
            style = DOTS[index % 2] if row.worst[key][0] < HUGE else {"marker": ">"}
            axes.plot(min(row.worst[key][0], edge), line, color=colour, linestyle="none", clip_on=False, **style)
    for index, key in enumerate(keys):
        axes.plot([], [], color="black", linestyle="none", label=key.replace("_", " "), **DOTS[index % 2])
    if tolerance and tolerance < HUGE:
        axes.axvspan(tolerance, edge, color=FAILED, zorder=0)
        axes.axvline(tolerance, color="black", linestyle="--", linewidth=1.2, label=f"tolerance {tolerance:g}")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(keys) + 1, frameon=False, fontsize="small")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _decorate(axes, title: str) -> None:
    """A title at the left and a light grid instead of a box."""
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
