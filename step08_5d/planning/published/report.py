"""The published runs as a report: how well predictions rank them, late pipelines, memory, failures, and a figure."""

import itertools
import math
import statistics
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.drawing.figures import COLOURS, SERIES, new_figure, write_png
from common.drawing.tables import print_table
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.published import memory as published_memory
from step08_5d.planning.published import runs as published
from step08_5d.planning.published.memory import Holds
from step08_5d.planning.published.runs import H100, PAUSE, Fit, Judgement, Run, guess, was_late
from step08_5d.planning.search import named
from step08_5d.planning.time.machines import Habits
from step08_5d.planning.time.speed import lateness, times

# Tokens per second and GPU in figures of the playbook, which no fit has seen; its size is not said, but 3B comes close
DEGREES = (2, 4, 8, 16, 32)
SCALING = {  # read off; m: micro-batches
    "pp_1f1b_scaling, m = pp - 1": (7400, 8000, 7900, 6700, 3700),
    "pp_1f1b_scaling, m = 32": (15300, 13900, 11600, 7900, 3700),
    "tp_scaling": (13923, 12421, 10903, 6246, 2146),
    "tp_sp_scaling": (14167, 13460, 10889, 6159, 3610),
}
LARGEST = {"tp_scaling": (3, 8, 12, 16, 20), "tp_sp_scaling": (4, 10, 20, 40, 100)}  # their micro-batches
FULL = 68e9  # bytes of an 80 GB GPU: all pipelines that held more were late


def show(options) -> None:
    """Fit the models of time and memory to half of the published runs and judge them on the other half, both ways."""
    runs = published.read_runs()
    print(f"{len(runs):,} published runs of {len({run.pair for run in runs})} pairs of model and nodes")
    parts, seen_by = published.halves(runs), {}
    for number, (of_fit, others) in enumerate(parts):
        fit, holds = published.fitted(of_fit), published_memory.fitted(of_fit)
        fits = partial(published_memory.fits, holds=holds)
        result = published.judge(others, partial(published.predicted, fit=fit), fits=fits)
        rows = [
            (f"{name} on {nodes} nodes", f"{result.within[name, nodes]:.2f}", f"{result.gain[name, nodes]:.0%}")
            for name, nodes in result.within
        ]
        header = ("", "Spearman", "MFU of the chosen run / best MFU")
        print_table(f"half {number + 1}, fitted to the other", header, rows)
        medians = (f"{statistics.median(each.values()):.2f}" for each in (result.within, result.gain))
        print(f"  over all runs: {result.spearman:.2f}; medians of the columns: {', '.join(medians)}")
        print_unseen(others, fit)
        print_worst(others, result, fit)
        seen_by |= dict.fromkeys(others, holds)
    fit = published.fitted(runs)
    print_late(runs, fit)
    print_scaling(fit, published_memory.fitted(runs))
    print_cells(runs, fit)
    print_memory(runs, parts, seen_by)
    print(f"  figure: {draw(runs, fit, options.out)}")


def print_worst(runs: list[Run], result: Judgement, fit: Fit, shown: int = 3) -> None:
    """The fastest runs of the pair in which the model chose worst, and the one that it chose."""
    pair = min(result.gain, key=result.gain.get)
    of_pair = sorted((run for run in runs if run.pair == pair and run.mfu), key=lambda run: -run.mfu)
    chosen = result.chosen[pair]
    rows = [
        (name, named(run.layout), f"{run.mfu:.1%}", f"{published.predicted(run, fit):.1%}")
        for name, run in [*((f"place {place + 1}", run) for place, run in enumerate(of_pair[:shown])), ("", chosen)]
    ]
    rows[-1] = (f"chosen: place {of_pair.index(chosen) + 1}", *rows[-1][1:])
    half = sum(run.mfu >= of_pair[0].mfu / 2 for run in of_pair)
    title = f"the worst choice: {pair[0]} on {pair[1]} nodes; {half} of {len(of_pair)} runs reach half of the best"
    print_table(title, ("", "layout", "MFU", "predicted"), rows)


def seconds_late(run: Run, fit: Fit) -> float:
    """By how many seconds each message between stages was late, if all were by the same."""
    return _seconds_lost(run, fit) / lateness(run.layout, pause=1.0)


def _seconds_lost(run: Run, fit: Fit) -> float:
    """By how much its step took longer than predicted."""
    layout = run.layout
    step = layout.micro_batches * layout.tokens / layout.tp / layout.pp / run.tokens_per_second
    return step - times(run.model, layout, H100, fit.habits).step


