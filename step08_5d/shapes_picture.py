"""`--shapes` as a picture: a layer from top to bottom, its tensors as boxes, and between them what ranks send."""

from pathlib import Path

from common.config import TrainConfig
from common.drawing.figures import COLOURS, DIMENSIONS, new_figure, write_png
from common.process_groups import DIMENSION_OF

WIDTH, BOX, ARROW, SENT, LINE = 10.0, 0.56, 0.26, 0.62, 0.32  # in units of the picture; an inch has 1.2 of them
COLUMNS = (0.25, "left"), (4.2, "left"), (6.3, "left"), (9.75, "right")  # of a box: place, formula, shape, bytes
INK = {"pp": "white"}  # of words on a dark colour


def draw_shapes(rows: list, legend: list[str], config: TrainConfig, path: str | Path) -> Path:
    """Draw the rows that `shapes.Watch` has seen as PNG. Returns the path.

    Args:
        legend: lines that say what the letters of the formulas mean.
    """
    height = len(rows) * (BOX + ARROW) + SENT + LINE * len(legend)
    height += sum(SENT - ARROW for row in rows if row.calls)
    figure, axis = new_figure(width=WIDTH / 1.2, height=height / 1.2 + 0.35)
    axis.set(xlim=(-0.02, WIDTH + 0.02), ylim=(height, 0))
    axis.axis("off")
    degrees = " x ".join(f"{name} {size}" for name in DIMENSIONS if (size := getattr(config, name)) > 1)
    title = f"one layer on rank 0, forward ({degrees or 'one process'}, {config.dtype})"
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    top, largest = 0.0, max(row.bytes for row in rows)
    for row in rows:
        if row is not rows[0]:
            calls = [(group, f"{op} over {group}\nsends {sent:,} bytes") for op, group, _, sent in row.sent]
            top = _arrow(axis, top, calls)
        top = _box(axis, top, row, row.bytes / largest)
    if config.pp > 1:
        words = f"behind a stage's last layer: send over pp_forward\nsends {rows[-1].bytes:,} bytes"
        top = _arrow(axis, top, [("pp_forward", words)])
    for line in legend:
        top += LINE
        axis.text(0.0, top, line, fontsize=9, color="#444444", va="center")
    return write_png(figure, path)


def _box(axis, top: float, row, share: float) -> float:
    """A tensor; the bar in it is as long as its bytes. Returns where the next thing begins."""
    axis.broken_barh([(0.0, WIDTH)], (top, BOX), facecolor="#F6F8FB", edgecolor=COLOURS["parameters"])
    axis.broken_barh([(0.0, WIDTH * share)], (top + BOX - 0.09, 0.09), facecolor=COLOURS["activations"])
    shape = " x ".join(f"{size:,}" for size in row.shape)
    words = (row.place, "bold"), (f"({row.formula})", "normal"), (shape, "bold"), (f"{row.bytes:,} bytes", "normal")
    for (at, align), (text, weight) in zip(COLUMNS, words):
        axis.text(at, top + BOX / 2 - 0.03, text, fontsize=9, va="center", ha=align, fontweight=weight)
    return top + BOX


def _arrow(axis, top: float, calls: list[tuple[str, str]]) -> float:
    """The way to the next tensor. Beside it (group, words) of what is sent, in the colour of the dimension."""
    bottom = top + (SENT if calls else ARROW)
    axis.annotate("", (0.5, bottom), (0.5, top), arrowprops={"arrowstyle": "-|>", "color": "#555555", "shrinkA": 0})
    each = (WIDTH - 1.2) / max(2, len(calls))
    for place, (group, words) in enumerate(calls):
        name = DIMENSION_OF[group]
        left = 1.0 + place * each
        axis.broken_barh([(left, each - 0.12)], (top + 0.07, SENT - 0.14), facecolor=DIMENSIONS[name])
        look = {"fontsize": 8.5, "va": "center", "ha": "center", "color": INK.get(name, "black"), "linespacing": 1.1}
        axis.text(left + (each - 0.12) / 2, top + SENT / 2, words, **look)
    return bottom
