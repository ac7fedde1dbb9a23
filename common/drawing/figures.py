"""Figures of all steps: one palette, one way to begin a figure and one to save it."""

from pathlib import Path

from common.errors import UsageError

COLOURS = {
    # what a rank does
    "forward": "#3B75C4",
    "backward": "#4FA05A",
    "input's gradient": "#4DBCC4",
    "weights' gradient": "#A9C74E",
    "recompute": "#9DB8E3",
    "optimizer": "#8064A2",
    "other": "#BBBBBB",
    "idle": "#EEEEEE",
    # what it sends
    "all_reduce": "#D55E00",
    "reduce_scatter": "#E69F00",
    "all_gather": "#CC79A7",
    "all_to_all": "#F0E442",
    "send": "#882255",
    "receive": "#882255",
    # what its memory holds
    "parameters": "#4C72B0",
    "master weights": "#8DA9D4",
    "gradients": "#DD8452",
    "moments": "#8C8C8C",
    "optimizer state": "#8C8C8C",  # moments and master weights together
    "activations": "#C44E52",
    "temporaries": "#CCB974",
    # where a number comes from
    "predicted": "#0072B2",
    "measured": "#D55E00",
    "published": "#E69F00",
}
# what a rank sends, by the dimension that it sends it for: the colour of the operation that each one uses most
DIMENSIONS = {"dp": "#D55E00", "pp": "#882255", "cp": "#CC79A7", "tp": "#E69F00", "ep": "#F0E442"}
# for things without a colour of their own (Okabe and Ito's, without the yellow)
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A5230", "#333333")

folder = Path("runs")  # where figures are saved; the runner sets it


def new_figure(rows: int = 1, columns: int = 1, width: float = 6.5, height: float = 3.6, **options):
    """Return a figure and its axes: one, or an array of them if there are several panels.

    Args:
        width, height: of the figure, in inches.
        options: for matplotlib's `subplots`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes


def save_figure(figure, name: str) -> None:
    """Save the figure as NAME.png in the folder of this step's figures, and print where."""
    print(f"  figure: {write_png(figure, figure_path(name))}")


def figure_path(name: str) -> Path:
    """Return the path of the figure NAME.png in the folder of this step's figures."""
    return folder / f"{name}.png"


def write_png(figure, path: str | Path) -> Path:
    """Write a figure as a small PNG: 64 colours are enough for lines and bars. Returns the path.

    Raises UsageError if the path cannot be written or its name does not end in .png.
    """
    from PIL import Image

    if Path(path).suffix != ".png":
        raise UsageError(f"cannot draw {path}: its name must end in .png")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        with Image.open(path) as image:
            small = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
        small.save(path, optimize=True)
    except OSError as error:
        raise UsageError(f"cannot draw {path}: {error}") from None
    return Path(path)
