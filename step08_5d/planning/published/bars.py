"""The playbook's pictures of memory, value by value: what its formulas give beside what its figures show.

Published values were read off the figures, in GiB, of one sequence. States are parameters, gradients and Adam's moments
(2 + 2 + 8 bytes per parameter); activations are 34 s b h per layer (selective recomputation), divided as each figure's
title says. A figure that is wrong has its own formula beside the right one.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import NamedTuple

from common.counts import count_parameters
from common.drawing.charts import bars, legend
from common.drawing.figures import new_figure, write_png
from common.drawing.tables import print_table
from common.presets import PRESETS
from step05_pipeline.cost import stage_parameters
from step08_5d.planning.command_line import Command, add_figure

GIB = 2**30
K = 1024
MODELS = {"1B": PRESETS["llama3-1b"], "8B": PRESETS["llama3-8b"], "70B": PRESETS["llama3-70b"]}
STATE_WIDTHS = (2, 2, 8)


class Bar(NamedTuple):
    """A kind of bar of one figure, over several lengths."""

    figure: str
    model: str
    name: str
    published: dict[int, float]  # GiB of activations by thousands of tokens
    right: float = 34.0  # bytes of s b h per layer and rank
    drawn: float | None = None  # what the figure shows instead
    states: tuple[float, ...] = ()  # GiB of parameters, gradients and moments; () where the figure repeats others
    share: float = 1.0  # of the model's parameters that a rank has

    def activations(self, thousands: int, as_drawn: bool = False) -> float:
        """GiB, by the right formula or by the one that the figure shows."""
        model = MODELS[self.model]
        each = self.drawn if as_drawn and self.drawn else self.right
        return each * thousands * K * model.hidden * model.layers / GIB

    @property
    def states_by_formula(self) -> list[float]:
        return [width * self.share * count_parameters(MODELS[self.model]).total / GIB for width in STATE_WIDTHS]


DRAWN = (1, 4, 16)  # thousands of tokens
ONE_8B, ONE_70B = {1: 4.25, 4: 17, 16: 68}, {1: 21.25, 4: 85, 16: 340}
TP_2, CP_4 = {1: 2.75, 4: 11, 16: 44, 64: 176, 128: 352}, {1: 0.69, 4: 2.75, 16: 11, 64: 44, 128: 88}
FIRST_OF_8 = stage_parameters(MODELS["8B"], 0, 4) / count_parameters(MODELS["8B"]).total  # of its stages, 4 layers
BARS = (
    Bar("journey", "1B", "one GPU", {}, states=(2.30, 2.30, 9.2)),  # whose activations nobody has read off
    Bar("journey", "8B", "one GPU", ONE_8B, states=(14.96, 14.96, 59.8)),
    Bar("journey", "70B", "one GPU", ONE_70B, states=(131.4, 131.4, 525.7)),
    Bar("tp", "70B", "tp 8", {1: 8.125, 4: 32.5, 16: 130}, 10 + 24 / 8, None, (16.4, 16.4, 65.75), 1 / 8),
    Bar("tp", "70B", "tp 16", {1: 7.19, 4: 28.75, 16: 115}, 10 + 24 / 16, None, (8.2, 8.2, 32.9), 1 / 16),
    Bar("tp+sp", "70B", "tp 8 + SP", {1: 2.66, 4: 10.6, 16: 42.5}, 34 / 8, share=1 / 8),
    Bar("tp+sp", "70B", "tp 16 + SP", {1: 1.33, 4: 5.3, 16: 21.25}, 34 / 16, share=1 / 16),
    Bar("cp", "8B", "tp 2", TP_2, 10 + 24 / 2, None, (7.5, 7.5, 29.9), 1 / 2),
    Bar("cp", "8B", "tp 2, cp 4", CP_4, (10 + 24 / 2) / 4, share=1 / 2),
    Bar("5D", "8B", "DP 8, ZeRO-3", ONE_8B, states=(1.87, 1.87, 7.5), share=1 / 8),
    Bar("5D", "8B", "TP 8 + SP", {1: 1.625, 4: 6.5, 16: 26}, 34 / 8, 10 + 24 / 8, share=1 / 8),
    Bar("5D", "8B", "PP 8", ONE_8B, states=(2.60, 2.60, 10.4), share=FIRST_OF_8),
    Bar("5D", "8B", "CP 8", {1: 0.066, 4: 0.265, 16: 1.06}, 34 / 8, 34 / 64, (14.96, 14.96, 59.8)),
)


def add_flags(parser: ArgumentParser) -> None:
    add_figure(parser, "bars")


def show(options: Namespace) -> None:
    """The playbook's pictures of memory, value by value, beside what its formulas give; and a figure of both."""
    rows = []
    for bar in BARS:
        states = (f"{sum(bar.states_by_formula):.1f}", f"{sum(bar.states):.1f}" if bar.states else "-")
        if not bar.published:
            rows.append((f"{bar.figure}: {bar.model}, {bar.name}", "-", *states, "-", "-", ""))
        for length, published in bar.published.items():
            ours, drawn = bar.activations(length), bar.activations(length, as_drawn=True)
            note = f"drawn {drawn / ours:.3g} times too large" if drawn > ours else ""
            note = note or (f"drawn {ours / drawn:.3g} times too small" if drawn < ours else "")
            name = f"{bar.figure}: {bar.model}, {bar.name}"
            rows.append((name, f"{length}k", *states, f"{ours:.4g}", published, note))
    header = ("", "tokens", "states", "published", "activations", "published", "")
    print_table("predicted: GiB of a rank, one sequence", header, rows)
    print(f"\n  figure: {draw(Path(options.out))}")


COLOURS = {"states": "#4477aa", "activations": "#ee8866"}
COLOURS |= {"published states": "#a6c3df", "published activations": "#f7cbb9"}
TOP = 160  # GiB


def draw(path: Path) -> Path:
    """Ours beside published bars, in one panel for each figure. Returns the path."""
    figure, axes = new_figure(columns=2, rows=3, width=10.5, height=9.0)
    grid = axes[2, 0].get_gridspec()
    for axis in axes[2]:
        axis.remove()
    wide = figure.add_subplot(grid[2, :])  # the one with most bars
    for axis, name in zip((*axes[:2].flat, wide), ("journey", "tp", "tp+sp", "cp", "5D")):
        groups = {}
        for bar in (each for each in BARS if each.figure == name and sum(each.states_by_formula) < TOP):
            for length in DRAWN if bar.published else ():
                states = sum(bar.states_by_formula)
                theirs = {"published states": sum(bar.states) or states, "published activations": bar.published[length]}
                ours = {"states": states, "activations": bar.activations(length)}
                groups[f"{bar.name}\n{length}k"] = [ours, theirs]
        bars(axis, groups, colours=COLOURS)
        axis.tick_params(axis="x", labelsize=7)
        axis.axhline(80, color="black", lw=0.8, ls=":")
        axis.set(ylim=(0, TOP), title=f"{name}, {bar.model}", ylabel="GiB")
    legend(figure, columns=4)
    return write_png(figure, path)


COMMAND = Command(add_flags, show)
