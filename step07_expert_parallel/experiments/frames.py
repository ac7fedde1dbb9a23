"""Tokens on their way to their experts and back, as a strip of key frames and as an animation.

Where a row is in each frame comes from the real `Choices` and `Journey` of two ranks, whose rows are numbers here.
"""

from collections.abc import Callable

import torch

from common.drawing.animation import as_image, save_animation
from common.drawing.figures import COLOURS, SERIES, save_figure
from common.drawing.tables import print_table
from common.experiments.local_ranks import on_ranks
from common.process_groups import Degrees, Mesh, build_mesh
from step07_expert_parallel.expert_parallel import Journey
from step07_expert_parallel.moe import Choices

RANKS, TOKENS, EXPERTS, TOP_K = 2, 4, 4, 2  # tokens: of a rank
ROWS = TOKENS * TOP_K
MOVING = 8  # frames of the animation for each move
STILL, BETWEEN = 1700, 120  # ms that the first of them is shown, and each of the others
LEVELS = {"tokens": 6.2, "sorted": 4.2, "arrived": 2.2, "experts": 0.0}  # height of each place
CAPTIONS = {"tokens": "tokens", "sorted": "rows by\nexpert", "arrived": "as they\narrive", "experts": "experts"}
WIDTH = 12.4  # of a rank
STAGES = [  # (where rows are, whether experts have computed them, what happens)
    ("tokens", False, "1  The router has chosen two experts for each token"),
    ("sorted", False, "2  Copy each token twice, and sort the copies by expert"),
    ("arrived", False, "3  Dispatch: an all-to-all to the ranks of these experts"),
    ("experts", False, "4  Sort what has arrived by expert"),
    ("experts", True, "5  Compute: one product per expert"),
    ("arrived", True, "6  Undo that sort"),
    ("sorted", True, "7  Combine: the other all-to-all, back to where they were"),
    ("tokens", True, "8  A token is the sum of its two results, times their gates"),
]
Places = dict[str, dict[int, tuple[float, float]]]  # by level: (x, y) of each row


