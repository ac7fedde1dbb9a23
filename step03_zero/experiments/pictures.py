"""What each rank holds at five moments of a step, stage by stage: the mechanism drawn, nothing measured.

A model of three layers on two ranks. Every small square is one half of a layer; rank 0 owns the left halves and rank 1
the right ones.
"""

from step02_data_parallel.experiments.tools import finish_figure

MOMENTS = ("forward, in layer 1", "backward, in layer 1", "backward is over", "after the optimizer", "next step begins")
NAMES = {
    0: "stage 0: data parallelism",
    1: "stage 1: optimizer state sharded",
    2: "stage 2: and gradients",
    3: "stage 3: and parameters",
}
LAYERS, RANKS = 3, 2
LOOKS = {  # state: colour, hatch, what the legend says
    "old": ("#9CCBEB", None, "weights of this step"),
    "new": ("#0072B2", None, "updated weights"),
    "arriving": ("#FFFFFF", "////", "weights on their way"),
    "leaving": ("#F7D58B", "////", "gradients on their way"),
    "own": ("#F7D58B", None, "this rank's gradients"),
    "sum": ("#E69F00", None, "summed gradients"),
    "optimizer": ("#009E73", None, "optimizer state"),
    "absent": ("#FFFFFF", None, "not held"),
}
MESSAGES = {  # (stage, moment): what is on the wire
    (0, 1): "all-reduce 2",
    (1, 1): "reduce-scatter 2",
    (2, 1): "reduce-scatter 2",
    (3, 1): "all-gather 0, reduce-scatter 2",
    (3, 0): "all-gather 2",
    (1, 4): "all-gather 1, 2",
    (2, 4): "all-gather 1, 2",
    (3, 4): "all-gather 0",
}


def parameters(stage: int, moment: int, layer: int, mine: bool) -> str:
    """State of one half of a layer's weights; `mine`: this rank owns it."""
    if stage == 0:
        return "old" if moment < 3 else "new"
    if stage < 3:
        if moment < 3 or (moment == 3 and not mine):
            return "old"
        return "new" if mine or layer == 0 else "arriving"
    if mine:
        return "old" if moment < 3 else "new"
    in_use = {0: 1, 1: 1}.get(moment)
    on_its_way = {0: 2, 1: 0, 4: 0}.get(moment)
    return "old" if layer == in_use else "arriving" if layer == on_its_way else "absent"


def gradients(stage: int, moment: int, layer: int, mine: bool) -> str:
    """State of one half of a layer's gradients."""
    if moment not in (1, 2) or (moment == 1 and layer == 0):
        return "absent"
    if moment == 1:
        return "own" if layer == 1 else "leaving"
    if stage == 0 or mine:
        return "sum"
    return "own" if stage == 1 else "absent"


def optimizer(stage: int, moment: int, layer: int, mine: bool) -> str:
    """State of one half of a layer's master weights and moments."""
    return "optimizer" if stage == 0 or mine else "absent"


def stages(quick: bool) -> None:
    """The picture of what is held when, drawn by hand."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 7.8), dpi=110)
    axes = figure.subplots(len(NAMES), len(MOMENTS))
    figure.subplots_adjust(left=0.035, right=0.995, top=0.91, bottom=0.085, wspace=0.06, hspace=0.3)
    for stage, row in enumerate(axes):
        for moment, axis in enumerate(row):
            draw(axis, stage, moment)
            if stage == 0:
                axis.text(3.4, 4.75, MOMENTS[moment], ha="center", fontsize=10, weight="bold")
        row[0].text(-0.7, 3.95, NAMES[stage], fontsize=10, weight="bold", color="#444444")
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#888888", linewidth=0.5, label=text)
        for colour, hatch, text in LOOKS.values()
    ]
    figure.suptitle("P: parameters, G: gradients, O: master weights and moments; the layers are 0, 1, 2", fontsize=10)
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False, fontsize=9)
    finish_figure("stages", figure)


def draw(axis, stage: int, moment: int) -> None:
    """One panel: for each rank three grids, layers upwards and halves side by side."""
    from matplotlib.patches import Rectangle

    axis.set(xlim=(-0.75, 7.3), ylim=(-1.3, 4.0))
    axis.axis("off")
    for rank in range(RANKS):
        left = 3.75 * rank
        axis.text(left + 1.6, 3.25, f"rank {rank}", ha="center", fontsize=8)
        for number, (letter, state_of) in enumerate(zip("PGO", (parameters, gradients, optimizer))):
            x = left + 1.15 * number
            axis.text(x + 0.45, -0.15, letter, ha="center", va="top", fontsize=8, color="#444444")
            for layer in range(LAYERS):
                for half in range(RANKS):
                    colour, hatch, _ = LOOKS[state_of(stage, moment, layer, half == rank)]
                    place = (x + 0.45 * half, layer)
                    box = Rectangle(place, 0.45, 1, facecolor=colour, hatch=hatch, edgecolor="#888888", linewidth=0.5)
                    axis.add_patch(box)
    for layer in range(LAYERS):
        axis.text(-0.12, layer + 0.5, layer, ha="right", va="center", fontsize=7, color="#444444")
    axis.text(3.4, -0.75, MESSAGES.get((stage, moment), ""), ha="center", va="top", fontsize=8, style="italic")
