"""The ring in pictures: a strip with a frame for every hop, and the same as an animation."""

import math

import numpy as np

from common.drawing.animation import as_image, save_animation
from common.drawing.figures import COLOURS, save_figure
from common.drawing.tables import print_table
from step06_context_parallel.experiments.tools import RANK_COLOURS
from step06_context_parallel.layouts import Block, Layout

TOKENS, RANKS = 16, 4
LAYOUT = Layout("zigzag", TOKENS, RANKS)
MOVING = 8  # frames of the animation for each hop; in all but the first, keys and values are on their way
STILL, BETWEEN = 1500, 120  # ms that the first of them is shown, and each of the others
UNSEEN = "#F3F3F3"
# Rank 0 at the top, then clockwise: (x, y) of the ranks on a circle
PLACES = [(math.sin(rank * math.pi / 2), math.cos(rank * math.pi / 2)) for rank in range(RANKS)]


def frames(quick: bool) -> None:
    """The ring hop by hop, 16 tokens on 4 ranks, zigzag: whose keys and values a rank holds, and what it computes."""
    rows = []
    for rank in range(RANKS):
        plan, cells = LAYOUT.plan(rank), []
        for hop in range(RANKS):
            source = (rank - hop) % RANKS
            pairs = sum(block.pairs for block in plan.blocks[source])
            cells.append(f"K/V of {source}: {shape_of(plan.blocks[source])} = {pairs}")
        rows.append((f"rank {rank}, tokens {tokens_of(rank)}", *cells))
    print_table("blocks of queries x keys in each hop; tri: a triangle", ("", *map(hop_name, range(RANKS))), rows)
    draw_strip()
    draw_animation()


def shape_of(blocks: list[Block]) -> str:
    """`tri 2 + 2x2`"""
    shapes = []
    for block in blocks:
        rows, columns = (each.stop - each.start for each in (block.rows, block.columns))
        shapes.append(f"tri {rows}" if block.causal else f"{rows}x{columns}")
    return " + ".join(shapes)


def tokens_of(rank: int) -> str:
    return ", ".join(map(str, LAYOUT.positions(rank)))


def hop_name(hop: int) -> str:
    return f"hop {hop}"


def computed(rank: int, source: int) -> np.ndarray:
    """Which of a rank's queries see which keys of `source`: (seq/cp, seq/cp), read from the blocks of the plan."""
    n = TOKENS // RANKS
    seen = np.zeros((n, n), dtype=bool)
    for block in LAYOUT.plan(rank).blocks[source]:
        rows, columns = (each.stop - each.start for each in (block.rows, block.columns))
        seen[block.rows, block.columns] = np.tri(rows, columns) if block.causal else True
    return seen


# ---- the strip -------------------------------------------------------------------------------------------------------


def draw_strip() -> None:
    """A row for each rank and a column for each hop: the keys and values that it holds, and the pairs it computes."""
    from matplotlib.figure import Figure
    from matplotlib.patches import ConnectionPatch

    figure = Figure(figsize=(9.6, 9.2), dpi=110)
    axes = figure.subplots(RANKS, RANKS)
    figure.subplots_adjust(left=0.12, right=0.98, top=0.87, bottom=0.03, wspace=0.32, hspace=0.42)
    for rank in range(RANKS):
        for hop in range(RANKS):
            draw_cell(axes[rank, hop], rank, (rank - hop) % RANKS, hop)
    for hop in range(RANKS - 1):
        for rank in range(RANKS - 1):  # to the next rank; the last one sends to the first
            ends = {"coordsA": axes[rank, hop].transData, "coordsB": axes[rank + 1, hop + 1].transData}
            colour = RANK_COLOURS[(rank - hop) % RANKS]
            arrow = ConnectionPatch((4.1, 3.6), (-0.45, -0.75), arrowstyle="-|>", color=colour, linewidth=1.8, **ends)
            figure.add_artist(arrow)
    figure.suptitle("Ring attention on 4 ranks: queries stay, keys and values travel", fontsize=13, x=0.02, ha="left")
    subtitle = "Zigzag split of 16 tokens. One color for each rank's keys and values; filled: pairs that are computed."
    figure.text(
        0.02, 0.938, f"{subtitle}\nArrows: sent to the next rank while the hop computes.", fontsize=9.5, va="center"
    )
    figure.text(0.02, 0.008, "Rank 3 sends to rank 0 in the same way (not drawn).", fontsize=9)
    save_figure(figure, "ring_frames")


