"""What would change the choice: other conditions, several stages on each rank, and a batch near this one."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from common.drawing.tables import print_table
from step08_5d.planning.search import EQUAL, MOST_FULL, Candidate, Task, named, virtual_stages
from step08_5d.planning.time.nanotron import PAUSE, lateness
from step08_5d.planning.time.profiles import Profile
from step08_5d.planning.time.speed import times


class Condition(NamedTuple):
    """What could be otherwise; nothing of it makes a plan faster."""

    words: str
    far: float = 1.0  # times the bandwidth between nodes
    pause: float = 0.0  # seconds by which nanotron's messages between stages are late
    batch: int = 1  # times the micro-batches
    room: float = 1.0  # times the memory

    def seconds(self, task: Task, plan: Candidate, profile: Profile) -> float:
        """Of a step of this plan; infinite if it does not fit."""
        layout = plan.layout._replace(micro_batches=self.batch * plan.layout.micro_batches)
        held = task.memory(layout) if self.batch > 1 else plan.held
        if sum(held.values()) > self.room * MOST_FULL * task.machine.memory:
            return math.inf
        seconds = plan.seconds[profile.name]
        if self.far != 1 or self.batch > 1:
            machine = task.machine._replace(far=self.far * task.machine.far)
            seconds = times(task.model, layout, machine, profile).step
        return seconds + (lateness(layout, self.pause) if profile.own else 0.0)


CONDITIONS = (
    Condition("half the bandwidth between nodes", far=0.5),
    Condition(f"nanotron's pipelines {PAUSE} s late", pause=PAUSE),
    Condition("a batch twice as large", batch=2),
    Condition("two thirds of the memory", room=2 / 3),
)


class Change(NamedTuple):
    """Which plan to run under a condition."""

    words: str
    first: float  # regret of the first plan then; infinite if it does not fit
    winner: Candidate | None  # None if none fits
    regret: float  # its own


def changes(task: Task, best: list[Candidate]) -> list[Change]:
    """The plan of least regret under each condition; late messages are a matter of nanotron alone."""
    late = any(profile.own for profile in task.profiles)
    return [_change(task, best, condition) for condition in CONDITIONS if late or not condition.pause]


def _change(task: Task, best: list[Candidate], condition: Condition) -> Change:
    """Most plans need not be tried, since a condition makes none faster."""
    least = {}
    for profile in task.profiles:
        seconds = partial(condition.seconds, task, profile=profile)
        least[profile], _ = _least(best, lambda plan, name=profile.name: plan.seconds[name], seconds)
    if math.inf in least.values():
        return Change(condition.words, math.inf, None, math.inf)

    def regret(plan: Candidate) -> float:
        return max(condition.seconds(task, plan, each) / fastest for each, fastest in least.items()) - 1

    def bound(plan: Candidate) -> float:
        return max(plan.seconds[each.name] / fastest for each, fastest in least.items()) - 1

    lowest, winner = _least(best, bound, regret)
    return _unless_equal(condition.words, best[0], regret(best[0]), winner, lowest)


def _unless_equal(words: str, ours: Candidate, first: float, winner: Candidate, lowest: float) -> Change:
    """The change to another plan, or none if the first plan is as good."""
    if 1 + first <= (1 + EQUAL) * (1 + lowest):
        winner, lowest = ours, first
    return Change(words, first, winner, lowest)


def _least(
    plans: list[Candidate], bound: Callable[[Candidate], float], value: Callable[[Candidate], float]
) -> tuple[float, Candidate | None]:
    """Return the least value of a plan, and whose it is. No value is below its bound."""
    least, found = math.inf, None
    for plan in sorted(plans, key=bound):
        if bound(plan) >= least:
            break
        if (tried := value(plan)) < least:
            least, found = tried, plan
    return least, found


TRIED = 40  # plans with pipelines that are tried with several stages on each rank
NEAR = 1 / 8  # by how much another batch may differ (relative)
INTERLEAVED = "interleaved stages"


def interleaving(task: Task, best: list[Candidate]) -> list[Change]:
    """What several stages on each rank would change, if the search has tried none.

    They need micro-batches that the ranks of a pipeline divide. Where this batch has none, one near it may.
    """
    by_batch: dict[int, list[Candidate]] = {}
    least = {name: min(plan.seconds[name] for plan in best) for name in best[0].seconds}
    for layout in [plan.layout for plan in best if plan.layout.pp > 1][:TRIED]:
        rounds = layout.micro_batches / layout.pp
        for count in {layout.pp * math.floor(rounds), layout.pp * math.ceil(rounds)} - {0}:
            more, share = layout._replace(micro_batches=count), layout.micro_batches / count
            for stages in virtual_stages(task._replace(interleaved=True), more)[1:] if abs(1 - share) < NEAR else ():
                held = task.memory(tried := more._replace(stages=stages))
                if sum(held.values()) <= MOST_FULL * task.machine.memory:
                    found = {each.name: times(task.model, tried, task.machine, each).step for each in task.profiles}
                    regrets = {name: share * each / least[name] - 1 for name, each in found.items()}
                    batch = layout.dp * layout.micro_batch * count
                    by_batch.setdefault(batch, []).append(Candidate(tried, held, found, regrets))
    result, asked = [], by_batch.get(task.sequences)
    for batch, plans in ({task.sequences: asked} if asked else by_batch).items():
        fastest = {name: min(0.0, *(each.regrets[name] for each in plans)) for name in least}

        def regret(plan: Candidate) -> float:
            return max((1 + plan.regrets[name]) / (1 + each) - 1 for name, each in fastest.items())  # noqa: B023

        winner = min(plans, key=regret)
        words = INTERLEAVED if batch == task.sequences else f"{batch:,} sequences, {INTERLEAVED}"
        result.append(_unless_equal(words, best[0], regret(best[0]), winner, regret(winner)))
    return sorted(result, key=lambda each: -each.first)[:2]


def print_changes(task: Task, best: list[Candidate], interleaved: list[Change]) -> None:
    """Under which other conditions another plan would be the one to run; `interleaved` is one of them."""
    rows = []
    for words, first, winner, regret in changes(task, best) + interleaved:
        lost = "does not fit" if first == math.inf else f"{first:+.0%}"
        other = ("none fits", "") if winner is None else (named(winner.layout), f"{regret:+.0%}")
        rows.append((words, lost, *(("the same", "") if winner is best[0] else other)))
    print_table("what would change it", ("with", "at worst", "run then", "at worst"), rows)
