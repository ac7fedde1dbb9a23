"""The diagram of the conjugate operators in a block, with the shapes of a rank in the boxes."""

from step02_data_parallel.experiments.tools import finish_figure

WHOLE, SEQUENCE, HIDDEN = "#E8E8E8", "#BFE3D6", "#C6DBEF"  # the same on all ranks; cut along the sequence; cut in width
OPERATOR = "#F6C667"


def operators(quick: bool) -> None:
    """DRAWN: where f, f*, g and g* stand in a block, without and with sequence parallelism, and what they do."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9.8, 5.0), dpi=120)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, 100), ylim=(0, 51))
    axis.axis("off")
    _panel(
        axis, 29, "tensor parallelism alone: attention and MLP, each is one of these", ("f", "f*"), WHOLE, "(b, s, h)"
    )
    _panel(axis, 5, "with sequence parallelism", ("g", "g*"), SEQUENCE, "(b, s/t, h)")
    handles = [Patch(facecolor=WHOLE, edgecolor="#555555", label="the same on all ranks")]
    handles.append(Patch(facecolor=SEQUENCE, edgecolor="#555555", label="cut along the sequence"))
    handles.append(Patch(facecolor=HIDDEN, edgecolor="#555555", label="cut in heads or MLP width"))
    figure.legend(handles=handles, loc="lower center", ncols=3, fontsize=9, frameon=False)
    finish_figure("operators", figure)


TEXT = {
    "f": ("forward: nothing", "backward: all-reduce"),
    "f*": ("forward: all-reduce", "backward: nothing"),
    "g": ("forward: all-gather", "backward: reduce-scatter"),
    "g*": ("forward: reduce-scatter", "backward: all-gather"),
}


def _panel(axis, bottom: float, title: str, names: tuple[str, str], stream: str, shape: str) -> None:
    """One row: residual, norm, f, columns, attention or MLP, rows, f*, residual."""
    axis.text(1.5, bottom + 19.3, title, fontsize=11, fontweight="bold")
    boxes = [  # left, width, text, colour
        (1.5, 10, f"residual\n{shape}", stream),
        (14, 10, f"RMSNorm\n{shape}", stream),
        (33, 12, "W by columns\n(b, s, h)\nto (b, s, w/t)", HIDDEN),
        (47, 12, "my heads, or\nsilu(gate) up\n(b, s, w/t)", HIDDEN),
        (61, 12, "W by rows\n(b, s, w/t)\nto (b, s, h)", HIDDEN),
        (82, 7, f"add\n{shape}", stream),
    ]
    height, middle = 8.0, bottom + 8
    for left, width, text, colour in boxes:
        _box(axis, left, middle - height / 2, width, height, text, colour)
    for left, name in ((26.5, names[0]), (75.5, names[1])):
        _box(axis, left, middle - height / 2, 4, height, name, OPERATOR, fontsize=13)
        forward, backward = TEXT[name]
        axis.text(left + 2, middle + 6.2, forward, ha="center", fontsize=8.5, color="#0B5394")
        axis.text(left + 2, middle - 7.0, backward, ha="center", fontsize=8.5, color="#A61C00")
    edges = [(11.5, 14), (24, 26.5), (30.5, 33), (45, 47), (59, 61), (73, 75.5), (79.5, 82), (89, 97.5)]
    for start, end in edges:
        _arrow(axis, (start, middle), (end, middle))
    axis.plot([6.5, 6.5, 85.5], [middle + 4, middle + 8.8, middle + 8.8], color="#555555", linewidth=1)
    _arrow(axis, (85.5, middle + 8.8), (85.5, middle + 4))
    axis.text(98, middle, "next", fontsize=8.5, va="center", rotation=90)


def _box(axis, left, bottom, width, height, text, colour, fontsize=8.5) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.6"
    axis.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle=style, facecolor=colour, edgecolor="#555555"))
    axis.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=fontsize)


def _arrow(axis, start: tuple[float, float], end: tuple[float, float]) -> None:
    axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555555", "linewidth": 1})
