"""The picture of ranks and of the groups that they form. Of 16 ranks it is the glossary's.

python -m common.drawing.groups    # draws common/figures/groups.png
"""

import common.entry  # noqa: F401 (before torch: one thread per process by default)

# isort: split
import argparse
import math
from pathlib import Path

import numpy as np

from common.drawing.figures import DIMENSIONS, SERIES, new_figure, write_png
from common.process_groups import Degrees, all_groups, coordinates

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
ONLY_EXPERTS = "ep", "edp", "expert_shard", "expert_replica"  # kinds that a model without experts does not use
DARK = DIMENSIONS["pp"], SERIES[0], SERIES[6]  # on these, letters are white
PAPER, LINE, WORDS = "#F6F8FB", "#9AA5B1", "#555555"
CELL, GAP = 0.94, 0.4  # the side of a rank in a raster of 1, and what is free between nodes
MOST_NAMED = 128  # ranks in a picture that names them; of more it shows colours only


def draw(path: str | Path, degrees: Degrees = EXAMPLE, rank: int = RANK, node: int = NODE) -> Path:
    """Draw each kind of group on the same ranks as PNG, and give the groups of `rank` a colour. Returns the path.

    Kinds whose groups are single ranks are left out. Raises UsageError if the path cannot be written.

    Args:
        node: ranks of a node, which are drawn as a block.
    """
    groups, named = all_groups(degrees), degrees.world <= MOST_NAMED
    panels = [each for each in PANELS if each[0] in kinds(groups, degrees)]
    places, per_line = _places(degrees, node, named)
    right, bottom = places.max(axis=0) + CELL
    width, rows = max(11 / 3, 0.378 * (right + 1.36)) if named else 5.5, max(1, math.ceil(len(panels) / 3))
    columns, height = min(3, max(1, len(panels))), 0.503 + width * (bottom + 0.61) / (right + 1.36)
    figure, axes = new_figure(rows, columns, width=columns * width, height=rows * height, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (name, title, colour, words) in zip(axes.flat, panels):
        axis.set(xlim=(-1.2, right + 0.16), ylim=(bottom + 0.16, -0.45), aspect="equal")
        axis.set_title(f"{title}: {words}", loc="left", fontsize=10.5, fontweight="bold")
        (mine,) = (ranks for ranks in groups[name] if rank in ranks)
        _cells(axis, places, mine, rank, colour)
        for number, ranks in enumerate(sorted(groups[name]) if named else ()):
            look = {"va": "center", "color": "white" if ranks == mine and colour in DARK else "black", "zorder": 6}
            for each in ranks:
                x, y = places[each]
                axis.text(x + 0.3, y + 0.47, f"{each}", fontsize=9, ha="center", fontweight="bold", **look)
                axis.text(x + 0.76, y + 0.62, letter(number), fontsize=8, ha="center", style="italic", **look)
        if named:
            _places_named(axis, places, degrees, node, per_line)
    return write_png(figure, path)


def kinds(groups: dict[str, list], degrees: Degrees) -> list[str]:
    """The names of the groups in which somebody has somebody else to talk to."""
    unused = () if degrees.experts else ONLY_EXPERTS
    return [name for name, all_of_them in groups.items() if len(max(all_of_them, key=len)) > 1 and name not in unused]


def letter(number: int) -> str:
    """a to z, then aa, ab and so on."""
    return ("" if number < 26 else letter(number // 26 - 1)) + chr(ord("a") + number % 26)


def _places(degrees: Degrees, node: int, named: bool) -> tuple[np.ndarray, int]:
    """Where each rank is drawn, (world, 2), and how many nodes stand side by side.

    A node is a block. A row of it holds neighbours of the same stage if there are several stages in a node.
    """
    inner = degrees.axes[degrees.axes.index("pp") + 1 :]  # these turn faster than the stages
    neighbours = math.prod(getattr(degrees, axis) for axis in inner)
    node = min(node, degrees.world)
    across = neighbours if 1 < neighbours < node and node % neighbours == 0 and degrees.pp > 1 else min(node, NODE)
    down = math.ceil(node / across) + (0.6 if named else GAP)
    nodes = math.ceil(degrees.world / node)
    per_line = min(nodes, max(1, round(math.sqrt(2.2 * nodes * down / (across + GAP)))))
    block, place = np.divmod(np.arange(degrees.world), node)
    line, beside = np.divmod(block, per_line)
    row, column = np.divmod(place, across)
    return np.stack([beside * (across + GAP) + column, line * down + row], axis=1), per_line


def _cells(axis, places: np.ndarray, mine: tuple[int, ...], rank: int, colour: str) -> None:
    """All ranks, of which those of one group have its colour, and `rank` a thick frame."""
    from matplotlib.collections import PolyCollection

    square = CELL * np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
    thin = 0.8 if len(places) <= MOST_NAMED else 0.0
    others = sorted(set(range(len(places))) - set(mine))
    for chosen, face in (others, PAPER if thin else "#E3E7ED"), (list(mine), colour):
        squares = places[chosen][:, None] + square
        axis.add_collection(PolyCollection(squares, facecolor=face, edgecolor=LINE, linewidth=thin, zorder=2 + thin))
    frame = {"facecolor": colour, "edgecolor": "black", "linewidth": 2.5 if thin else 1.0, "zorder": 4.5}
    axis.add_collection(PolyCollection(places[[rank]][:, None] + square, **frame))


def _places_named(axis, places: np.ndarray, degrees: Degrees, node: int, per_line: int) -> None:
    """The names of the nodes, and of the stages where a row of all nodes is one."""
    for first in range(0, degrees.world, node):
        block = places[first : first + node]
        middle = (block[:, 0].min() + block[:, 0].max() + 1) / 2
        axis.text(middle, block[:, 1].min() - 0.12, f"node {first // node}", fontsize=8, ha="center", color=WORDS)
    for row in sorted(set(places[:, 1])) if degrees.pp > 1 and per_line * node >= degrees.world else ():
        stages = {coordinates(int(each), degrees)["pp"] for each in np.flatnonzero(places[:, 1] == row)}
        if len(stages) == 1:
            words = {"fontsize": 8, "ha": "right", "va": "center", "color": WORDS}
            axis.text(-0.12, row + 0.47, f"stage {stages.pop()}", **words)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m common.drawing.groups", description=__doc__).parse_args()
    print(draw(Path(__file__).parent.parent / "figures" / "groups.png"))
