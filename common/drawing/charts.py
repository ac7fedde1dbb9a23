"""Bars and lines: the two kinds of chart that most measurements need. Each draws on one axis of a figure.

    figure, (left, right) = new_figure(columns=2, width=9.5)
    bars(left, {"dp 2": [{"one node": 5.2}, {"two nodes": 6.0}]}, marks={"dp 2": [5.1, 5.9]}, value="{:.1f} s")
    lines(right, {"predicted": {64: 0.1, 128: 0.3}, "measured": {64: 0.2}}, dots=("measured",), log="x", ends=False)
    legend(figure)
    save_figure(figure, "name")

Names that the palette knows (`figures.COLOURS`, `figures.DIMENSIONS`) have its colours, others one of `figures.SERIES`.
What happens when is drawn by `lanes`, next door.
"""

import itertools

from common.drawing.figures import COLOURS, DIMENSIONS, SERIES
from common.drawing.lanes import open_axis


def bars(
    axis,
    groups: dict[str, list[dict[str, float]]],
    marks: dict[str, list] | None = None,
    colours: dict[str, str] | None = None,
    value: str = "",
    horizontal: bool = False,
) -> None:
    """Draw groups of bars, each of them a stack of named parts.

    Args:
        groups: by the label on the axis, the bars side by side: sizes by name, from the axis outwards. A bar that is
            no stack has one part.
        marks: by the same labels, what was predicted for each bar: a size, or a list of them, drawn as black lines.
        colours: of names, beside those of the palette.
        value: format of the sum, which is written at the end of each bar.
    """
    names = [name for stacks in groups.values() for stack in stacks for name in stack]
    colour_of, labelled = colours_of(names, colours), set()
    draw, across = (axis.barh, "height") if horizontal else (axis.bar, "width")
    start = "left" if horizontal else "bottom"
    for place, (label, stacks) in enumerate(groups.items()):
        size = 0.8 / len(stacks)
        for number, stack in enumerate(stacks):
            at, end = place - 0.4 + (number + 0.5) * size, 0.0
            for name, part in stack.items():
                look = {across: 0.92 * size, start: end, "color": colour_of[name], "edgecolor": "white"}
                draw(at, part, **look, linewidth=0.5, label=None if name in labelled else name)
                labelled.add(name)
                end += part
            mark = marks[label][number] if marks else []
            marks_here = mark if isinstance(mark, list | tuple) else [mark]
            for each in marks_here:
                ends = [at - 0.5 * size, at + 0.5 * size], [each] * 2
                name = None if "predicted" in labelled else "predicted"
                axis.plot(*(ends[::-1] if horizontal else ends), color="black", linewidth=1.5, label=name)
                labelled.add("predicted")
            words, behind = value.format(end), max([end, *marks_here])
            if horizontal:
                axis.text(behind, at, " " + words, va="center", fontsize=9)
            else:
                axis.text(at, behind, words, ha="center", va="bottom", fontsize=9)
    if horizontal:
        axis.set_yticks(range(len(groups)), groups)
        axis.invert_yaxis()
    else:
        axis.set_xticks(range(len(groups)), groups)
    if value:
        axis.margins(**{"x" if horizontal else "y": 0.12})  # room for the words
    open_axis(axis, "y" if horizontal else "x")


# ---- lines -----------------------------------------------------------------------------------------------------------


def lines(
    axis,
    series: dict[str, dict[float, float]],
    dots: tuple[str, ...] = (),
    dashed: tuple[str, ...] = (),
    colours: dict[str, str] | None = None,
    log: str = "",
    ticks: list[float] | None = None,
    ends: bool = True,
) -> None:
    """Draw a line for each series: y by x.

    Args:
        dots: names of those that are drawn as dots, as measurements are, `dashed` as dashes.
        colours: of names, beside those of the palette.
        log: axes with a logarithmic scale, such as "x" or "xy".
        ticks: the only ones on the axis of x.
        ends: write the names at the ends of the lines, not into a legend.
    """
    colour_of = colours_of(series, colours)
    for name, points in series.items():
        places, values = zip(*sorted(points.items()))
        style = "o" if name in dots else "--" if name in dashed else "-"
        axis.plot(places, values, style, color=colour_of[name], linewidth=2, label=name)
        if ends:
            where = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
            axis.annotate(name, (places[-1], values[-1]), **where, color=colour_of[name], annotation_clip=False)
    for each in log:
        axis.set(**{f"{each}scale": "log"})
    if ticks:
        axis.set_xticks(ticks, [f"{each:,}" for each in ticks])
        axis.minorticks_off()
    open_axis(axis)


def legend(figure, columns: int = 4) -> None:
    """One legend below all panels, with each name once."""
    named = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            named.setdefault(label, handle)
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns, frameon=False)


def colours_of(names, own: dict[str, str] | None) -> dict[str, str]:
    """A colour for each name: its own, that of the palette, or the next of the series."""
    known, names = COLOURS | DIMENSIONS | (own or {}), list(dict.fromkeys(names))
    result = {name: known[name] for name in names if name in known}
    free = itertools.cycle([colour for colour in SERIES if colour not in result.values()] or SERIES)
    return result | {name: next(free) for name in names if name not in known}