def print_late(runs: list[Run], fit: Fit) -> None:
    """Pipelines that are late: how many, and by how much."""
    piped = [run for run in runs if run.mfu and run.layout.pp > 1]
    late = {run for run in piped if was_late(run, fit.habits)}
    groups = {f"{nodes} nodes": [run for run in piped if run.nodes == nodes] for nodes in (1, 2, 4, 8, 16, 32, 64)}
    full = [run for run in piped if run.memory > FULL]
    small = [run for run in piped if 2 <= run.nodes <= 8 and run not in full]
    replicas = [run for run in small if run.layout.zero == 0 and run.layout.dp > 1]
    groups["nearly full GPUs"] = full
    groups["of the rest, 2 to 8 nodes: ZeRO-0 with dp"] = replicas
    groups["and all others on 2 to 8 nodes"] = [run for run in small if run not in replicas]
    groups |= {name: [run for run in piped if run.name == name] for name in published.SHAPES} | {"all": piped}
    rows = []
    for words, some in groups.items():
        pauses = [seconds_late(run, fit) for run in some if run in late]
        cells = [f"{each:.2f}" for each in statistics.quantiles(pauses, n=4)] if len(pauses) > 1 else [""] * 3
        rows.append((words, len(some), sum(guess(run, fit.habits).can_tell for run in some), len(pauses), *cells))
    header = ("", "runs", "can be told", "late", "s late per message: quarter", "half", "three quarters")
    print_table("pipelines", header, rows)
    ratios = {run: guess(run, fit.habits).well / run.mfu for run in runs if run.mfu}
    pauses = [seconds_late(run, fit) for run in piped if ratios[run] > 2]
    quarters = ", ".join(f"{each:.2f}" for each in statistics.quantiles(pauses, n=4))
    slowest = max(ratios[run] for run in piped)
    print(
        f"  {len(pauses)} take over twice the predicted time (the slowest {slowest:.0f} times): whether called late or "
        f"not,\n  their quarters are {quarters} s per message"
    )
    whole = [run for run in runs if run.mfu and run.layout.pp == 1 and run.nodes == 64]
    slow = [run for run in whole if ratios[run] > 1.5]
    lost = [_seconds_lost(run, fit) / run.layout.micro_batches for run in slow]
    print(
        f"  without a pipeline, {len(slow)} of {len(whole)} runs on 64 nodes take over 1.5 times that, and lose "
        f"{statistics.median(lost):.1f} s per micro-batch"
    )


def print_unseen(runs: list[Run], fit: Fit) -> None:
    """The same in a line, of runs that the fit has not seen, with the error of the others."""
    piped = [run for run in runs if run.mfu and run.layout.pp > 1]
    late = [run for run in piped if was_late(run, fit.habits)]
    off = [abs(math.log(guess(run, fit.habits).well / run.mfu)) for run in piped if run not in late]
    expected = [abs(math.log(published.predicted(run, fit) / run.mfu)) for run in piped]
    pause = statistics.median(seconds_late(run, fit) for run in late)
    print(
        f"  {len(late)} of {len(piped)} pipelines are late, by {pause:.2f} s per message; the others are off by "
        f"{statistics.median(off):.0%} in the median. What was to be expected of all is off by "
        f"{statistics.median(expected):.0%}"
    )


def of_3b(figure: str) -> tuple[ModelConfig, list[Layout]]:
    """The model and the layouts of the bars of a figure. (Layouts have sequence parallelism, which sends as much.)"""
    hidden, layers, heads, ffn = published.SHAPES["3B"]
    result = []
    for index, degree in enumerate(DEGREES):
        layout = Layout(published.SEQ, pp=degree, micro_batches=degree - 1, dtype="bfloat16", nanotron=True)
        if figure in LARGEST:
            layout = layout._replace(pp=1, tp=degree, micro_batch=LARGEST[figure][index], micro_batches=1)
        elif figure.endswith("32"):
            layout = layout._replace(micro_batches=32)
        result.append(layout)
    return ModelConfig(published.VOCAB, hidden, layers, heads, heads, ffn, figure in LARGEST), result


def scaling(figure: str, habits: Habits) -> list[float]:
    """Return the tokens per second and GPU that the model predicts for the bars of a figure."""
    model, layouts = of_3b(figure)
    tokens = (layout.micro_batches * layout.tokens / (layout.tp * layout.pp) for layout in layouts)
    return [each / times(model, layout, H100, habits).step for each, layout in zip(tokens, layouts)]


def largest(holds: Holds, memory: float = 80e9) -> list[int]:
    """Return the sequences of the largest micro-batch that should fit, for each degree of the figure tp_sp_scaling."""
    model, layouts = of_3b("tp_sp_scaling")

    def fits(layout: Layout, size: int) -> bool:
        run = Run("3B", 0, model, layout._replace(micro_batch=size), None, 0.0, 0.0)
        return published_memory.predicted(run, holds) <= memory

    return [next(size for size in itertools.count() if not fits(layout, size + 1)) for layout in layouts]


def print_scaling(fit: Fit, holds: Holds) -> None:
    """Figures of scaling, beside what the model says of them."""
    rows = []
    for figure, bars in SCALING.items():
        rows.append((figure, *(f"{value:,}" for value in bars)))
        rows.append(("  predicted", *(f"{value:,.0f}" for value in scaling(figure, fit.habits))))
    rows.append(("largest micro-batch of tp_sp_scaling", *LARGEST["tp_sp_scaling"]))
    rows.append(("  predicted for 80 GB", *largest(holds)))
    print_table("tokens/s of a GPU in the playbook's figures", ("pp or tp", *map(str, DEGREES)), rows)