def dispatch(quick: bool) -> None:
    """Dispatch and combine, 8 tokens and 4 experts on 2 ranks: which rows are where, from a real journey."""
    ranks = on_ranks(RANKS, travel, title="dispatch")
    rows = []
    for rank, seen in enumerate(ranks):
        names = {key: " ".join(map(letter, seen[key])) for key in ("sorted", "arrived", "experts", "back")}
        sent = [sum(seen["counts"][part : part + EXPERTS // RANKS]) for part in range(0, EXPERTS, EXPERTS // RANKS)]
        rows.append((f"rank {rank}", str(seen["counts"]), str(sent), *names.values()))
    header = ("", "rows for each expert", "sent to each rank", "sorted", "arrived", "by expert", "back")
    print_table("tokens A to D are on rank 0, E to H on rank 1", header, rows)
    places = places_of(ranks)
    expert = {row: index for seen in ranks for row, index in seen["expert"].items()}
    draw_strip(places, expert)
    draw_animation(places, expert, 2 if quick else MOVING)


def travel(mesh: Mesh, done: Callable) -> dict:
    """On a rank: the numbers of the rows after each step of the way. Row `token * k + choice`, counted over ranks."""
    mesh = build_mesh(Degrees(dp=RANKS, ep=RANKS, experts=True), mesh.device)
    scores = torch.rand(RANKS, TOKENS, EXPERTS, generator=torch.Generator().manual_seed(11))[mesh.rank]
    chosen = scores.topk(TOP_K).indices
    choices = Choices(chosen, EXPERTS, some_dropped=False)
    numbers = (mesh.rank * ROWS + choices.order).double().unsqueeze(1)
    journey = Journey(choices.counts, mesh.ep)
    by_expert, counts = journey.arrive(journey.start(numbers))
    arrived = torch.empty_like(by_expert).index_copy_(0, journey.order, by_expert)
    seen = {"sorted": numbers, "arrived": arrived, "experts": by_expert, "back": journey.back(by_expert)}
    result = {key: [int(row) for row in rows] for key, rows in seen.items()}
    result |= {"counts": choices.counts.on_host, "received": counts.on_host}
    return result | {"expert": {mesh.rank * ROWS + row: int(index) for row, index in enumerate(chosen.flatten())}}


def letter(row: int) -> str:
    """The token of a row."""
    return "ABCDEFGH"[row // TOP_K]


def places_of(ranks: list[dict]) -> Places:
    """Where each row is drawn at every level."""
    places = {level: {} for level in LEVELS}
    for rank, seen in enumerate(ranks):
        for row in range(rank * ROWS, (rank + 1) * ROWS):
            token, choice = divmod(row - rank * ROWS, TOP_K)
            places["tokens"][row] = rank * WIDTH + 2.7 * token + choice, LEVELS["tokens"]
        for level in ("sorted", "arrived"):
            for place, row in enumerate(seen[level]):
                places[level][row] = rank * WIDTH + place, LEVELS[level]
        rows = iter(seen["experts"])
        for box, count in enumerate(seen["received"]):
            for place in range(count):
                places["experts"][next(rows)] = box_of(rank, box) + place, LEVELS["experts"]
    return places


def box_of(rank: int, box: int) -> float:
    """Left end of the box of a rank's expert."""
    return rank * WIDTH + 5.5 * box


# ---- pictures --------------------------------------------------------------------------------------------------------


def draw_stage(axis, places: Places, expert: dict[int, int], where: dict[int, tuple[float, float]], done: bool) -> None:
    """Two ranks, and every row at its place: light on its way there, filled once its expert has computed it."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    in_the_middle = {"ha": "center", "va": "center"}
    for rank in range(RANKS):
        frame = {"boxstyle": "round,pad=0.25", "facecolor": "#F7F7F7", "edgecolor": "#BBBBBB", "linewidth": 1}
        axis.add_patch(FancyBboxPatch((rank * WIDTH, -0.5), WIDTH - 1.6, 8.6, **frame))
        axis.text(rank * WIDTH + (WIDTH - 1.6) / 2, 7.75, f"rank {rank}", **in_the_middle)
        for token in range(TOKENS):
            x = rank * WIDTH + 2.7 * token
            look = {"facecolor": "white", "edgecolor": "#888888"}
            axis.add_patch(Rectangle((x - 0.1, LEVELS["tokens"] - 0.1), 2.1, 1.1, **look))
            name = letter(rank * ROWS + TOP_K * token)
            axis.text(x + 0.95, LEVELS["tokens"] + 0.43, name, **in_the_middle, color="#BBBBBB", zorder=2)
        for box in range(EXPERTS // RANKS):
            index, x = rank * EXPERTS // RANKS + box, box_of(rank, box)
            look = {"facecolor": "white", "edgecolor": SERIES[index], "linewidth": 2}
            axis.add_patch(Rectangle((x - 0.15, -0.2), 5.2, 1.3, **look))
            axis.text(x + 2.45, 1.4, f"expert {index}", **in_the_middle, fontsize=8, color=SERIES[index])
    for level in ("sorted", "arrived"):
        for x, y in places[level].values():
            axis.add_patch(Rectangle((x, y), 0.9, 0.9, facecolor=COLOURS["idle"], linewidth=0))
    for level, caption in CAPTIONS.items():
        axis.text(-0.7, LEVELS[level] + 0.4, caption, ha="right", va="center", fontsize=8.5)
    for row, (x, y) in where.items():
        colour = SERIES[expert[row]]
        look = {"facecolor": colour if done else "white", "edgecolor": colour, "linewidth": 1.8}
        axis.add_patch(Rectangle((x + 0.04, y + 0.04), 0.82, 0.82, **look, zorder=3))
        look = {"fontsize": 9, "color": "white" if done else colour, "fontweight": "bold"}
        axis.text(x + 0.45, y + 0.43, letter(row), **in_the_middle, **look, zorder=4)
    axis.set(xlim=(-3.4, RANKS * WIDTH - 1.1), ylim=(-0.9, 8.5), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def draw_strip(places: Places, expert: dict[int, int]) -> None:
    """All key frames, as dispatch.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 11.4), dpi=110, layout="constrained")
    for axis, (level, done, title) in zip(figure.subplots(4, 2).flat, STAGES):
        draw_stage(axis, places, expert, places[level], done)
        axis.set_title(title, fontsize=10.5, loc="left", fontweight="bold")
    save_figure(figure, "dispatch")


def draw_animation(places: Places, expert: dict[int, int], moving: int) -> None:
    """Write dispatch.gif, with `moving` frames for each move."""
    images, durations = [], []
    for (level, done, title), (target, _, next_title) in zip(STAGES, [*STAGES[1:], STAGES[-1]]):
        for step in range(moving if target != level else 1):
            way = (1 - torch.cos(torch.tensor(step / moving * torch.pi)).item()) / 2  # slow, fast, slow
            where = {
                row: tuple(a + way * (b - a) for a, b in zip(place, places[target][row]))
                for row, place in places[level].items()
            }
            images.append(draw_moment(places, expert, where, done, next_title if step else title))
            durations.append(STILL if step == 0 else BETWEEN)
    durations[-1] *= 2
    save_animation(images, durations, "dispatch")


def draw_moment(places: Places, expert: dict[int, int], where: dict, done: bool, title: str):
    """One frame of the animation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.6), dpi=100)
    axis = figure.add_axes((0.01, 0.01, 0.98, 0.9))
    draw_stage(axis, places, expert, where, done)
    figure.text(0.02, 0.95, title, fontsize=12, fontweight="bold", va="center")
    return as_image(figure)
