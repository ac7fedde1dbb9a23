"""What the lesson draws: an MLP of two matrices on two ranks, number by number, and the four operators."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import nn

from common.drawing.figures import COLOURS, SERIES, save_figure
from common.experiments.local_ranks import on_ranks
from common.process_groups import Mesh
from step04_tensor_parallel.operators import Split
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear

# One token of width 2 and an MLP of width 4: y = relu(x W1) W2
X = torch.tensor([[1.0, 2.0]])
W1 = torch.tensor([[1.0, 2.0, -1.0, 1.0], [1.0, -2.0, 1.0, 1.0]])
W2 = torch.tensor([[1.0, 0.0], [1.0, -1.0], [2.0, 1.0], [0.0, 1.0]])
RANKS, WIDTH = 2, W1.shape[1]
RANK_COLOURS, SHARED = SERIES, "#E4E4E4"  # what a rank alone has, and what all have
BY_TOKENS, BY_WIDTH = "#9DB8E3", "#B9DDBE"


def toy(quick: bool) -> None:
    """An MLP cut by columns, then by rows, on 2 ranks: every number, forward and backward."""
    ranks = on_ranks(RANKS, forward_and_backward, title="toy")
    hidden = F.relu(X @ W1)
    for rank, found in enumerate(ranks):
        print(f"  rank {rank}: " + ", ".join(f"{name} {integers(each)}" for name, each in found.items()))
        assert torch.equal(found["y"], hidden @ W2)
        assert torch.equal(found["dx"], sum(each["my dx"] for each in ranks))
    early = sum(F.relu(X[:, [rank]] @ W1[[rank]]) for rank in range(RANKS))
    print(f"  rows first, ReLU before the sum: {integers(early)} instead of {integers(hidden)}")
    draw_toy(ranks)


def forward_and_backward(mesh: Mesh, done: Callable) -> dict[str, torch.Tensor]:
    """On a rank: what it holds at each moment. The gradient of y is (1, 1)."""
    split = Split(mesh.world, sequence_parallel=False, mode="plain")
    mine = slice(*(WIDTH * each // RANKS for each in (mesh.rank, mesh.rank + 1)))
    first = ColumnParallelLinear(nn.Parameter(W1[:, mine].t().contiguous()), split)
    second = RowParallelLinear(nn.Parameter(W2[mine].t().contiguous()), split)
    x = X[None].clone().requires_grad_()
    before = first(x)
    hidden = F.relu(before)
    y = second(hidden)
    (gradient,) = torch.autograd.grad(y.sum(), before, retain_graph=True)
    y.sum().backward()
    found = {"x W1": before, "hidden": hidden, "summand": hidden @ W2[mine], "y": y}
    found |= {"my dx": gradient @ W1[:, mine].t(), "dx": x.grad}
    return {name: each.detach()[0] for name, each in found.items()}


def integers(tensor: torch.Tensor) -> str:
    return "(" + ", ".join(f"{each:.0f}" for each in tensor.flatten().tolist()) + ")"


# ---- the toy ---------------------------------------------------------------------------------------------------------

PLACES = {"x": 3.6, "W1": 7.0, "hidden": 12.6, "W2": 18.4, "summand": 22.0, "y": 27.0}  # left edges
TITLES = {
    "x": "one token x",
    "W1": "W1, cut by\ncolumns",
    "hidden": "relu(x W1)",
    "W2": "W2, cut by\nrows",
    "summand": "summand",
    "y": "y",
}


def draw_toy(ranks: list[dict[str, torch.Tensor]]) -> None:
    """One process above, the two ranks below it. A matrix of a rank shows the part that it does not hold as empty."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.7), dpi=110, layout="constrained")
    axis = figure.subplots()
    axis.set(xlim=(0, 29.3), ylim=(16.4, -2.6), aspect="equal")
    axis.axis("off")
    owners = [column * RANKS // WIDTH for column in range(WIDTH)]
    for name, title in TITLES.items():
        width = {"W1": WIDTH, "hidden": WIDTH}.get(name, 2)
        axis.text(PLACES[name] + width / 2, -0.5, title, ha="center", va="bottom", fontsize=11)
    everybody = [-1] * RANKS
    hidden = F.relu(X @ W1)
    rows = [("one\nprocess", (X, hidden, hidden @ W2), owners)]
    rows += [
        (f"rank {rank}", (X, each["hidden"], each["summand"]), [owner if owner == rank else None for owner in owners])
        for rank, each in enumerate(ranks)
    ]
    for number, (title, (x, inside, out), held) in enumerate(rows):
        top, rank = 5.4 * number, number - 1
        middle = top + 1.5
        axis.text(0, middle + 0.5, title, va="center", fontsize=12, fontweight="bold")
        draw_matrix(axis, PLACES["x"], middle, x, [everybody])
        draw_matrix(axis, PLACES["W1"], middle - 0.5, W1, [held] * 2)
        whole = torch.zeros(1, WIDTH)
        whole[0, [owner is not None for owner in held]] = inside[0]
        draw_matrix(axis, PLACES["hidden"], middle, whole, [held])
        draw_matrix(axis, PLACES["W2"], top, W2, [[owner] * 2 for owner in held])
        draw_matrix(axis, PLACES["summand" if number else "y"], middle, out, [[rank] * 2 if number else everybody])
        for sign, left in (("\u00b7", 6.3), ("=", 11.8), ("\u00b7", 17.5), ("=", 21.2)):
            axis.text(left, middle + 0.5, sign, ha="center", va="center", fontsize=15)
        if number:
            total = [everybody]
            draw_matrix(axis, PLACES["y"], middle, ranks[rank]["y"], total)
            axis.annotate("", (PLACES["y"] - 0.2, middle + 0.5), (24.2, middle + 0.5), arrowprops=arrow())
    colour = COLOURS["all_reduce"]
    axis.plot([25.4, 25.4], [7.4, 12.8], color=colour, linewidth=4, solid_capstyle="round")
    axis.text(25.4, 14.1, "all-reduce:\nadd up", ha="center", va="center", fontsize=11, color=colour)
    axis.text(14.6, 15.9, "no communication: a rank's hidden numbers meet its own rows of W2", ha="center", fontsize=11)
    axis.plot([PLACES["W1"], 24.0], [15.15, 15.15], color="#777777", linewidth=1)
    save_figure(figure, "toy")


def arrow() -> dict:
    return {"arrowstyle": "-|>", "color": COLOURS["all_reduce"], "linewidth": 1.6}


def draw_matrix(axis: Axes, left: float, top: float, values: torch.Tensor, owners: list[list[int | None]]) -> None:
    """Cells with numbers, in the color of the rank that owns them; -1: all ranks have it, None: not here."""
    from matplotlib.patches import Rectangle

    for row, (line, owned) in enumerate(zip(values.tolist(), owners, strict=True)):
        for column, (value, owner) in enumerate(zip(line, owned, strict=True)):
            corner, look = (left + column, top + row), {"facecolor": "white", "edgecolor": "#CCCCCC", "linestyle": ":"}
            if owner is not None:
                look = {"facecolor": SHARED if owner < 0 else RANK_COLOURS[owner], "edgecolor": "white"}
                ink = "black" if owner != 0 else "white"
                axis.text(
                    corner[0] + 0.5, corner[1] + 0.5, f"{value:.0f}", ha="center", va="center", fontsize=11.5, color=ink
                )
            axis.add_patch(Rectangle(corner, 1, 1, linewidth=1.2, **look))


# ---- the operators ---------------------------------------------------------------------------------------------------


def operators(quick: bool) -> None:
    """A sublayer's tensors with tensor parallelism alone and with sequence parallelism, and the operators between."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.3), dpi=110, layout="constrained")
    axis = figure.subplots()
    axis.set(xlim=(-0.5, 101.5), ylim=(54, -1))
    axis.axis("off")
    for top, sequence_parallel in ((0, False), (26, True)):
        draw_sublayer(axis, top, sequence_parallel)
    legend = {
        "the same on every rank": SHARED,
        "each rank its own tokens": BY_TOKENS,
        "its own part of each matrix": BY_WIDTH,
    }
    for left, (text, colour) in zip((2, 33, 68), legend.items(), strict=True):
        axis.plot(left, 51.5, "s", markersize=13, color=colour, markeredgecolor="#555555", markeredgewidth=0.8)
        axis.text(left + 2.5, 51.5, text, va="center", fontsize=11)
    save_figure(figure, "operators")


def draw_sublayer(axis: Axes, top: float, sequence_parallel: bool) -> None:
    """One row: the residual stream, a norm, the first operator, two products, the second operator, the sum."""
    title = "with sequence parallelism" if sequence_parallel else "tensor parallelism alone"
    between = "(b, s/tp, h)" if sequence_parallel else "(b, s, h)"
    colour = BY_TOKENS if sequence_parallel else SHARED
    axis.text(0, top + 0.6, title, fontsize=12.5, fontweight="bold", va="center")
    boxes = [  # left, width, text, color
        (0, 11, f"residual\n{between}", colour),
        (13, 11, f"norm\n{between}", colour),
        (33, 13, "W by columns\n(b, s, w/tp)", BY_WIDTH),
        (48, 13, "my heads, or\nsilu(gate)\u00b7up\n(b, s, w/tp)", BY_WIDTH),
        (63, 13, "W by rows:\na summand\n(b, s, h)", BY_WIDTH),
        (86, 11, f"add\n{between}", colour),
    ]
    middle = top + 9.5
    for left, width, text, face in boxes:
        draw_box(axis, left, middle, width, text, face)
    names = ("g", "g*") if sequence_parallel else ("f", "f*")
    first = ("all-gather", "reduce-scatter") if sequence_parallel else ("nothing", "all-reduce")
    second = ("reduce-scatter", "all-gather") if sequence_parallel else ("all-reduce", "nothing")
    for left, name, works in ((26, names[0], first), (78.5, names[1], second)):
        draw_box(axis, left, middle, 5, name, "#F8E0A0", size=14)
        for line, (direction, work) in enumerate(zip(("forward", "backward"), works)):
            ink = COLOURS[work.replace("-", "_")] if work != "nothing" else "#777777"
            place = left + 2.5, top + 17.4 + 3.0 * line
            axis.text(*place, f"{direction}: {work}", ha="center", fontsize=10.5, color=ink, fontweight="bold")
    for left, right in ((11, 13), (24, 26), (31, 33), (46, 48), (61, 63), (76, 78.5), (83.5, 86), (97, 100)):
        axis.annotate("", (right, middle), (left, middle), arrowprops={"arrowstyle": "-|>", "color": "#555555"})
    path = {"arrowstyle": "-|>", "color": "#555555", "connectionstyle": "arc,angleA=90,angleB=90,armA=12,armB=12"}
    axis.annotate("", (91.5, middle - 5), (5.5, middle - 5), arrowprops=path)


def draw_box(axis: Axes, left: float, middle: float, width: float, text: str, colour: str, size: float = 10) -> None:
    from matplotlib.patches import FancyBboxPatch

    box = FancyBboxPatch((left, middle - 4.5), width, 9, boxstyle="round,pad=0,rounding_size=1", facecolor=colour)
    box.set(edgecolor="#555555", linewidth=0.8)
    axis.add_patch(box)
    axis.text(left + width / 2, middle, text, ha="center", va="center", fontsize=size)
