"""The picture of a comparison: the curves of all runs, and how far each run is from the reference."""

import itertools
from pathlib import Path

from common.drawing.figures import SERIES, write_png
from common.drawing.lanes import open_axis

REFERENCE, ZERO, FAILED = "#CFCFCF", "#F0F0F0", "#FCEDE8"
DOTS = ("o", 25, True), ("D", 70, False)  # marker, size, filled; one per key
PERIOD = 24  # points after which the dashes of the curves repeat
LEAST, MOST = 1e-18, 10.0  # the scale of differences; larger ones are drawn at its end


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
    heights = 3.4, 1.2 + 0.25 * len(others)
    figure = Figure(figsize=(10, sum(heights)), dpi=130, layout="constrained")
    axes = figure.subplot_mosaic([keys, ["differences"] * len(keys)], height_ratios=heights)
    for key in keys:
        for row, kind, colour in zip(rows, [None, *kinds], [REFERENCE, *colours]):
            free = places.get(kind, 0) / max(1, len(places))  # the part of a dash that earlier colours have
            dashes = (0, (PERIOD * (1 - free) / 2, PERIOD * free / 2)) if free else "-"  # in units of the width, 2
            values, width = [row.run.value(step, key) for step in row.steps], 2 if kind else 7
            axes[key].plot(row.steps, values, color=colour, linestyle=dashes, linewidth=width)
        axes[key].set_title(key.replace("_", " "), loc="left")
        axes[key].set_xlabel("step")
        axes[key].locator_params(axis="x", integer=True)
    axes["differences"].set_title(f"largest relative difference from {rows[0].name}", loc="left")
    _differences(axes["differences"], others, keys, colours, tolerance)
    for axis in axes.values():
        axis.grid(alpha=0.3)
        open_axis(axis)
    write_png(figure, path)


def _differences(axis, rows: list, keys: list[str], colours: list[str], tolerance: float | None) -> None:
    """A line per run with a dot per key, on a scale that is logarithmic but for its beginning, zero."""
    axis.set_xscale("symlog", linthresh=LEAST, linscale=0.7)
    axis.set_xlim(-0.7 * LEAST, MOST)
    axis.set_xticks([0.0] + [10.0**power for power in range(-18, 2, 3)])
    axis.axvspan(-0.7 * LEAST, LEAST, color=ZERO, zorder=0)
    for key, (marker, size, filled) in zip(keys, itertools.cycle(DOTS)):
        found, lines = [min(row.worst[key][0], MOST) for row in rows], range(len(rows))
        for x, y, edges, label in (found, lines, colours, None), ([], [], "black", key.replace("_", " ")):
            look = {"edgecolors": edges, "facecolors": edges if filled else "none", "label": label, "clip_on": False}
            axis.scatter(x, y, size, marker=marker, zorder=3, **look)
    if tolerance:
        axis.axvspan(tolerance, MOST, color=FAILED, zorder=0)
        axis.axvline(tolerance, color="black", linestyle="--", linewidth=1.2, label=f"tolerance {tolerance:g}")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(keys) + 1, frameon=False, fontsize="small")
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
