"""What `calibrate` prints: this machine's rates, and how well they predict runs that the fit has not seen."""

import os
from pathlib import Path
from typing import NamedTuple

from common.drawing.tables import print_table
from common.errors import UsageError
from step08_5d.planning.sweeps import calibration, pictures, sweep
from step08_5d.planning.sweeps.calibration import Measured, Rates

FEWEST = 9  # runs that a calibration needs: three for each third


class MeasuredSweep(NamedTuple):
    """A sweep that has run."""

    name: str
    folder: Path
    records: list[dict]
    runs: list[Measured]  # of the records, those that ended


def show(options) -> None:
    """Fit the rates of this machine to a sweep's runs, and judge them on runs that the fit has not seen.

    Those are the runs of another sweep (--judge); or the fit sees each third of the runs once, and the others judge.
    The tables of runs and rates, and the figure, are those of the first fit.
    """
    # macOS does not say on which cores a process may run
    own_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = options.cores or own_cores
    own = measured(options.file, cores)
    if len(own.runs) < FEWEST:
        raise UsageError(f"{own.folder} has {len(own.runs)} runs that ended; a calibration needs {FEWEST}")
    if options.judge:
        judge, parts = measured(options.judge, cores), {f"all of {own.name}": own.runs}
    else:
        thirds = enumerate(("first", "second", "last"))
        judge, parts = own, {f"the {name} third": own.runs[start::3] for start, name in thirds}
    if not judge.runs:
        raise UsageError(f"{judge.folder} has no run that ended; first run the sweep {options.judge}")
    rates = {name: calibration.fit(some) for name, some in parts.items()}
    part, first = next(iter(parts.values())), next(iter(rates.values()))
    guesses = {run.name: calibration.seconds(run.layout, first) for run in judge.runs}
    seen = {run.name for run in part if run in judge.runs}
    pictures.print_markdown(judge.records, guesses, seen)
    print_table("seconds", ("for each", ""), [(name, f"{rate:.2e}") for name, rate in first._asdict().items()])
    print_judgements(parts, rates, judge)
    reals = {run.name: run.seconds for run in judge.runs}
    print(f"  figure: {pictures.draw_beside(reals, guesses, seen, judge.folder / 'predicted.png')}")


def measured(file: str, cores: int) -> MeasuredSweep:
    """Return the sweep that a TOML file asks for, with the work of each run, which takes a dry run of each stage."""
    asked = sweep.read(file)
    records = sweep.fastest(asked.folder)
    runs = calibration.measured(records, asked.folder, cores, progress=True)
    return MeasuredSweep(asked.name, asked.folder, records, runs)


def print_judgements(parts: dict[str, list[Measured]], rates: dict[str, Rates], judge: MeasuredSweep) -> None:
    """How well each fit predicts the runs that it has not seen, and how well their own repetitions do.

    Args:
        parts: the runs of each fit. rates: what they showed.
    """
    rows = []
    for name, some in parts.items():
        found = calibration.judge([run for run in judge.runs if run not in some], rates[name])
        rows.append((name, found.runs, f"{found.kendall:.2f}", f"{found.error:.0%}", f"{found.regret:.0%}"))
    header = ("fitted to", "other runs", "Kendall's tau", "median error", "best predicted / best, more")
    print_table("on runs that the fit has not seen", header, rows)
    if again := calibration.scatter(sweep.history(judge.folder)):
        print(f"{again.runs} runs, repeated: Kendall's tau {again.kendall:.2f}, median difference {again.error:.0%}")