class Cell(NamedTuple):
    """A model on so many nodes: the runs with the best published MFU and with the most tokens/s, and a prediction."""

    best: Run
    fastest: Run
    predicted: float  # the best MFU that the model of time expects of any of its runs

    @property
    def untied(self) -> bool:
        """Whether the best MFU is of a pipeline, with the vocabulary's matrix twice, and a run without is faster."""
        return self.best.layout.pp > 1 and self.fastest.layout.pp == 1 and self.best.model != self.fastest.model


def cells(runs: list[Run], fit: Fit) -> dict[tuple[str, int], Cell]:
    """The cells of the playbook's heat map, as far as the file has them."""
    result = {}
    for pair in sorted(
        {run.pair for run in runs if run.mfu}, key=lambda pair: (list(published.SHAPES).index(pair[0]), pair[1])
    ):
        some = [run for run in runs if run.pair == pair and run.mfu]
        best, fastest = (max(some, key=value) for value in (lambda run: run.mfu, lambda run: run.tokens_per_second))
        result[pair] = Cell(best, fastest, max(published.predicted(run, fit) for run in some))
    return result


def print_cells(runs: list[Run], fit: Fit) -> None:
    """The best of each cell; and where MFU and tokens/s do not agree, because pipelines have more parameters."""
    rows, found = [], cells(runs, fit)
    for (name, nodes), cell in found.items():
        numbers = f"{cell.best.mfu:.1%}", f"{cell.predicted:.1%}", f"{cell.best.tokens_per_second:,.0f}"
        other = (named(cell.fastest.layout), f"{cell.fastest.tokens_per_second:,.0f}") if cell.untied else ("", "")
        rows.append((f"{name} on {nodes} nodes", named(cell.best.layout), *numbers, *other))
    header = ("", "best MFU", "published", "predicted", "tokens/s", "faster, with tied matrices", "tokens/s")
    print_table("best by model and nodes", header, rows)
    small = [cell for (name, _), cell in found.items() if name in ("1B", "3B")]
    print(
        f"  in {sum(cell.untied for cell in small)} of {len(small)} cells of 1B and 3B the best MFU is of a pipeline, "
        "and a run without has more tokens/s"
    )


def print_memory(runs: list[Run], parts: list[tuple[list[Run], list[Run]]], seen_by: dict[Run, Holds]) -> None:
    """Memory: how predictions rank the runs, what that implementation holds, and the failures that should have fit."""
    result = published.judge(runs, lambda run: published_memory.predicted(run, seen_by[run]), lambda run: run.memory)
    print(f"\nSpearman of predicted (from the other half) and published memory: {result.spearman:.3f}")
    rows = []
    for name, some, others in (("half 1", *parts[0]), ("half 2", *parts[1]), ("all", runs, runs)):
        holds = published_memory.fitted(some)
        ended = [run for run in others if run.mfu]
        off = [abs(math.log(published_memory.predicted(run, holds) / run.memory)) for run in ended]
        numbers = (f"{each:.2f}" for each in holds[:2])
        cells = (*numbers, f"{holds.logit:.1f}", f"{holds.else_ / 1e9:.2f}", f"{statistics.mean(off):.1%}")
        rows.append((name, *cells, f"{sum(each < math.log(1.2) for each in off) / len(off):.0%}"))
    header = ("fitted to the other half", "x states", "x activations", "bytes a logit", "GB more", "mean error")
    print_table("what that implementation holds, in what ours would", (*header, "within 20 %"), rows)
    found = published_memory.failures(runs, published_memory.fitted(runs))
    print(
        f"  {found.all} runs failed, and the file does not say why. {found.fit} of them should have fitted by 20 %:\n"
        f"  for {found.excused} a heavier run with the same degrees ended, {found.far} would fit even if predicted as "
        f"badly\n  as the worst run that ended; the other {found.open} may have run out of memory"
    )


def draw(runs: list[Run], fit: Fit, path: str) -> Path:
    """Published over predicted MFU: without pipelines, with them, and late ones as late. Returns the path."""
    ended = {run: guess(run, fit.habits) for run in runs if run.mfu}
    late = {run for run in ended if was_late(run, fit.habits)}
    whole, piped = ([run for run in ended if (run.layout.pp > 1) == many] for many in (False, True))
    figure, axes = new_figure(1, 3, height=3.0, sharex=True, sharey=True)
    titles = "one stage", "pipelines", f"late by {PAUSE} s"
    for axis, title, some, as_late in zip(axes, titles, (whole, piped, piped), (False, False, True)):
        for color, kind in ((SERIES[0], set(some) - late), (SERIES[1], late & set(some))):
            guesses = [ended[run].late if as_late and run in late else ended[run].well for run in kind]
            axis.loglog(guesses, [run.mfu for run in kind], ".", ms=3, color=color)
        axis.loglog([0.001, 0.6], [0.001, 0.6], color=COLOURS["other"], lw=1)
        axis.set(title=title, xlabel="MFU, predicted")
    axes[0].set_ylabel("MFU, published")
    return write_png(figure, path)
