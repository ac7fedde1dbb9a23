"""Lanes: rows of coloured boxes on an axis of time, of a trace, of a simulation, or of anything that takes turns.

rows = [Lane("rank 0", [Span(0, 2, "forward", "F0"), Span(2, 1, "blocked")]), Lane("link", [Span(1, 2, "send")])]
figure = panels_of_lanes([("title", rows)], "ms", {"forward": "forward", "blocked": "waits", "send": "a message"})
save_figure(figure, "name")
"""

from typing import NamedTuple

from common.drawing.figures import COLOURS, DIMENSIONS, new_figure

WAITING = {"facecolor": "white", "edgecolor": "#555555", "hatch": "/////", "linewidth": 0.5}
LARGEST, SMALLEST = 9.5, 4.5  # points of the words in a box; what needs smaller ones stays empty
PALETTE = COLOURS | DIMENSIONS


class Span(NamedTuple):
    """A box in a lane."""

    start: float
    width: float
    name: str | tuple  # in the palette, "blocked" for hatches, or a colour of matplotlib
    words: str = ""  # written into the box if they fit


class Lane(NamedTuple):
    """A row of boxes: later ones cover earlier ones, and waits cover them all."""

    label: str
    spans: list[Span]
    height: float = 1.0  # rows below 1 are flatter; above one of 1 there is a thin line


def lanes(axis, rows: list[Lane], end: float) -> set[str]:
    """Draw rows of boxes over an axis that goes from 0 to `end`. Returns the names of the boxes, for a legend."""
    inches = 0.92 * axis.figure.get_figwidth() / end
    top, places, drawn = 0.0, [], set()
    for row in rows:
        places.append(top + row.height / 2)
        if row.height == 1.0 and top:
            axis.axhline(top, color="#999999", linewidth=0.4)
        boxes, waits = [], []
        for span in row.spans:
            (waits if span.name == "blocked" else boxes).append(span)
            drawn.add(span.name)
        colours = [PALETTE.get(span.name, span.name) for span in boxes]
        edges = [min(0.5, 10 * inches * span.width) for span in boxes]  # points: at most a seventh of the box
        look = {"facecolors": colours, "edgecolors": "white", "linewidths": edges}
        for spans, style in (boxes, look), (waits, WAITING):  # a call for each box would take a trace's picture 10 s
            where = [(span.start, span.width) for span in spans]
            axis.broken_barh(where, (top + 0.06, row.height - 0.12), **style)
        for span, colour in zip(boxes + waits, colours + ["white"] * len(waits), strict=True):
            _write(axis, span, top + row.height / 2, 72 * inches * span.width, colour)
        top += row.height
    axis.set(xlim=(0, end), ylim=(top, 0))
    axis.set_yticks(places, [row.label for row in rows])
    open_axis(axis, "y")
    axis.spines["left"].set_visible(False)
    return drawn


def panels_of_lanes(
    panels: list[tuple[str, list[Lane]]], unit: str, names: dict[str, str], row: float = 0.33, end: float = 0
):
    """Return a figure of several groups of lanes above each other, `panels`, on one axis of time.

    Args:
        names: for the legend, in its order: what the colour of a span's name means. Those not drawn are left out.
        row: inches of a lane of height 1.
        end: of the axis; where the last box ends, if that is later.
    """
    from matplotlib.patches import Patch

    heights = [sum(each.height for each in rows) for _, rows in panels]
    height = row * sum(heights) + 0.45 * len(panels) + 0.8
    shape = {"squeeze": False, "sharex": True, "height_ratios": heights}
    figure, axes = new_figure(len(panels), width=10, height=height, **shape)
    end = max(end, *(span.start + span.width for _, rows in panels for each in rows for span in each.spans))
    drawn = set()
    for axis, (title, rows) in zip(axes[:, 0], panels):
        drawn |= lanes(axis, rows, end)
        axis.set_title(title, loc="left", fontsize=10.5)
        axis.tick_params(labelsize=9)
    axis.set_xlabel(unit)
    looks = {name: {"facecolor": colour} for name, colour in PALETTE.items()} | {"blocked": WAITING}
    handles = [Patch(label=label, **looks[name]) for name, label in names.items() if name in drawn]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9.5, frameon=False)
    return figure


def _write(axis, span: Span, middle: float, points: float, colour) -> None:
    """Write a span's words into its box, which is so many points wide, in the ink that can be read on its colour."""
    from matplotlib.colors import to_rgb

    size = min(LARGEST, points / (0.62 * len(span.words) + 0.35))
    if span.words and size >= SMALLEST:
        light = sum(weight * part for weight, part in zip((0.3, 0.59, 0.11), to_rgb(colour))) > 0.55
        look = {"ha": "center", "va": "center", "fontsize": size, "color": "black" if light else "white"}
        axis.text(span.start + span.width / 2, middle, span.words, **look, clip_on=True)


def open_axis(axis, without_grid: str = "") -> None:
    """No frame, and no grid nor ticks along an axis of labels."""
    axis.spines[["top", "right"]].set_visible(False)
    if without_grid:
        axis.grid(visible=False, axis=without_grid)
        axis.tick_params(axis=without_grid, length=0)
