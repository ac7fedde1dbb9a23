"""Drawings: two ranks with two micro-batches; 1F1B's circle; messages that wait for each other, or have one order."""

from common.drawing.figures import COLOURS, save_figure
from common.drawing.lanes import lanes
from common.drawing.tables import print_table
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.messages import Transfer, place_messages
from step05_pipeline.schedules.simulator import Costs, Timeline, simulate
from step05_pipeline.schedules.timeline import lanes_of

MESSAGE = COLOURS["send"]
IN_THE_MIDDLE = {"ha": "center", "va": "center"}


def toy(quick: bool) -> None:
    """SIMULATED: two ranks, one batch or two micro-batches: when each rank works, and what it keeps; drawn."""
    lines = {
        "one batch: only one rank works at a time": simulate(build_schedule("naive", 2, 1), Costs(F=2, I=2, W=2)),
        "two micro-batches, forwards first (AFAB): both ranks keep two": simulate(build_schedule("afab", 2, 2)),
        "two micro-batches, backwards early (1F1B): rank 1 keeps one": simulate(build_schedule("1f1b", 2, 2)),
    }
    rows = [(title, f"{line.makespan:g}", f"{line.ideal:g}", str(line.in_flight)) for title, line in lines.items()]
    print_table("2 ranks; a micro-batch takes F = 1, B = 2", ("", "units", "of them work", "in flight"), rows)
    draw_toy(lines)


