"""The picture of the glossary: 16 ranks, and the groups that they form.

python -m common.drawing.groups    # draws common/figures/groups.png
"""

import common.entry  # noqa: F401 (before torch: one thread per process by default)

# isort: split
from pathlib import Path

from common.drawing.figures import DIMENSIONS, SERIES, new_figure, write_png
from common.process_groups import Degrees, all_groups

# Two of everything; on the eight ranks of a stage two groups of experts' holders, and two copies of what ZeRO shards
EXAMPLE = Degrees(tp=2, cp=2, pp=2, dp=2, ep=4, zero_replicas=2, experts=True)
RANK, NODE = 5, 8  # the rank whose groups have a colour, ranks of a node
# In the order of the panels: name in the mesh, name in the picture, colour, what its ranks have to do with each other
PANELS = (
    ("tp", "tp", DIMENSIONS["tp"], "share every matrix"),
    ("cp", "cp", DIMENSIONS["cp"], "share every sequence"),
    ("pp_forward", "pp", DIMENSIONS["pp"], "share the layers"),
    ("dp", "dp", DIMENSIONS["dp"], "share the samples"),
    ("dp_cp", "dp_cp", SERIES[0], "same weights, other tokens"),
    ("ep", "ep", DIMENSIONS["ep"], "share the experts"),
    ("shard", "shard", SERIES[4], "share one copy of the state"),
    ("replica", "replica", SERIES[2], "same shard, other copies"),
    ("edp", "edp", SERIES[6], "same experts, other tokens"),
)
DARK = DIMENSIONS["pp"], SERIES[0], SERIES[6]  # on these, letters are white
PAPER, LINE = "#F6F8FB", "#9AA5B1"


def draw(path: str | Path) -> Path:
    """Draw each kind of group on the same 16 ranks as PNG. Returns the path."""
    groups = all_groups(EXAMPLE)
    figure, axes = new_figure(3, 3, width=11.0, height=4.4)
    for axis, (name, title, colour, words) in zip(axes.flat, PANELS, strict=True):
        axis.axis("off")
        axis.set(xlim=(-1.2, 8.5), ylim=(2.1, -0.45), aspect="equal")
        axis.set_title(f"{title}: {words}", loc="left", fontsize=10.5, fontweight="bold")
        for letter, ranks in zip("abcdefgh", sorted(groups[name])):
            for rank in ranks:
                _cell(axis, rank, letter, colour if RANK in ranks else PAPER)
        for node in range(2):
            axis.text(node * 4.4 + 2, -0.12, f"node {node}", fontsize=8, ha="center", color="#555555")
        for stage in range(2):
            axis.text(-0.12, stage + 0.47, f"stage {stage}", fontsize=8, ha="right", va="center", color="#555555")
    return write_png(figure, path)


def _cell(axis, rank: int, letter: str, colour: str) -> None:
    """A rank: a node is a block, a stage a row of it."""
    node, place = divmod(rank, NODE)
    row, column = divmod(place, NODE // 2)
    left, ink = node * 4.4 + column, "white" if colour in DARK else "black"
    thick = 2.5 if rank == RANK else 0.8
    edge = "black" if rank == RANK else LINE
    axis.broken_barh([(left, 0.94)], (row, 0.94), facecolor=colour, edgecolor=edge, linewidth=thick, zorder=2 + thick)
    look = {"va": "center", "color": ink, "zorder": 6}
    axis.text(left + 0.3, row + 0.47, f"{rank}", fontsize=9, ha="center", fontweight="bold", **look)
    axis.text(left + 0.76, row + 0.62, letter, fontsize=8, ha="center", style="italic", **look)


if __name__ == "__main__":
    print(draw(Path(__file__).parent.parent / "figures" / "groups.png"))
