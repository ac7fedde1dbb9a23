"""The playbook's pictures of memory, value by value: what its formulas give beside what its figures show.

Published values were read off the figures, in GiB, of one sequence. States are parameters, gradients and Adam's moments
(2 + 2 + 8 bytes per parameter); activations are 34 s b h per layer (selective recomputation), divided as each figure's
title says. A figure that is wrong has its own formula beside the right one.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common.counts import count_parameters
from common.drawing.charts import bars, legend
from common.drawing.figures import new_figure, write_png
from common.drawing.tables import print_table
from common.model_config import ModelConfig
from common.presets import PRESETS
from step01_single_gpu.memory_model import gpt
from step05_pipeline.cost import stage_parameters
from step08_5d.planning.command_line import Command, add_figure

GIB = 2**30
K = 1024
LLAMA_3B = ModelConfig(128256, 3072, 28, 24, 8, 8192, True)
MODELS = {"1B": PRESETS["llama3-1b"], "3B": LLAMA_3B, "8B": PRESETS["llama3-8b"], "70B": PRESETS["llama3-70b"]}
MODELS |= {"405B": PRESETS["llama3-405b"]}
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
    held: Callable[[ModelConfig], float] = lambda model: count_parameters(model).total  # parameters of a rank

    def activations(self, thousands: int, as_drawn: bool = False) -> float:
        """GiB, by the right formula or by the one that the figure shows."""
        model = MODELS[self.model]
        each = self.drawn if as_drawn and self.drawn else self.right
        return each * thousands * K * model.hidden * model.layers / GIB

    @property
    def states_by_formula(self) -> list[float]:
        return [width * self.held(MODELS[self.model]) / GIB for width in STATE_WIDTHS]


def _divided(by: int) -> Callable[[ModelConfig], float]:
    return lambda model: count_parameters(model).total / by


def _first_of_8(model: ModelConfig) -> float:
    return stage_parameters(model, 0, model.layers // 8)


DRAWN = (1, 4, 16)  # thousands of tokens
ONE_8B, ONE_70B = {1: 4.25, 4: 17, 16: 68}, {1: 21.25, 4: 85, 16: 340}
BARS = (
    Bar("journey", "1B", "one GPU", {}, states=(2.30, 2.30, 9.2)),  # whose activations nobody has read off
    Bar("journey", "8B", "one GPU", ONE_8B, states=(14.96, 14.96, 59.8)),
    Bar("journey", "70B", "one GPU", ONE_70B, states=(131.4, 131.4, 525.7)),
    Bar("tp", "70B", "tp 8", {1: 8.125, 4: 32.5, 16: 130}, 10 + 24 / 8, None, (16.4, 16.4, 65.75), _divided(8)),
    Bar("tp", "70B", "tp 16", {1: 7.19, 4: 28.75, 16: 115}, 10 + 24 / 16, None, (8.2, 8.2, 32.9), _divided(16)),
    Bar("tp+sp", "70B", "tp 8 + SP", {1: 2.66, 4: 10.6, 16: 42.5}, 34 / 8, held=_divided(8)),
    Bar("tp+sp", "70B", "tp 16 + SP", {1: 1.33, 4: 5.3, 16: 21.25}, 34 / 16, held=_divided(16)),
    Bar(
        "cp",
        "8B",
        "tp 2",
        {1: 2.75, 4: 11, 16: 44, 64: 176, 128: 352},
        10 + 24 / 2,
        None,
        (7.5, 7.5, 29.9),
        _divided(2),
    ),
    Bar("cp", "8B", "tp 2, cp 4", {1: 0.69, 4: 2.75, 16: 11, 64: 44, 128: 88}, (10 + 24 / 2) / 4, held=_divided(2)),
    Bar("5D", "8B", "DP 8, ZeRO-3", ONE_8B, states=(1.87, 1.87, 7.5), held=_divided(8)),
    Bar("5D", "8B", "TP 8 + SP", {1: 1.625, 4: 6.5, 16: 26}, 34 / 8, 10 + 24 / 8, held=_divided(8)),
    Bar("5D", "8B", "PP 8", ONE_8B, states=(2.60, 2.60, 10.4), held=_first_of_8),
    Bar("5D", "8B", "CP 8", {1: 0.066, 4: 0.265, 16: 1.06}, 34 / 8, 34 / 64, (14.96, 14.96, 59.8)),
)
# GiB of activations by length, of whole models in half precision without recomputation (figure "memusage_activations")
WHOLE = {"8B": {1: 9.25, 2: 28.5, 4: 97.0, 8: 354.0, 16: 1348.0}}
WHOLE |= {"70B": {1: 46.3, 2: 142.5, 4: 485.0, 8: 1770.0, 16: 6740.0}}
WHOLE |= {"405B": {1: 145.7, 2: 448.9, 4: 1527.8, 8: 5575.6, 16: 21231.0}}
# The same of 4k tokens with no, selective and full recomputation (figure "memory-recomputation"): s b h more of dropout
RECOMPUTED = {"1B": (44.3, 4.26, 0.258), "3B": (63.7, 11.2, 0.668), "8B": (97.0, 17.0, 1.02)}
RECOMPUTED |= {"70B": (485.0, 85.0, 5.03), "405B": (1528.0, 268.0, 15.8)}


def whole(name: str, thousands: int, mode: str = "none") -> float:
    """GiB of the activations of a whole model, as in the figures of `WHOLE`."""
    return gpt.text_activations(gpt.from_model(MODELS[name]), 1, thousands * K, mode) / GIB


def recomputed(name: str) -> list[float]:
    """GiB of the activations of 4k tokens, by mode of recomputation, with the mask of the embedding's dropout."""
    more = 4 * K * MODELS[name].hidden / GIB
    return [whole(name, 4, mode) + more for mode in ("none", "selective", "full")]