def draw_toy(lines: dict[str, Timeline]) -> None:
    """Two stages of a model above, the time lines below, with an arrow for each message."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    figure = Figure(figsize=(8.6, 6.4), dpi=120, layout="constrained")
    axes = figure.subplots(1 + len(lines), 1, height_ratios=(0.9, 1, 1, 1))
    look = {"boxstyle": "round,pad=0.08", "facecolor": "#F7F7F7", "edgecolor": "#888888"}
    for left, rank, layers in ((0.4, 0, "embedding, layers 1 and 2"), (7.1, 1, "layers 3 and 4, head, loss")):
        axes[0].add_patch(FancyBboxPatch((left, 0.15), 4.5, 0.9, **look))
        axes[0].text(left + 2.25, 0.78, f"rank {rank}", **IN_THE_MIDDLE, fontsize=11, fontweight="bold")
        axes[0].text(left + 2.25, 0.42, layers, **IN_THE_MIDDLE, fontsize=10.5)
    arrow = {"arrowstyle": "-|>", "color": MESSAGE, "linewidth": 2}
    for y, start, end, text in ((0.82, 5.0, 7.0, "hidden states"), (0.32, 7.0, 5.0, "their gradient")):
        axes[0].annotate("", (end, y), (start, y), arrowprops=arrow)
        axes[0].text(6, y + 0.08, text, ha="center", va="bottom", fontsize=9.5, color=MESSAGE)
    axes[0].set(xlim=(0, 12), ylim=(0, 1.25), xticks=[], yticks=[])
    axes[0].spines[:].set_visible(False)
    for axis, (title, line) in zip(axes[1:], lines.items()):
        lanes(axis, lanes_of(line, names=True), 12)
        starts = {(rank, action): start for rank, row in enumerate(line.spans) for action, start, _ in row}
        for rank, row in enumerate(line.spans):
            for action, _, end in row:
                if (action.kind, rank) in (("F", 0), ("B", 1)):
                    used = starts[1 - rank, action] + 0.1, 1.5 - rank
                    axis.annotate("", used, (end - 0.12, rank + 0.5), arrowprops=arrow, zorder=5)
        axis.set_title(f"{title}; {line.makespan:g} units", loc="left", fontsize=10.5, fontweight="bold")
        axis.set_xticks(range(0, 13))
    axes[-1].set_xlabel("time", fontsize=9.5)
    save_figure(figure, "toy")


# ---- the circle ------------------------------------------------------------------------------------------------------


def circle(quick: bool) -> None:
    """SIMULATED: 1F1B on two ranks with messages as long as a forward: from the forward of 2 to that of 4; drawn."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    line = simulate(build_schedule("1f1b", 2, 8), Costs(communication=1))
    spans = {(rank, str(action)): (start, end) for rank, row in enumerate(line.spans) for action, start, end in row}
    begin, end = spans[0, "F2"][0], spans[0, "F4"][0]
    print(f"\n1F1B, 2 ranks, a message takes F: {line.makespan:g} units; from F2 to F4 on rank 0 {end - begin:g}")
    figure = Figure(figsize=(8.6, 2.4), dpi=120, layout="constrained")
    axis = figure.subplots()
    lanes(axis, lanes_of(line, names=True), line.makespan)
    for text in axis.texts:
        text.set_clip_on(True)  # most of the step is outside the picture
    for rank, name in ((0, "F2"), (1, "F2"), (1, "B2"), (0, "B2"), (0, "F4")):
        start, width = spans[rank, name][0], spans[rank, name][1] - spans[rank, name][0]
        axis.add_patch(Rectangle((start, rank + 0.05), width, 0.9, fill=False, edgecolor="black", linewidth=2.5))
    arrow = {"arrowstyle": "-|>", "color": MESSAGE, "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
    for rank, name in ((0, "F2"), (1, "B2"), (0, "F4")):
        sent, used = spans[rank, name][1], spans[1 - rank, name][0]
        axis.annotate("", (used, 1.5 - rank), (sent, rank + 0.5), arrowprops=arrow, zorder=5)
    axis.set(xlim=(begin - 2, end + 4), xlabel="time; a message takes 1")
    axis.set_xticks(range(int(begin) - 2, int(end) + 5))
    save_figure(figure, "circle")


# ---- deadlock --------------------------------------------------------------------------------------------------------


def deadlock(quick: bool) -> None:
    """The messages of 1F1B on 3 ranks in their common order, and two orders that wait forever; drawn."""
    programs = place_messages(build_schedule("1f1b", 3, 2))
    halves = [[item for item in program if isinstance(item, Transfer)] for program in programs]
    order = common_order(halves)
    rows = []
    for number, (sender, output, receiver) in enumerate(order, 1):
        rows.append((number, f"{output.direction} {output.micro_batch}", f"rank {sender} to {receiver}"))
    print_table("messages in the order in which all ranks issue them", ("", "message", ""), rows)
    draw_deadlock(order)


def common_order(halves: list[list[Transfer]]) -> list[tuple]:
    """(sender, output, receiver) of all messages, in an order that every rank's own list follows."""
    left, order = [list(each) for each in halves], []
    while any(left):
        for rank, row in enumerate(left):
            if row and row[0].kind == "send" and left[row[0].peer][0].output == row[0].output:
                order.append((rank, row[0].output, row[0].peer))
                left[row.pop(0).peer].pop(0)
                break
        else:
            raise RuntimeError("the ranks have no common order")
    return order


def draw_deadlock(order: list[tuple]) -> None:
    """Two queues that cross on the left, the common order on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.8, 4.9), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.12))
    places = {"send F1": (0, 0), "receive B0": (0, 1), "send B0": (1, 0), "receive F1": (1, 1)}
    for text, (column, row) in places.items():
        half(left, column * 1.6, row * 2, text, "#FCEDE8" if row == 0 else "white")
    for start, end in (("send F1", "receive F1"), ("send B0", "receive B0")):
        (a, b), (c, d) = places[start], places[end]
        side = 0.42 if a < c else -0.42
        connect(left, (a * 1.6 + side, b * 2), (c * 1.6 - side, d * 2), "--")
    lines = [
        "Rank 0 works F0 F1 B0 B1, rank 1 F0 B0 F1 B1.",
        "F0 has arrived (not drawn). Now each sends",
        "what it has just made, then receives what it needs.\n",
        "What one asks for first, the other asks for second:",
        "both wait forever.",
    ]
    left.text(0.8, 4.9, "\n".join(lines), ha="center", fontsize=10.5, linespacing=1.4)
    left.set_title("each rank has its own order (1F1B, 2 ranks)", fontsize=10.5, loc="left", fontweight="bold")
    stuck = 5
    for number, (sender, output, receiver) in enumerate(order, 1):
        y = (number - 1) * 0.78
        name = f"{'F' if output.direction == 'forward' else 'B'}{output.micro_batch}"
        colour = "#EEEEEE" if number < stuck else "#FCEDE8" if number == stuck else "white"
        half(right, sender * 1.3, y, f"{number}: send {name}", colour, 0.45)
        half(right, receiver * 1.3, y, f"{number}: receive", colour, 0.45)
        side = 0.45 if sender < receiver else -0.45
        connect(right, (sender * 1.3 + side, y), (receiver * 1.3 - side, y), "-")
    right.set_title("all ranks follow one list (1F1B, 3 ranks)", fontsize=10.5, loc="left", fontweight="bold")
    right.text(
        -0.45,
        8 * 0.78 - 0.1,
        f"Is {stuck} stuck? All before it got through (gray),\nso both of its ranks have come to it.",
        va="top",
        fontsize=10,
    )
    for axis, ranks, step in ((left, 2, 1.6), (right, 3, 1.3)):
        for rank in range(ranks):
            axis.text(rank * step, -0.75, f"rank {rank}", **IN_THE_MIDDLE, fontsize=10.5, fontweight="bold")
        axis.set(xlim=(-0.6, (ranks - 1) * step + 0.6), ylim=(7.6, -1.1), xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    save_figure(figure, "deadlock")


def half(axis, x: float, y: float, text: str, colour: str, width: float = 0.42) -> None:
    """A box: one rank's half of a message."""
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x - width, y - 0.28), 2 * width, 0.56, facecolor=colour, edgecolor="#888888"))
    axis.text(x, y, text, **IN_THE_MIDDLE, fontsize=9.5)


def connect(axis, start: tuple[float, float], end: tuple[float, float], line: str) -> None:
    arrow = {"arrowstyle": "-|>", "color": MESSAGE, "linewidth": 1.8, "linestyle": line, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", end, start, arrowprops=arrow)
