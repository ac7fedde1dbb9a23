"""The drawn examples of the lesson: one step on two ranks, and the ring all-reduce as a strip and as an animation.

Their numbers come from the code: the gradients from autograd, the frames of the ring from `ring_all_reduce`.
"""

from collections.abc import Callable

import torch

from common.drawing.animation import as_image, save_animation
from common.drawing.figures import COLOURS, SERIES, save_figure
from common.drawing.tables import print_table
from common.experiments.local_ranks import on_ranks
from common.process_groups import Mesh
from step02_data_parallel.collectives_tour import ring_all_reduce
from step02_data_parallel.two_ranks import SAMPLES

CENTERED = {"ha": "center", "va": "center"}

# ---- one step on two ranks -------------------------------------------------------------------------------------------

LEARNING_RATE = 0.1
COLUMNS = {"rank 0": 0.0, "rank 1": 3.2, "one process, for comparison": 7.0}  # left end of each
STAGES = {  # height of each row of boxes, and what it is
    "weights": (4.0, "weights", "parameters"),
    "own": (2.6, "gradient of its\nshare of the loss", "gradients"),
    "sum": (1.2, "after the all-reduce:\nthe sum", "all_reduce"),
    "updated": (-0.2, f"weights - {LEARNING_RATE:g} · sum", "parameters"),
}


def two_ranks(quick: bool) -> None:
    """One step of two weights on two ranks, and on one process: what each holds before and after."""
    ranks = [held_by(SAMPLES[rank::2], SAMPLES[1 - rank :: 2]) for rank in range(2)]
    columns = dict(zip(COLUMNS, [*ranks, held_by(SAMPLES, [])]))
    rows = [(name, *map(numbers, values.values())) for name, values in columns.items()]
    print_table("two weights, one step", ("", *STAGES), rows)
    draw_two_ranks(columns)


def held_by(mine: list, others: list) -> dict[str, list[float]]:
    """What a rank with these samples holds at each stage."""
    start = torch.ones(2)
    own, rest = gradient(start, mine), gradient(start, others)
    held = {"weights": start, "own": own, "sum": own + rest, "updated": start - LEARNING_RATE * (own + rest)}
    return {stage: values.tolist() for stage, values in held.items()}


def gradient(start: torch.Tensor, samples: list) -> torch.Tensor:
    """The gradient of these samples' share of the mean over all samples."""
    weights = start.clone().requires_grad_()
    shares = [(weights @ torch.tensor(x) - y) ** 2 / 2 / len(SAMPLES) for x, y in samples]
    return torch.autograd.grad(sum(shares), weights)[0] if shares else torch.zeros_like(start)


def numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def draw_two_ranks(columns: dict[str, dict[str, list[float]]]) -> None:
    """A column per rank, a row of boxes per stage."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, Rectangle

    figure = Figure(figsize=(9, 5.2), dpi=110)
    axis = figure.add_axes((0, 0, 1, 1))
    for (name, held), left in zip(columns.items(), COLUMNS.values()):
        alone = "one" in name
        look = {"facecolor": "white" if alone else "#F7F7F7", "edgecolor": "#BBBBBB"}
        look |= {"linestyle": "--" if alone else "-", "boxstyle": "round,pad=0.15"}
        axis.add_patch(FancyBboxPatch((left - 0.1, -0.35), 2.2, 6.3, **look))
        look = {"fontsize": 10 if alone else 12, "fontweight": "bold"}
        axis.text(left + 1, 5.72, name.replace(", ", ",\n"), **CENTERED, **look)
        samples = SAMPLES if alone else [SAMPLES[list(columns).index(name)]]
        text = [f"x = ({numbers(x)}),  y = {y:g}" for x, y in samples]
        axis.text(left + 1, 5.12, "\n".join(text), **CENTERED, fontsize=9.5)
        for stage, (low, _, colour) in STAGES.items():
            if alone and stage == "sum":
                continue
            for place, value in enumerate(held[stage]):
                box = Rectangle((left + place, low), 1, 0.72, facecolor=COLOURS[colour], edgecolor="white", linewidth=2)
                axis.add_patch(box)
                where = left + place + 0.5, low + 0.34
                axis.text(*where, f"{value:.3g}", **CENTERED, fontsize=13, color="white", fontweight="bold")
        tops = [low for stage, (low, _, _) in STAGES.items() if not (alone and stage == "sum")]
        for upper, lower in zip(tops, tops[1:]):
            arrow(axis, (left + 1, upper - 0.04), (left + 1, lower + 0.78), "#777777")
    first, second, _ = COLUMNS.values()
    colour = COLOURS["all_reduce"]
    arrow(axis, (first + 1.5, 2.56), (second + 0.5, 1.98), colour)
    arrow(axis, (second + 0.5, 2.56), (first + 1.5, 1.98), colour)
    axis.text((first + second) / 2 + 1, 2.9, "all-reduce", **CENTERED, fontsize=10.5, color=colour, fontweight="bold")
    axis.text(-0.35, 5.12, "its samples", ha="right", va="center", fontsize=10.5)
    for low, caption, _ in STAGES.values():
        axis.text(-0.35, low + 0.36, caption, ha="right", va="center", fontsize=10.5)
    axis.set(xlim=(-2.7, 9.4), ylim=(-0.6, 6.2), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    save_figure(figure, "two_ranks")


def arrow(axis, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axis.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.8})


# ---- the ring --------------------------------------------------------------------------------------------------------

RANKS = 4
RANK_COLOURS = SERIES[:RANKS]
PITCH, ROW = 1.25, 1.65  # from a chunk to the next, from a rank to the next
MOVING = 8  # frames of the animation for each message
STILL, BETWEEN = 1500, 110  # ms that the first of them is shown, and each of the others
Moment = list[list[set[int]]]  # of each rank, of each of its chunks: whose numbers are in the sum


def ring(quick: bool) -> None:
    """The ring all-reduce on 4 ranks, message by message: whose numbers each chunk of each rank contains."""
    found = on_ranks(RANKS, watch_ring, title="ring")
    moments = [[rank[index] for rank in found] for index in range(len(found[0]))]
    rows = []
    for index, moment in enumerate(moments):
        cells = [" ".join("".join(map(str, sorted(chunk))) for chunk in chunks) for chunks in moment]
        rows.append((name_of(index), *cells))
    print_table("ranks whose numbers each chunk contains", ("", *(f"rank {rank}" for rank in range(RANKS))), rows)
    draw_strip(moments)
    draw_animation(moments, 2 if quick else MOVING)


def watch_ring(mesh: Mesh, done: Callable) -> list[list[set[int]]]:
    """On a rank: its chunks before the ring and after each message. Rank r adds 10^r, so that digits tell who is in."""
    tensor = torch.full((RANKS,), 10.0**mesh.rank, dtype=torch.float64)
    seen = [tensor.clone()]
    ring_all_reduce(tensor, mesh.world, lambda phase, step: seen.append(tensor.clone()))
    return [[{rank for rank in range(RANKS) if int(value) // 10**rank % 10} for value in each] for each in seen]


def name_of(index: int) -> str:
    """Of the moment after so many messages."""
    if not index:
        return "before"
    return f"message {index}: " + ("reduce-scatter" if index < RANKS else "all-gather")


def sent_chunk(rank: int, index: int) -> int:
    """Which chunk a rank sends as message `index`, from 1 on, as `ring_all_reduce` does it."""
    return (rank - index) % RANKS  # also in the second half, which goes on where the first ends


def place_of(rank: int, chunk: int) -> tuple[float, float]:
    return chunk * PITCH, -rank * ROW


def draw_chunk(axis, place: tuple[float, float], inside: set[int]) -> None:
    """A square of four quarters, of which those whose rank's numbers are inside have its color."""
    from matplotlib.patches import Rectangle

    x, y = place
    for rank in range(RANKS):
        colour = RANK_COLOURS[rank] if rank in inside else "white"
        quarter = x + 0.5 * (rank % 2), y - 0.5 * (rank // 2) - 0.5
        axis.add_patch(Rectangle(quarter, 0.5, 0.5, facecolor=colour, linewidth=0, zorder=3))
    look = {"edgecolor": "black", "linewidth": 2} if len(inside) == RANKS else {"edgecolor": "#BBBBBB", "linewidth": 1}
    axis.add_patch(Rectangle((x, y - 1), 1, 1, fill=False, **look, zorder=4))


def draw_ranks(axis, moment: Moment, size: float) -> None:
    """A row per rank, and in it its chunks."""
    for rank, chunks in enumerate(moment):
        x, y = place_of(rank, 0)
        axis.text(x - 0.3, y - 0.5, f"rank {rank}", ha="right", va="center", fontsize=size, color=RANK_COLOURS[rank])
        for chunk, inside in enumerate(chunks):
            draw_chunk(axis, place_of(rank, chunk), inside)
    axis.set(xlim=(-1.75, RANKS * PITCH + 0.2), ylim=(-RANKS * ROW - 0.1, 0.85), aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def draw_strip(moments: list[Moment]) -> None:
    """A panel before the ring and one after each message, as ring_frames.png: arrows show what is sent next."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 7.4), dpi=110)
    axes = figure.subplots(2, 4).flatten()
    figure.subplots_adjust(left=0.005, right=0.995, top=0.9, bottom=0.0, wspace=0.02, hspace=0.14)
    for index, (axis, moment) in enumerate(zip(axes, moments)):
        draw_ranks(axis, moment, 9.5)
        titles = {
            0: "start",
            RANKS - 1: f"{index}: each rank has one sum",
            len(moments) - 1: f"{index}: all ranks have all",
        }
        axis.set_title(titles.get(index, str(index)), fontsize=11, loc="left", x=0.02)
        if index < len(moments) - 1:
            for rank in range(RANKS):
                x, y = place_of(rank, sent_chunk(rank, index + 1))
                arrow(axis, (x + 0.5, y - 1.0), (x + 0.5, y - ROW + 0.02), "black")
                if rank == RANKS - 1:
                    arrow(axis, (x + 0.5, 0.67), (x + 0.5, 0.02), "black")
                    from_there = {"ha": "right", "va": "center", "fontsize": 8.5, "color": RANK_COLOURS[rank]}
                    axis.text(x + 0.3, 0.4, f"from rank {rank}", **from_there)
    draw_legend(axes[-1])
    figure.text(0.01, 0.96, "Reduce-scatter: add what arrives", fontsize=13, fontweight="bold")
    figure.text(0.01, 0.478, "All-gather: overwrite with what arrives", fontsize=13, fontweight="bold")
    save_figure(figure, "ring_frames")


def draw_legend(axis) -> None:
    """How to read a chunk."""
    axis.set(xlim=(-1.75, RANKS * PITCH + 0.2), ylim=(-RANKS * ROW - 0.1, 0.85), aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    for y, inside, text in ((0.0, {0}, "numbers of rank 0 only"), (-1.5, {0, 1}, "sum of ranks 0 and 1")):
        draw_chunk(axis, (-1.2, y), inside)
        axis.text(0.1, y - 0.5, text, va="center", fontsize=10.5)
    draw_chunk(axis, (-1.2, -3.0), set(range(RANKS)))
    axis.text(0.1, -3.5, "sum of all ranks", va="center", fontsize=10.5)
    arrow(axis, (-0.7, -4.4), (-0.7, -5.05), "black")
    axis.text(0.1, -4.7, "is sent next", va="center", fontsize=10.5)


def draw_animation(moments: list[Moment], moving: int) -> None:
    """Write ring.gif, with `moving` frames for each message."""
    images, durations = [], []
    for index in range(len(moments)):
        for step in range(moving if index < len(moments) - 1 else 1):
            images.append(draw_moment(moments, index, step / moving))
            durations.append(STILL if step == 0 else BETWEEN)
    durations[-1] *= 2
    save_animation(images, durations, "ring")


def draw_moment(moments: list[Moment], index: int, way: float):
    """The picture after `index` messages, the next one being on its way (0 to 1)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 6.2), dpi=100)
    axis = figure.add_axes((0.01, 0.01, 0.98, 0.9))
    draw_ranks(axis, moments[index], 12)
    if way:
        for rank in range(RANKS):
            chunk = sent_chunk(rank, index + 1)
            x, y = place_of(rank, chunk)
            inside = moments[index][rank][chunk]
            draw_moving(axis, (x + 0.12, y - way * ROW), inside)
            if rank == RANKS - 1:  # and it comes in at the top
                draw_moving(axis, (x + 0.12, (1 - way) * ROW), inside)
    titles = {0: "Each rank has its own numbers", RANKS - 1: "Each rank has the sum of one chunk"}
    titles[len(moments) - 1] = "All ranks have the whole sum"
    text = name_of(index + 1) if way else titles.get(index, name_of(index))
    figure.text(0.03, 0.95, text, fontsize=14, fontweight="bold", va="center")
    return as_image(figure)


def draw_moving(axis, place: tuple[float, float], inside: set[int]) -> None:
    """A chunk on its way, a little smaller, in front of the others."""
    from matplotlib.patches import Rectangle

    x, y = place
    for rank in inside:
        quarter = x + 0.38 * (rank % 2), y - 0.12 - 0.38 * (rank // 2) - 0.38
        axis.add_patch(Rectangle(quarter, 0.38, 0.38, facecolor=RANK_COLOURS[rank], linewidth=0, zorder=6))
    look = {"facecolor": "white", "edgecolor": "black", "linewidth": 1.5}
    axis.add_patch(Rectangle((x, y - 0.88), 0.76, 0.76, **look, zorder=5))