SIGNIFICANT = 0.5  # activations count once they take half as much as the states
LONG = 4, 16, 32, 64, 128  # thousands of tokens


class Claim(NamedTuple):
    """What its two sentences about activations come to for a model; a micro-batch of one sequence, no fused attention.

    states: GiB, with 16 bytes per parameter of the GPT.
    shares: activations over states, by thousands of tokens.
    significant: the first of these lengths from which on they are.
    less: times less activations with selective recomputation, 4k tokens.
    less_in_all: times less of states and activations together.
    """

    states: float
    shares: dict[int, float]
    significant: int
    less: float
    less_in_all: float


def claim(name: str) -> Claim:
    states = sum(gpt.states(gpt.from_model(MODELS[name]).parameters, True, False).values()) / GIB
    shares = {length: whole(name, length) / states for length in (1, 2, 4, 8, 16)}
    significant = next(length for length, share in shares.items() if share > SIGNIFICANT)
    kept, selective = whole(name, 4), whole(name, 4, "selective")
    return Claim(states, shares, significant, kept / selective, (states + kept) / (states + selective))


def long_70b(thousands: int, mode: str) -> float:
    """GiB of a rank: 70B with tp 16 and sequence parallelism, states and the activations of one sequence."""
    [bar] = [bar for bar in BARS if bar.name == "tp 16 + SP"]
    kept = {"selective": 34, "full": 2}[mode] / 16  # full: a layer's input, which is divided like all else
    return sum(bar.states_by_formula) + bar._replace(right=kept).activations(thousands)


def print_claims() -> None:
    """Judge two sentences of the playbook, and print a figure that its text does not show."""
    rows = []
    for name in MODELS:
        found = claim(name)
        shares = (f"{share:.0%}" for share in found.shares.values())
        cells = f"{found.significant}k", f"{found.less:.1f}", f"{found.less_in_all:.2f}"
        rows.append((name, f"{found.states:,.0f}", *shares, *cells))
    header = ("", "states, GiB", *(f"{length}k" for length in claim("1B").shares), "over half", "selective: times less")
    print_table("predicted: activations / states, 16 bytes per parameter", (*header, "in all"), rows)
    rows = []
    for mode in ("selective", "full"):
        rows.append((mode, *(f"{long_70b(length, mode):.1f}" for length in LONG)))
    print_table("predicted: GiB of a rank, 70B, tp 16 + SP", ("", *(f"{length}k" for length in LONG)), rows)


def add_flags(parser: ArgumentParser) -> None:
    add_figure(parser, "bars")


def show(options: Namespace) -> None:
    """Print every published value beside ours, and draw the bars of 1k, 4k and 16k tokens."""
    rows = []
    for bar in BARS:
        states = (f"{sum(bar.states_by_formula):.1f}", f"{sum(bar.states):.1f}" if bar.states else "-")
        if not bar.published:
            rows.append((f"{bar.figure}: {bar.model}, {bar.name}", "-", *states, "-", "-", ""))
        for length, published in bar.published.items():
            ours, drawn = bar.activations(length), bar.activations(length, as_drawn=True)
            note = f"drawn {drawn / ours:.3g} times too large" if drawn > ours else ""
            note = note or (f"drawn {ours / drawn:.3g} times too small" if drawn < ours else "")
            rows.append(
                (f"{bar.figure}: {bar.model}, {bar.name}", f"{length}k", *states, f"{ours:.4g}", published, note)
            )
    header = ("", "tokens", "states", "published", "activations", "published", "")
    print_table("predicted: GiB of a rank, one sequence", header, rows)
    rows = [
        (f"{name}, {length}k", f"{whole(name, length):.1f}", shown)
        for name, by in WHOLE.items()
        for length, shown in by.items()
    ]
    print_table("predicted: GiB of activations without recomputation", ("", "formula", "published"), rows)
    rows = []
    for name, shown in RECOMPUTED.items():
        rows.append(
            (name, *(cell for ours, theirs in zip(recomputed(name), shown) for cell in (f"{ours:.3g}", theirs)))
        )
    header = ("4k tokens", "none", "published", "selective", "published", "full", "published")
    print_table("predicted: GiB of activations with recomputation", header, rows)
    print_claims()
    print(f"\n  figure: {draw(Path(options.out))}")


COLOURS = {
    "states": "#4477aa",
    "activations": "#ee8866",
    "published states": "#a6c3df",
    "published activations": "#f7cbb9",
}
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
