"""ZeRO-3's gather, use and free as a strip of key frames and as an animation, from a real step of two ranks."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

from common.drawing.animation import as_image, save_animation
from common.drawing.figures import COLOURS, save_figure
from common.drawing.tables import print_table
from common.experiments.local_ranks import on_ranks
from common.process_groups import Mesh
from step03_zero.by_layer import ZeroByLayer
from step03_zero.experiments.tools import SHAPE, Run
from step03_zero.unit import Unit
from step03_zero.zero import Zero

RANKS = 2
UNITS = ("E", "0", "1", "H")  # in the order of the forward: embedding, two layers, norm with head
SMALL = SHAPE | {"layers": 2, "hidden": 32, "ffn": 64, "seq_len": 8, "zero": 3, "global_batch": RANKS}
MOVING = 8  # frames of the animation in which messages travel, for each key frame
STILL, BETWEEN = 900, 110  # ms that the last of them is shown, and each of the others
TITLES = (
    "1  Forward of E; layer 0 is on its way",
    "2  Forward of layer 0; layer 1 is on its way",
    "3  Forward of layer 1; H is on its way",
    "4  Forward of H",
    "5  Backward of H; layer 1 is on its way again",
    "6  Backward of layer 1; H's gradients travel",
    "7  Backward of layer 0; layer 1's gradients travel",
    "8  Backward of E; layer 0's gradients travel",
    "9  Before the update: half of everything",
    "10  After the update: new weights, no gradients",
)
State = dict[str, str]  # of "W" and "G" of a unit: "absent", "own", "arriving", "whole", "leaving"


def frames(quick: bool) -> None:
    """Gather, use, free: what two ranks hold while each unit computes, in a real step of stage 3."""
    seen = on_ranks(RANKS, watch, title="frames")
    assert seen[0] == seen[1], "both ranks hold the same units at the same time"
    rows = []
    for title, (current, states) in zip(TITLES, seen[0], strict=True):
        cells = (" ".join(f"{unit}:{state[part]}" for unit, state in zip(UNITS, states)) for part in "WG")
        rows.append((title.split(":")[0], "-" if current is None else UNITS[current], *cells))
    print_table("rank 0 of 2, as recorded", ("frame", "computes", "weights", "gradients"), rows)
    draw_strip(seen[0])
    draw_animation(seen[0], 2 if quick else MOVING)


def watch(mesh: Mesh, done: Callable) -> list[tuple[int | None, list[State]]]:
    """On a rank: which unit computes, and the state of all of them, at each key frame of the second step."""
    run, seen = Run(mesh, **SMALL), []
    run.step(0)

    def note(current: int | None, phase: str) -> None:
        seen.append((current, [state_of(run.zero, unit, current, phase) for unit in run.zero.units[::-1]]))

    def then_note(method: Callable) -> Callable:
        def noted(zero: Zero, index: int, *rest) -> None:
            method(zero, index, *rest)
            note(index, "backward")

        return noted

    def observe(phase: str) -> None:
        if phase in ("optimizer", "end"):
            note(None, phase)

    with ExitStack() as patches:
        patches.enter_context(
            mock.patch.object(ZeroByLayer, "_before_backward", then_note(ZeroByLayer._before_backward))
        )
        for index, region in enumerate(run.zero.regions):  # after the hook of `Zero`
            handle = region.first.register_forward_pre_hook(lambda *_, index=index: note(index, "forward"))
            patches.callback(handle.remove)
        run.step(1, observe)
    return seen


def state_of(zero: Zero, unit: Unit, current: int | None, phase: str) -> State:
    """What a rank holds of a unit's weights and gradients. `current`: the region that computes."""
    if phase == "end":
        return {"W": "own", "G": "absent"}
    if phase == "optimizer":  # the gradients have been handed out
        return {"W": "own", "G": "own"}
    computes = unit in zero.regions[current].units
    weights = "own" if unit.gathering is None else "whole" if computes else "arriving"
    gradients = "absent" if unit.reduced is None else "own"
    if zero.in_flight is unit:
        gradients = "leaving"
    elif phase == "backward" and computes:  # they are about to be computed
        gradients = "whole"
    return {"W": weights, "G": gradients}


# ---- pictures --------------------------------------------------------------------------------------------------------

KIND = {"W": "parameters", "G": "gradients"}
ROWS = {"W": (1.5, "weights"), "G": (0.0, "gradients")}
HALF, STEP, WIDTH = 0.78, 2.0, 10.2  # width of half a box; from box to box; from rank to rank


def place(rank: int, unit: int, part: str, half: int) -> tuple[float, float]:
    """Lower left corner of half a box."""
    return rank * WIDTH + unit * STEP + half * HALF, ROWS[part][0]


