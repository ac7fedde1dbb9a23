"""The published runs as a report: how well predictions rank them, the worst choice, memory, failures, and a figure."""

import math
import statistics
from functools import partial
from pathlib import Path

from common.drawing.figures import COLOURS, SERIES, new_figure, write_png
from common.drawing.tables import print_table
from step08_5d.planning import published_memory
from step08_5d.planning.machines import Habits
from step08_5d.planning.memory import memory
from step08_5d.planning.published import Run, fitted, halves, judge, predicted, read_runs
from step08_5d.planning.search import named


def published(options) -> None:
    """Fit the models of time and memory to half of the published runs and judge them on the other half, both ways."""
    runs = read_runs()
    print(f"{len(runs):,} published runs of {len({run.pair for run in runs})} pairs of model and nodes")
    parts = halves(runs)
    for number, (of_fit, others) in enumerate(parts):
        habits = fitted(of_fit)
        result = judge(others, partial(predicted, habits=habits))
        rows = [
            (f"{name} on {nodes} nodes", f"{result.within[name, nodes]:.2f}", f"{result.chosen[name, nodes]:.0%}")
            for name, nodes in result.within
        ]
        print_table(
            f"half {number + 1}, fitted to the other", ("", "Spearman", "MFU of the chosen run / best MFU"), rows
        )
        medians = (f"{statistics.median(each.values()):.2f}" for each in (result.within, result.chosen))
        print(f"  over all runs: {result.spearman:.2f}; medians of the columns: {', '.join(medians)}")
        print_worst(others, habits, min(result.chosen, key=result.chosen.get))
    print_memory(runs, parts)
    print(f"  figure: {draw(runs, fitted(runs), options.out)}")


def print_worst(runs: list[Run], habits: Habits, pair: tuple[str, int], shown: int = 3) -> None:
    """The fastest runs of the pair in which the model chose worst, and the one that it chose."""
    of_pair = sorted((run for run in runs if run.pair == pair and run.mfu), key=lambda run: -run.mfu)
    chosen = max(of_pair, key=partial(predicted, habits=habits))
    rows = [
        (name, named(run.layout), f"{run.mfu:.1%}", f"{predicted(run, habits):.1%}")
        for name, run in [*((f"place {place + 1}", run) for place, run in enumerate(of_pair[:shown])), ("", chosen)]
    ]
    rows[-1] = (f"chosen: place {of_pair.index(chosen) + 1}", *rows[-1][1:])
    half = sum(run.mfu >= of_pair[0].mfu / 2 for run in of_pair)
    title = f"the worst choice: {pair[0]} on {pair[1]} nodes; {half} of {len(of_pair)} runs reach half of the best"
    print_table(title, ("", "layout", "MFU", "predicted"), rows)


def print_memory(runs: list[Run], parts: list[tuple[list[Run], list[Run]]]) -> None:
    """Memory: how our formulas rank the runs, what that implementation holds, and the failures that should have fit."""
    result = judge(runs, lambda run: sum(memory(run.model, run.layout).values()), lambda run: run.memory)
    print(f"\nSpearman of predicted and published memory: {result.spearman:.3f}")
    rows = []
    for name, some, others in (("half 1", *parts[0]), ("half 2", *parts[1]), ("all", runs, runs)):
        holds = published_memory.fitted(some)
        ended = [run for run in others if run.mfu]
        off = [abs(math.log(published_memory.needed(published_memory.kept(run), holds) / run.memory)) for run in ended]
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


def draw(runs: list[Run], habits: Habits, path: str) -> Path:
    """Published over predicted MFU, with and without pipelines. Returns the path."""
    figure, axes = new_figure(1, 2, height=3.4, sharey=True)
    for axis, many, title in zip(axes, (False, True), ("one stage", "a pipeline")):
        some = [run for run in runs if run.mfu and (run.layout.pp > 1) == many]
        axis.loglog([predicted(run, habits) for run in some], [run.mfu for run in some], ".", ms=3, color=SERIES[many])
        axis.loglog([0.001, 0.6], [0.001, 0.6], color=COLOURS["other"], lw=1)
        axis.set(title=title, xlabel="MFU, predicted")
    axes[0].set_ylabel("MFU, published")
    return write_png(figure, path)
