"""What each rank holds at five moments of a step, stage by stage: a drawing of the mechanism, nothing is measured.

A model of three layers is trained on two ranks. Every small square is one half of a layer; rank 0 owns the left halves
and rank 1 the right ones.
"""

from common.drawing.figures import COLOURS, new_figure, save_figure

MOMENTS = (
    "forward\nin layer 1",
    "backward\nin layer 1",
    "backward\nis over",
    "after the\noptimizer",
    "next step\nbegins",
)
NAMES = {
    0: "stage 0: data parallelism",
    1: "stage 1: optimizer state sharded",
    2: "stage 2: and gradients",
    3: "stage 3: and parameters",
}
LAYERS, RANKS = 3, 2
LOOKS = {  # state: colour of what, how much of that colour, hatch, what the legend says
    "old": ("parameters", 0.4, None, "weights of this step"),
    "new": ("parameters", 1.0, None, "updated weights"),
    "arriving": ("parameters", 0.0, "////", "weights in flight"),
    "leaving": ("gradients", 0.4, "////", "gradients in flight"),
    "own": ("gradients", 0.4, None, "this rank's gradients"),
    "sum": ("gradients", 1.0, None, "summed gradients"),
    "optimizer": ("optimizer state", 1.0, None, "optimizer state"),
    "absent": ("other", 0.0, None, "not held"),
}
MESSAGES = {  # (stage, moment): the collectives in flight, and their layers
    (0, 1): "all-reduce 2",
    (1, 1): "reduce-scatter 2",
    (2, 1): "reduce-scatter 2",
    (3, 1): "all-gather 0,\nreduce-scatter 2",
    (3, 0): "all-gather 2",
    (1, 4): "all-gather 1, 2",
    (2, 4): "all-gather 1, 2",
    (3, 4): "all-gather 0",
}


def parameters(stage: int, moment: int, layer: int, mine: bool) -> str:
    """Return the state of one half of a layer's weights. `mine`: this rank owns it."""
    if stage == 0:
        return "old" if moment < 3 else "new"
    if stage < 3:
        if moment < 3 or (moment == 3 and not mine):
            return "old"
        return "new" if mine or layer == 0 else "arriving"
    if mine:
        return "old" if moment < 3 else "new"
    in_use = {0: 1, 1: 1}.get(moment)
    in_flight = {0: 2, 1: 0, 4: 0}.get(moment)
    return "old" if layer == in_use else "arriving" if layer == in_flight else "absent"


def gradients(stage: int, moment: int, layer: int, mine: bool) -> str:
    """Return the state of one half of a layer's gradients."""
    if moment not in (1, 2) or (moment == 1 and layer == 0):
        return "absent"
    if moment == 1:
        return "own" if layer == 1 else "leaving"
    if stage == 0 or mine:
        return "sum"
    return "own" if stage == 1 else "absent"


def optimizer(stage: int, moment: int, layer: int, mine: bool) -> str:
    """Return the state of one half of a layer's master weights and moments."""
    return "optimizer" if stage == 0 or mine else "absent"


def stages(quick: bool) -> None:
    """The drawing of what each rank holds when; nothing is measured."""
    from matplotlib.patches import Patch

    figure, axes = new_figure(len(NAMES), len(MOMENTS), width=11, height=8.6)
    for stage, row in enumerate(axes):
        for moment, axis in enumerate(row):
            draw(axis, stage, moment)
            if stage == 0:
                axis.text(3.4, 4.75, MOMENTS[moment], ha="center", fontsize=12.5, weight="bold")
        name = row[0].text(-0.7, 3.95, NAMES[stage], fontsize=12.5, weight="bold", color="#444444")
        name.set_in_layout(False)  # it is wider than its panel, which must not grow for it
    figure.get_layout_engine().set(h_pad=0.1)
    handles = [Patch(**look(state), label=text) for state, (*_, text) in LOOKS.items()]
    figure.suptitle("P: parameters, G: gradients, O: master weights and moments; the layers are 0, 1, 2", fontsize=12)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=12)
    save_figure(figure, "stages")


def look(state: str) -> dict:
    """Return how a half of a layer in this state is drawn, as options of a matplotlib patch."""
    from matplotlib.colors import to_rgba

    what, share, hatch, _ = LOOKS[state]
    return {"facecolor": to_rgba(COLOURS[what], share), "hatch": hatch, "edgecolor": "#444444", "linewidth": 0.5}


def draw(axis, stage: int, moment: int) -> None:
    """Draw one panel: for each rank three grids, with the layers upwards and their halves side by side."""
    from matplotlib.patches import Rectangle

    axis.set(xlim=(-0.75, 7.3), ylim=(-1.3, 4.0))
    axis.axis("off")
    for rank in range(RANKS):
        left = 3.75 * rank
        axis.text(left + 1.6, 3.25, f"rank {rank}", ha="center", fontsize=11)
        for number, (letter, state_of) in enumerate(zip("PGO", (parameters, gradients, optimizer))):
            x = left + 1.15 * number
            axis.text(x + 0.45, -0.15, letter, ha="center", va="top", fontsize=11, color="#444444")
            for layer in range(LAYERS):
                for half in range(RANKS):
                    state = state_of(stage, moment, layer, half == rank)
                    axis.add_patch(Rectangle((x + 0.45 * half, layer), 0.45, 1, **look(state)))
    for layer in range(LAYERS):
        axis.text(-0.12, layer + 0.5, layer, ha="right", va="center", fontsize=10, color="#444444")
    axis.text(3.4, -0.75, MESSAGES.get((stage, moment), ""), ha="center", va="top", fontsize=10.5, style="italic")