def draw_cell(axis, rank: int, source: int, hop: int) -> None:
    """One rank in one hop: a card with the keys that it holds above the square of its queries and these keys."""
    colour, n = RANK_COLOURS[source], TOKENS // RANKS
    seen = computed(rank, source)
    for row in range(n):
        for column in range(n):
            face = colour if seen[row, column] else UNSEEN
            axis.fill_between([column, column + 1], row, row + 1, color=face, linewidth=0)
            axis.plot([column, column + 1], [row, row], color="white", linewidth=1)
            axis.plot([column, column], [row, row + 1], color="white", linewidth=1)
    axis.fill_between([0, n], -1.15, -0.35, color=colour, linewidth=0)
    for column, token in enumerate(LAYOUT.positions(source)):
        axis.text(column + 0.5, -0.75, token, ha="center", va="center", fontsize=8.5, color="white", fontweight="bold")
    for row, token in enumerate(LAYOUT.positions(rank)):
        axis.text(-0.15, row + 0.5, token, ha="right", va="center", fontsize=8.5)
    axis.text(n / 2, n + 0.15, f"{seen.sum()} pairs", ha="center", va="top", fontsize=9)
    axis.set(xlim=(-0.5, n), ylim=(n + 0.7, -1.2), aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    axis.set_title(f"K/V of rank {source}", fontsize=9, pad=3, color=colour)
    if rank == 0:
        axis.text(n / 2, -2.35, hop_name(hop), ha="center", fontsize=11.5, fontweight="bold")
    if hop == 0:
        axis.text(-2.5, n / 2, f"rank {rank}", ha="center", va="center", rotation=90, fontsize=11.5, fontweight="bold")


# ---- the animation ---------------------------------------------------------------------------------------------------


def draw_animation() -> None:
    """Write ring.gif: the ring on the left, the mask that fills up on the right."""
    images, durations = [], []
    for hop in range(RANKS):
        moves = range(MOVING if hop < RANKS - 1 else 1)  # K and V travel after every hop but the last
        images += [draw_moment(hop, step / MOVING) for step in moves]
        durations += [STILL if step == 0 else BETWEEN for step in moves]
    durations[-1] *= 2
    save_animation(images, durations, "ring")


def draw_moment(hop: int, way: float):
    """The picture while hop `hop` computes (`way` is 0), or while its keys and values are on their way to the next."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.1), dpi=90)
    ring, mask = figure.subplots(1, 2, width_ratios=(1, 1))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.86, bottom=0.08, wspace=0.06)
    draw_ring(ring, hop, way)
    fill_mask(mask, hop)
    last = hop == RANKS - 1
    doing = "all pairs are done" if last else "compute, and send K and V on"
    figure.text(0.02, 0.95, f"hop {hop}: {doing}", fontsize=12, fontweight="bold", va="center")
    return as_image(figure)


def draw_ring(axis, hop: int, way: float) -> None:
    """Four ranks on a circle, each with its queries, and the cards of keys and values that go round."""
    from matplotlib.patches import Circle

    box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "linewidth": 2}
    axis.add_patch(Circle((0, 0), 1.18, fill=False, edgecolor=COLOURS["idle"], linewidth=6))
    for rank, (x, y) in enumerate(PLACES):
        text, edge = f"rank {rank}\nqueries\n{tokens_of(rank)}", {"edgecolor": RANK_COLOURS[rank]}
        axis.text(0.52 * x, 0.6 * y, text, ha="center", va="center", fontsize=8, bbox=box | edge)
    for source in range(RANKS):
        angle = (source + hop + way) * math.pi / 2
        card = {"boxstyle": "round,pad=0.3", "facecolor": RANK_COLOURS[source], "edgecolor": "none"}
        where = 1.18 * math.sin(angle), 1.18 * math.cos(angle)
        axis.text(*where, f"K, V of {source}", ha="center", va="center", fontsize=8.5, color="white", bbox=card)
    axis.set(xlim=(-1.55, 1.55), ylim=(-1.4, 1.35), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def fill_mask(axis, hop: int) -> None:
    """The whole mask, of which the pairs of all hops up to this one are filled, in the color of their keys."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    picture = np.full((TOKENS, TOKENS), RANKS + 1)  # nothing
    for rank in range(RANKS):
        queries = LAYOUT.positions(rank)
        for distance in range(RANKS):
            source = (rank - distance) % RANKS
            rows, columns = np.nonzero(computed(rank, source))
            places = queries[rows], LAYOUT.positions(source)[columns]
            picture[places] = source if distance <= hop else RANKS
            if distance == hop:
                for row, column in zip(*places):
                    axis.add_patch(Rectangle((column + 0.05, row + 0.05), 0.9, 0.9, fill=False, linewidth=1))
        for query in queries:
            axis.text(-0.3, query + 0.5, rank, ha="right", va="center", fontsize=7.5, color=RANK_COLOURS[rank])
    colours = ListedColormap([*RANK_COLOURS[:RANKS], UNSEEN, "white"])
    axis.imshow(picture, cmap=colours, vmin=0, vmax=RANKS + 1, extent=(0, TOKENS, TOKENS, 0), interpolation="nearest")
    for line in range(TOKENS + 1):
        axis.plot([0, TOKENS], [line, line], color="white", linewidth=1)
        axis.plot([line, line], [0, TOKENS], color="white", linewidth=1)
    axis.set(xlim=(-1.2, TOKENS), ylim=(TOKENS, -0.3), xticks=[], yticks=[])
    axis.set_xlabel("key, in the color of its rank; outlined: this hop", fontsize=8.5)
    axis.set_ylabel("query, and its rank", fontsize=8.5)
    axis.spines[:].set_visible(False)
