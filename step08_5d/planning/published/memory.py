"""What the published runs held, and why others failed: memory of the playbook's implementation, fitted to its runs.

The file does not say whether a run without numbers crashed or ran out of memory. What can be said: whether it should
have fitted, and whether a heavier run with the same degrees ended, so that memory cannot have been the reason.
"""

import math
import statistics
from typing import NamedTuple

from common.drawing.tables import print_table
from step08_5d.planning.fitting import descend
from step08_5d.planning.memory.backwards import in_flight
from step08_5d.planning.memory.kept import kept as kept_by_stage
from step08_5d.planning.memory.peak import states
from step08_5d.planning.published.runs import VOCAB, PublishedRun, judge
from step08_5d.planning.search import MOST_FULL
from step08_5d.planning.time.machines import MACHINES

ROOM = 1.2  # how much more than predicted a run may need and still fits


class Holds(NamedTuple):
    """What an implementation holds, in what ours would."""

    states: float = 1.0  # parameters, gradients and optimizer state
    activations: float = 1.2
    logit: float = 8.0  # bytes of each logit of a micro-batch: nothing there fuses head and loss
    else_: float = 1e9  # bytes of all else


class StageNeeds(NamedTuple):
    """What a stage of a run keeps in our formulas: bytes, but for logits, which are a number."""

    states: float
    activations: float
    logits: float


def kept(run: PublishedRun) -> list[StageNeeds]:
    """Of the first and the last stage."""
    result = []
    for stage in {0, run.layout.pp - 1}:
        logits = run.layout.tokens * VOCAB / run.layout.tp if stage == run.layout.pp - 1 else 0
        held = sum(states(run.model, run.layout, stage).values())
        activations = in_flight(run.model, run.layout, stage) * kept_by_stage(run.model, run.layout, stage)
        result.append(StageNeeds(held, activations, logits))
    return result


def needed(stages: list[StageNeeds], holds: Holds) -> float:
    """Bytes of the fullest stage."""
    most = max(
        holds.states * each.states + holds.activations * each.activations + holds.logit * each.logits for each in stages
    )
    return most + holds.else_


def predicted(run: PublishedRun, holds: Holds) -> float:
    """Bytes of the fullest stage of a run."""
    return needed(kept(run), holds)


def fits(run: PublishedRun, holds: Holds) -> bool:
    """Whether the planner would call this a layout that fits."""
    return predicted(run, holds) <= MOST_FULL * MACHINES["H100"].memory


def fitted(runs: list[PublishedRun]) -> Holds:
    """What the runs that ended show: the least mean of |log(predicted / published)|."""
    pairs = [(kept(run), run.memory) for run in runs if run.mfu]
    return descend(
        Holds(),
        Holds._fields,
        lambda holds: statistics.mean(abs(math.log(needed(stages, holds) / memory)) for stages, memory in pairs),
    )


class Failures(NamedTuple):
    """Runs that failed, counted."""

    all: int
    fit: int  # predicted to fit, even with 20 % more
    excused: int  # of these: a run with the same degrees needs at least as much, and ended


def failures(runs: list[PublishedRun], holds: Holds) -> Failures:
    """Count what failed although it should have fitted on an 80 GB GPU."""
    sizes = {run: predicted(run, holds) for run in runs}
    heaviest = {}
    for run in (each for each in runs if each.mfu):
        heaviest[_degrees(run)] = max(sizes[run], heaviest.get(_degrees(run), 0))
    failed = [run for run in runs if not run.mfu]
    fit = [run for run in failed if ROOM * sizes[run] <= MACHINES["H100"].memory]
    return Failures(len(failed), len(fit), sum(heaviest.get(_degrees(run), 0) >= sizes[run] for run in fit))


def _degrees(run: PublishedRun) -> tuple:
    return run.pair, run.layout.dp, run.layout.pp, run.layout.tp


def print_memory(
    runs: list[PublishedRun],
    parts: list[tuple[list[PublishedRun], list[PublishedRun]]],
    seen_by: dict[PublishedRun, Holds],
) -> None:
    """Memory: how predictions rank the runs, what that implementation holds, and the failures that should have fit."""
    result = judge(runs, lambda run: predicted(run, seen_by[run]), lambda run: run.memory)
    print(f"\nSpearman of predicted (from the other half) and published memory: {result.spearman:.3f}")
    rows = []
    for name, some, others in (("half 1", *parts[0]), ("half 2", *parts[1]), ("all", runs, runs)):
        holds = fitted(some)
        ended = [run for run in others if run.mfu]
        off = [abs(math.log(predicted(run, holds) / run.memory)) for run in ended]
        numbers = (f"{each:.2f}" for each in holds[:2])
        cells = (*numbers, f"{holds.logit:.1f}", f"{holds.else_ / 1e9:.2f}", f"{statistics.mean(off):.1%}")
        rows.append((name, *cells, f"{sum(each < math.log(1.2) for each in off) / len(off):.0%}"))
    header = ("fitted to the other half", "x states", "x activations", "bytes a logit", "GB more", "mean error")
    print_table("what that implementation holds, in what ours would", (*header, "within 20 %"), rows)
    found = failures(runs, fitted(runs))
    print(
        f"  {found.all} runs failed, and the file does not say why. {found.fit} of them should have fitted by 20 %, and"
    )
    print(
        f"  for {found.excused} of these a heavier run with the same degrees ended, so that memory was not the reason"
    )
