"""What `calibrate` prints: this machine's rates, and how well they predict runs that the fit has not seen."""

import os

from common.drawing.tables import print_table
from common.errors import UsageError
from step08_5d.planning.sweeps import calibration, pictures, sweep
from step08_5d.planning.sweeps.calibration import Measured, Rates

FEWEST = 9  # runs that a calibration needs: three for each third


def show(options) -> None:
    """Fit the rates of this machine to a sweep's runs, and judge them on runs that the fit has not seen.

    Those are the runs of another sweep (--judge); or the fit sees each third of the runs once, and the others judge.
    The tables of runs and rates are those of the first fit.
    """
    # macOS does not say on which cores a process may run
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    asked = judge = sweep.read(options.file)
    runs = others = calibration.measured(asked, cores)
    if len(runs) < FEWEST:
        raise UsageError(f"{asked.folder} has {len(runs)} runs that ended; a calibration needs {FEWEST}")
    parts = {f"the {name} third": runs[start::3] for start, name in enumerate(("first", "second", "last"))}
    if options.judge:
        judge, parts = sweep.read(options.judge), {f"all of {asked.name}": runs}
        others = calibration.measured(judge, cores)
    if not others:
        raise UsageError(f"{judge.folder} has no run that ended; first run the sweep {options.judge}")
    rates = {name: calibration.fit(some) for name, some in parts.items()}
    part, first = next(iter(parts.values())), next(iter(rates.values()))
    guesses = {run.name: calibration.seconds(run.layout, first) for run in others}
    seen = {run.name for run in part if run in others}
    pictures.print_markdown([run.record for run in others], guesses, seen)
    print_table("seconds", ("for each", ""), [(name, f"{rate:.2e}") for name, rate in first._asdict().items()])
    print_judgements(parts, rates, others)
    if again := calibration.scatter(sweep.history(judge.folder)):
        print(f"{again.runs} runs, repeated: Kendall's tau {again.kendall:.2f}, median difference {again.error:.0%}")


def print_judgements(parts: dict[str, list[Measured]], rates: dict[str, Rates], runs: list[Measured]) -> None:
    """How well each fit predicts the runs that it has not seen.

    Args:
        parts: the runs of each fit. rates: what they showed.
    """
    rows = []
    for name, some in parts.items():
        found = calibration.judge([run for run in runs if run not in some], rates[name])
        rows.append((name, found.runs, f"{found.kendall:.2f}", f"{found.error:.0%}", f"{found.regret:.0%}"))
    header = ("fitted to", "other runs", "Kendall's tau", "median error", "best predicted / best, more")
    print_table("on runs that the fit has not seen", header, rows)
