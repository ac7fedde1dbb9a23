"""The opening picture: what two ranks hold in each stage. A drawing of the idea; `memory` measures it."""

from common.drawing.figures import COLOURS, new_figure, save_figure
from step03_zero.experiments import predictions
from step03_zero.experiments.tools import PARTS, STAGES

RANKS, WIDTH = 2, 2.7  # from rank to rank; a half of a box is 1 wide
TITLES = (
    "stage 0: nothing\nis divided",
    "stage 1: the\noptimizer is",
    "stage 2: gradients\nare, too",
    "stage 3: weights\nare, too",
)
NAMES = ("weights", "gradients", "optimizer")


def holds(quick: bool) -> None:
    """The drawing of what two ranks hold in each stage; nothing is measured."""
    figure, axes = new_figure(columns=len(STAGES), width=10, height=4.3, width_ratios=(9.1, 5.7, 5.7, 5.7))
    for stage, axis in zip(STAGES, axes):
        draw(axis, stage)
        axis.set_title(TITLES[stage], fontsize=13, loc="left", fontweight="bold")
    save_figure(figure, "holds")


def draw(axis, stage: int) -> None:
    """Draw one stage: a column for each rank, as high as the bytes of a parameter, with a box for each part."""
    from matplotlib.patches import Rectangle

    widths, bottom = predictions.OURS["bfloat16"], 0.0
    stored = predictions.held(1, stage, RANKS, widths)
    for part, name, height, held in zip(PARTS, NAMES, widths, stored):
        for rank in range(RANKS):
            for half in range(RANKS):
                look = {"facecolor": "white", "edgecolor": "#BBBBBB", "linewidth": 0.8, "linestyle": ":"}
                if held == height or half == rank:
                    look = {"facecolor": COLOURS[part], "edgecolor": "white", "linewidth": 1.5}
                axis.add_patch(Rectangle((rank * WIDTH + half, bottom), 1, height, **look))
        if stage == 0:
            axis.text(-0.25, bottom + height / 2, f"{name}: {height}", ha="right", va="center", fontsize=12)
        bottom += height
    for rank in range(RANKS):
        axis.text(rank * WIDTH + 1, -0.5, f"rank {rank}", ha="center", va="top", fontsize=12)
    total = f"{sum(stored):.0f} bytes each"
    axis.text(WIDTH / 2 + 1, -2.0, total, ha="center", va="top", fontsize=13, fontweight="bold")
    axis.set(xlim=(-3.4 if stage == 0 else -0.3, 2 * WIDTH - 0.4), ylim=(-3.4, bottom + 0.3))
    axis.axis("off")
