"""The published runs as a report: how predictions rank the playbook's, and how far off they are for other systems."""

import statistics
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.drawing.figures import COLOURS, SERIES, new_figure, write_png
from common.drawing.tables import print_table
from step08_5d.planning.command_line import Command, add_figure
from step08_5d.planning.published import memory as published_memory
from step08_5d.planning.published import runs as published
from step08_5d.planning.published.advice import print_advice
from step08_5d.planning.published.late import print_late, print_unseen
from step08_5d.planning.published.others import NEEDED
from step08_5d.planning.published.runs import Fit, PublishedRun, Ranking, guess, was_late
from step08_5d.planning.published.scaling import print_scaling
from step08_5d.planning.published.systems import print_systems, print_yours
from step08_5d.planning.search import named
from step08_5d.planning.time.nanotron import PAUSE


def add_flags(parser: ArgumentParser) -> None:
    add_figure(parser, "published")
    words = f"only your own runs, in a CSV file with the columns {', '.join(NEEDED)}, and others of other_runs.csv"
    parser.add_argument("--runs", help=words)
    parser.add_argument("--advice", action="store_true", help="only what plan would run where others did; minutes")


def show(options: Namespace) -> None:
    """How predictions rank the playbook's runs, and how far off they are for other systems, or for your own runs.

    Models of time and memory are fitted to half of the playbook's pairs and judged on the other half, both ways.
    """
    if options.advice or options.runs:
        return print_yours(Path(options.runs)) if options.runs else print_advice()
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
    published_memory.print_memory(runs, parts, seen_by)
    print(f"  figure: {draw(runs, fit, options.out)}")
    print_systems(Path(options.out).with_stem(f"{Path(options.out).stem}_others"))


def print_worst(runs: list[PublishedRun], result: Ranking, fit: Fit, shown: int = 3) -> None:
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


class Cell(NamedTuple):
    """A model on so many nodes: the runs with the best published MFU and with the most tokens/s, and a prediction."""

    best: PublishedRun
    fastest: PublishedRun
    predicted: float  # the best MFU that the model of time expects of any of its runs

    @property
    def untied(self) -> bool:
        """Whether the best MFU is of a pipeline, with the vocabulary's matrix twice, and a run without is faster."""
        return self.best.layout.pp > 1 and self.fastest.layout.pp == 1 and self.best.model != self.fastest.model


def cells(runs: list[PublishedRun], fit: Fit) -> dict[tuple[str, int], Cell]:
    """The cells of the playbook's heat map, as far as the file has them."""
    result = {}
    for pair in sorted(
        {run.pair for run in runs if run.mfu}, key=lambda pair: (list(published.SHAPES).index(pair[0]), pair[1])
    ):
        some = [run for run in runs if run.pair == pair and run.mfu]
        best, fastest = (max(some, key=value) for value in (lambda run: run.mfu, lambda run: run.tokens_per_second))
        result[pair] = Cell(best, fastest, max(published.predicted(run, fit) for run in some))
    return result


def print_cells(runs: list[PublishedRun], fit: Fit) -> None:
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


def draw(runs: list[PublishedRun], fit: Fit, path: str) -> Path:
    """Published over predicted MFU: without pipelines, with them, and late ones as late. Returns the path."""
    ended = {run: guess(run, fit.profile) for run in runs if run.mfu}
    late = {run for run in ended if was_late(run, fit.profile)}
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


COMMAND = Command(add_flags, show)
