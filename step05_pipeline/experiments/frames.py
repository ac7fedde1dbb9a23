"""1F1B fills and drains, as a strip of moments and as an animation, played by the simulator."""

from common.drawing.animation import as_image, save_animation
from common.drawing.figures import COLOURS, save_figure
from common.drawing.lanes import lanes
from common.drawing.tables import print_table
from step05_pipeline.schedules.actions import Action
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Timeline, simulate
from step05_pipeline.schedules.timeline import NAMES, lanes_of

RANKS, MICRO_BATCHES = 4, 8
MOMENTS = [  # (time, what happens)
    (1.5, "fill: 0 travels down"),
    (4.5, "full: all others wait for B0"),
    (8.5, "B0's gradient travels up"),
    (16.5, "steady: nobody waits"),
    (26.5, "drain: the last gradient"),
    (32.5, "only rank 0 still works"),
]
BETWEEN, LAST = 280, 2500  # ms that each frame of the animation is shown, and the last one
BOX, GAP = 2.0, 0.9  # width of a rank in the picture, and between two


def frames(quick: bool) -> None:
    """SIMULATED: 1F1B on 4 ranks with 8 micro-batches, moment by moment; drawn, and as an animation."""
    line = simulate(build_schedule("1f1b", RANKS, MICRO_BATCHES))
    rows = []
    for time, title in MOMENTS:
        doing = [str(action_at(row, time) or "waits") for row in line.spans]
        kept = [" ".join(map(str, kept_at(row, time))) or "-" for row in line.spans]
        rows.append((f"{time:g}", title, *(f"{each}, keeps {cards}" for each, cards in zip(doing, kept))))
    print_table("what each rank does, and the micro-batches that it keeps", ("time", "", *names()), rows)
    draw_strip(line)
    draw_animation(line, 2 if quick else 1)


def names() -> list[str]:
    return [f"rank {rank}" for rank in range(RANKS)]


def action_at(row, time: float) -> Action | None:
    """What a rank does at a time; None if it waits."""
    return next((action for action, start, end in row if start <= time < end), None)


def kept_at(row, time: float) -> list[int]:
    """The micro-batches whose activations a rank keeps: from the start of the forward to the end of the backward."""
    started = [action.micro_batch for action, start, _ in row if action.kind == "F" and start <= time]
    done = {action.micro_batch for action, _, end in row if action.kind == "B" and end <= time}
    return [each for each in started if each not in done]


def arriving(line: Timeline, time: float, length: float) -> list[tuple[int, int, str]]:
    """(sender, receiver, result of which action) of the messages sent in the `length` before a time."""
    found = []
    for rank, row in enumerate(line.spans):
        for action, _, end in row:
            other = rank + (1 if action.kind == "F" else -1)
            if time - length < end <= time and 0 <= other < RANKS:
                found.append((rank, other, str(action)))
    return found


# ---- pictures --------------------------------------------------------------------------------------------------------


def draw_strip(line: Timeline) -> None:
    """All moments, as filling.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 5.6), dpi=110, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)
    for number, (axis, (time, title)) in enumerate(zip(figure.subplots(3, 2).flat, MOMENTS), 1):
        draw_moment(axis, line, time, length=1.0)
        axis.set_title(f"{number}  {title}", fontsize=10.5, loc="left", fontweight="bold")
        axis.set_title(f"time {time:g}", fontsize=9.5, loc="right", color="#666666")
    save_figure(figure, "filling")


def draw_moment(axis, line: Timeline, time: float, length: float) -> None:
    """The ranks side by side: what each of them does and keeps, and the messages between them."""
    from matplotlib.patches import Rectangle

    in_the_middle = {"ha": "center", "va": "center"}
    for rank, row in enumerate(line.spans):
        x, action = rank * (BOX + GAP), action_at(row, time)
        colour = COLOURS[NAMES[action.kind] if action else "idle"]
        axis.add_patch(Rectangle((x, 0), BOX, 1.1, facecolor=colour, edgecolor="#888888", linewidth=0.8))
        look = {"fontsize": 12, "fontweight": "bold", "color": "white"} if action else {"fontsize": 9.5}
        axis.text(x + BOX / 2, 0.53, str(action) if action else "waits", **in_the_middle, **look)
        axis.text(x + BOX / 2, 1.45, f"rank {rank}", **in_the_middle, fontsize=9.5)
        for place, number in enumerate(kept_at(row, time)):
            left = x + place * 0.5
            card = {"facecolor": COLOURS["activations"], "edgecolor": "white", "linewidth": 1}
            axis.add_patch(Rectangle((left, -0.75), 0.48, 0.55, **card))
            axis.text(left + 0.24, -0.49, number, **in_the_middle, fontsize=9, color="white")
    for sender, receiver, sent in arriving(line, time, length):
        down = receiver > sender
        start = sender * (BOX + GAP) + (BOX if down else 0)
        end, y = receiver * (BOX + GAP) + (0 if down else BOX), 0.78 if down else 0.3
        arrow = {"arrowstyle": "-|>", "color": COLOURS["send"], "linewidth": 2, "shrinkA": 1, "shrinkB": 1}
        axis.annotate("", (end, y), (start, y), arrowprops=arrow)
        axis.text((start + end) / 2, y + 0.17, sent, **in_the_middle, fontsize=8.5, color=COLOURS["send"])
    axis.set(xlim=(-0.15, RANKS * (BOX + GAP) - GAP + 0.15), ylim=(-0.9, 1.75), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def draw_animation(line: Timeline, coarser: int) -> None:
    """Write filling.gif: the ranks above, and below the time line that they write."""
    from matplotlib.figure import Figure

    images, times = [], [step / 2 + 0.25 for step in range(0, int(2 * line.makespan), coarser)]
    for time in times:
        figure = Figure(figsize=(7.6, 4.4), dpi=90)
        above, below = figure.add_axes((0.03, 0.5, 0.95, 0.4)), figure.add_axes((0.09, 0.09, 0.89, 0.34))
        draw_moment(above, line, time, length=0.5)
        past = [[span for span in row if span[1] <= time] for row in line.spans]
        lanes(below, lanes_of(Timeline(tuple(map(tuple, past)))), line.makespan)
        below.axvline(time, color="black", linewidth=1)
        title = next(title for until, title in PHASES if time < until)
        figure.text(0.03, 0.95, f"1F1B: {title}", fontsize=11.5, fontweight="bold", va="center")
        images.append(as_image(figure))
    save_animation(images, [BETWEEN * coarser] * (len(images) - 1) + [LAST], "filling")


PHASES = [  # (until when, what it is called)
    (4, "the pipeline fills"),
    (12, "the first gradient travels up"),
    (22, "steady, forwards and backwards take turns"),
    (100, "the pipeline drains"),
]
