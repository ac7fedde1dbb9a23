"""The lesson's first picture: what one process holds during a step, for a model of four layers and two sequences."""

from dataclasses import dataclass, field

from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import print_table

LAYERS, SEQUENCES = 4, 2
# Units of memory of one layer: its weights, its gradient, its two moments; and for each sequence what it keeps for the
# backward, of which its input is a quarter
WEIGHTS, GRADIENT, MOMENTS, KEPT, INPUT = 1, 1, 2, 4, 1
MARGIN = 7  # units of memory above the peak, and for the strip below
HELD = ("parameters", "moments", "gradients", "activations")
CASES = {  # (micro-batches, recomputation)
    "both sequences at once": (1, False),
    "one after the other: gradient accumulation": (2, False),
    "one after the other, and each layer keeps only its input: recomputation": (2, True),
}


@dataclass
class Step:
    """A training step on a virtual clock; a layer's forward of one sequence takes 1, its backward 2."""

    spans: list[tuple[float, float, str]] = field(default_factory=list)  # (start, width, phase)
    levels: list[tuple[int, ...]] = field(default_factory=list)  # units of each of HELD during the span

    @property
    def end(self) -> float:
        start, width, _ = self.spans[-1]
        return start + width

    @property
    def peak(self) -> int:
        return max(map(sum, self.levels))


def one_step(micro_batches: int, recompute: bool) -> Step:
    """What is held in each phase of each layer."""
    step, sequences = Step(), SEQUENCES // micro_batches
    held = {"parameters": LAYERS * WEIGHTS, "moments": LAYERS * MOMENTS, "gradients": 0, "activations": 0}

    def span(phase: str, width: float) -> None:
        step.spans.append((step.end if step.spans else 0.0, width, phase))
        step.levels.append(tuple(held[name] for name in HELD))

    for micro_batch in range(micro_batches):
        for _ in range(LAYERS):
            held["activations"] += (INPUT if recompute else KEPT) * sequences
            span("forward", sequences)
        for _ in range(LAYERS):
            if recompute:
                held["activations"] += (KEPT - INPUT) * sequences
                span("recompute", sequences)
            if micro_batch == 0:  # later ones are added to it
                held["gradients"] += GRADIENT
            span("backward", 2 * sequences)
            held["activations"] -= KEPT * sequences
    span("optimizer", 2)
    return step


def toy(quick: bool) -> None:
    """Units of memory, and time, of a step with four layers and two sequences."""
    steps = {title: one_step(*case) for title, case in CASES.items()}
    print_table("drawn, not measured", ("", "peak", "time"), [(t, s.peak, s.end) for t, s in steps.items()])
    heights = [step.peak + 2 * MARGIN for step in steps.values()]
    figure, axes = new_figure(len(steps), width=8.6, height=5.6, sharex=True, height_ratios=heights)
    for axis, (title, step) in zip(axes, steps.items()):
        draw(axis, title, step)
    axes[-1].set_xlabel("time", fontsize=11, loc="right")
    axes[0].set_xlim(0, max(step.end for step in steps.values()))
    label(axes[0])
    save_figure(figure, "toy")


def draw(axis, title: str, step: Step) -> None:
    """Stacked levels, below them a strip with the phases, and a line at the peak."""
    edges = [start for start, _, _ in step.spans] + [step.end]
    bottom = [0] * len(edges)
    for index, name in enumerate(HELD):
        tops = [low + level[index] for low, level in zip(bottom, [*step.levels, step.levels[-1]])]
        axis.fill_between(edges, bottom, tops, step="post", color=COLOURS[name], linewidth=0)
        bottom = tops
    for start, width, phase in step.spans:
        axis.broken_barh([(start, width)], (-6, 4.5), facecolor=COLOURS[phase], edgecolor="white", linewidth=0.5)
    axis.hlines(step.peak, 0, step.end, color="black", linewidth=1, linestyle="--")
    axis.text(step.end, step.peak + 1, f"peak {step.peak}", fontsize=11, ha="right", va="bottom")
    axis.set_title(title, fontsize=11.5, loc="left")
    axis.set(ylim=(-MARGIN, step.peak + MARGIN), yticks=[], xticks=[])
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)


def label(axis) -> None:
    """Names of the areas and of the phases, in the first panel."""
    centre = {"ha": "center", "va": "center", "color": "white", "fontsize": 11}
    for name, x, y in (("activations", 10, 30), ("moments", 10, 8), ("parameters", 10, 2), ("gradients", 21.8, 14)):
        axis.text(x, y, name, **centre)
    for name, x in (("forward", 4), ("backward", 16), ("update", 25)):
        axis.text(x, -3.7, name, **(centre | {"fontsize": 9 if name == "update" else 10}))
