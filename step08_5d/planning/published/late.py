"""Pipelines whose messages are late: how many of the published runs, by how much, and what else is slow."""

import math
import statistics

from common.drawing.tables import print_table
from step08_5d.planning.published import runs as published
from step08_5d.planning.published.runs import H100, Fit, PublishedRun, guess, was_late
from step08_5d.planning.time.nanotron import lateness
from step08_5d.planning.time.speed import times

FULL = 68e9  # bytes of an 80 GB GPU: all pipelines that held more were late


def seconds_late(run: PublishedRun, fit: Fit) -> float:
    """By how many seconds each message between stages was late, if all were by the same."""
    return _seconds_lost(run, fit) / lateness(run.layout, pause=1.0)


def _seconds_lost(run: PublishedRun, fit: Fit) -> float:
    """By how much its step took longer than predicted."""
    step = run.layout.tokens_per_gpu / run.tokens_per_second
    return step - times(run.model, run.layout, H100, fit.profile).step


def print_late(runs: list[PublishedRun], fit: Fit) -> None:
    """Pipelines that are late: how many, and by how much."""
    piped = [run for run in runs if run.mfu and run.layout.pp > 1]
    late = {run for run in piped if was_late(run, fit.profile)}
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
        rows.append((words, len(some), sum(guess(run, fit.profile).can_tell for run in some), len(pauses), *cells))
    header = ("", "runs", "can be told", "late", "s late per message: quarter", "half", "three quarters")
    print_table("pipelines", header, rows)
    ratios = {run: guess(run, fit.profile).well / run.mfu for run in runs if run.mfu}
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


def print_unseen(runs: list[PublishedRun], fit: Fit) -> None:
    """The same in a line, of runs that the fit has not seen, with the error of the others."""
    piped = [run for run in runs if run.mfu and run.layout.pp > 1]
    late = [run for run in piped if was_late(run, fit.profile)]
    off = [abs(math.log(guess(run, fit.profile).well / run.mfu)) for run in piped if run not in late]
    expected = [abs(math.log(published.predicted(run, fit) / run.mfu)) for run in piped]
    pause = statistics.median(seconds_late(run, fit) for run in late)
    print(
        f"  {len(late)} of {len(piped)} pipelines are late, by {pause:.2f} s per message; the others are off by "
        f"{statistics.median(off):.0%} in the median. What was to be expected of all is off by "
        f"{statistics.median(expected):.0%}"
    )