def draw_moment(axis, current: int | None, states: list[State], way: float = 1.0) -> None:
    """Two ranks, and what each holds. `way`: the part of their way that messages have behind them."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import FancyBboxPatch, Rectangle

    middle = {"ha": "center", "va": "center"}
    for rank in range(RANKS):
        frame = {"boxstyle": "round,pad=0.3", "facecolor": "#F7F7F7", "edgecolor": "#BBBBBB", "linewidth": 1}
        axis.add_patch(FancyBboxPatch((rank * WIDTH - 0.1, -0.2), 7.76, 4.2, **frame))
        axis.text(rank * WIDTH + 3.78, 3.86, f"rank {rank}", **middle, fontsize=11)
        if current is not None:
            x, _ = place(rank, current, "G", 0)
            look = {"facecolor": "none", "edgecolor": "black", "linewidth": 1.6}
            axis.add_patch(Rectangle((x - 0.14, -0.16), 2 * HALF + 0.28, 3.66, **look))
        for unit, state in enumerate(states):
            axis.text(place(rank, unit, "W", 1)[0], 3.02, UNITS[unit], **middle, fontsize=12)
            for part, what in KIND.items():
                for half in range(RANKS):
                    dark, light = (to_rgba(COLOURS[what], share) for share in (1.0, 0.4))
                    x, y = place(rank, unit, part, half)
                    look = {"facecolor": "white", "edgecolor": "#999999", "linewidth": 0.6}
                    held, mine = state[part], half == rank
                    if held == "whole":
                        look["facecolor"] = dark if mine and part == "W" else light
                    elif mine and held in ("own", "arriving"):
                        look["facecolor"] = dark
                    elif held == "leaving":
                        look["facecolor"] = light
                    if way == 1.0 and (held == "leaving" or held == "arriving" and not mine):
                        look |= {"hatch": "/////", "facecolor": "white", "edgecolor": COLOURS[what]}
                    axis.add_patch(Rectangle((x, y), HALF, 1.0, **look))
                    if way < 1.0 and not mine and held in ("arriving", "leaving"):
                        travel(axis, rank, unit, part, half, held, way)
    for part, (y, name) in ROWS.items():
        axis.text(-0.55, y + 0.5, name, ha="right", va="center", fontsize=11, color=COLOURS[KIND[part]])
    axis.set(xlim=(-3.3, RANKS * WIDTH - 2.1), ylim=(-0.6, 4.3), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def travel(axis, rank: int, unit: int, part: str, half: int, held: str, way: float) -> None:
    """Draw a message: the other rank's half of the weights comes, or its half of the gradients goes there."""
    from matplotlib.patches import Rectangle

    here, there = place(rank, unit, part, half), place(half, unit, part, half)
    start, end = (there, here) if held == "arriving" else (here, there)
    smooth = (1 - math.cos(way * math.pi)) / 2
    x, y = (a + smooth * (b - a) for a, b in zip(start, end))
    lift = (0.25 if rank == 0 else -0.25) * math.sin(smooth * math.pi)  # so that both directions are seen
    look = {"facecolor": COLOURS[KIND[part]], "alpha": 0.75, "edgecolor": "black", "linewidth": 0.8, "zorder": 5}
    axis.add_patch(Rectangle((x, y + lift), HALF, 1.0, **look))


def draw_strip(seen: list[tuple[int | None, list[State]]]) -> None:
    """All key frames, as gather_use_free.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 11.2), dpi=110, layout="constrained")
    for axis, title, (current, states) in zip(figure.subplots(5, 2).T.flat, TITLES, seen):
        draw_moment(axis, current, states)
        axis.set_title(title, fontsize=11.5, loc="left", fontweight="bold")
    save_figure(figure, "gather_use_free")


def draw_animation(seen: list[tuple[int | None, list[State]]], moving: int) -> None:
    """Write gather_use_free.gif, with `moving` frames for each key frame."""
    images, durations = [], []
    for title, (current, states) in zip(TITLES, seen):
        in_flight = any({"arriving", "leaving"} & set(state.values()) for state in states)
        for step in range(moving if in_flight else 1):
            images.append(picture(current, states, step / moving if in_flight else 1.0, title))
            durations.append(BETWEEN)
        durations[-1] += STILL
    durations[-1] *= 2
    save_animation(images, durations, "gather_use_free")


def picture(current: int | None, states: list[State], way: float, title: str):
    """One image of the animation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.7), dpi=100)
    axis = figure.add_axes((0.01, 0.01, 0.98, 0.85))
    draw_moment(axis, current, states, way)
    figure.text(0.02, 0.92, title, fontsize=12, fontweight="bold", va="center")
    return as_image(figure)
