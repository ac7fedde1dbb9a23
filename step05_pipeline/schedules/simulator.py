"""Plays a schedule in time, with given costs: how long it takes, how long ranks wait, how much they keep.

Each rank does its actions in order, each as soon as what it needs is there. Nothing else delays it: messages take
`communication` and neither hold up a rank nor each other.
"""

from dataclasses import dataclass

from common.errors import UsageError
from step05_pipeline.schedules.actions import Action, Schedule

Spans = tuple[tuple[tuple[Action, float, float], ...], ...]  # [rank]: (action, start, end) in order


@dataclass(frozen=True)
class Costs:
    """Time of each kind of action in one stage, in any unit; whole backwards B take I + W unless said otherwise.

    FB: of a forward and the whole backward right after it, of another chunk and micro-batch, that run as one, so that
        either hides the other's communication: F&B of DualPipe. None: one after the other.
    communication: from the end of an action until another rank has its output.
    stages: relative cost of each stage (1: as the others say).
    """

    F: float = 1.0
    I: float = 1.0  # noqa: E741  the name of the action
    W: float = 1.0
    B: float | None = None
    FB: float | None = None
    communication: float = 0.0
    stages: tuple[float, ...] | None = None

    def __post_init__(self):
        for name in ("F", "I", "W", "B", "FB"):
            if not (getattr(self, name) is None or getattr(self, name) > 0):
                raise UsageError(f"cost {name} = {getattr(self, name)} must be positive")
        if self.communication < 0:
            raise UsageError(f"cost communication = {self.communication} must not be negative")

    def of(self, kind: str, stage: int | None = None) -> float:
        cost = self.I + self.W if kind == "B" and self.B is None else getattr(self, kind)
        return cost * (self.stages[stage] if self.stages and stage is not None else 1)


@dataclass(frozen=True)
class Timeline:
    """When each rank did what, simulated or measured, and what follows from that."""

    spans: Spans

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(row[-1][2] for row in self.spans if row) - min(row[0][1] for row in self.spans if row)

    @property
    def span(self) -> float:
        """The longest time that one rank takes from its first start to its last end.

        So much a step costs if a rank may start its next step while others still end theirs (Qi et al.,
        arXiv:2401.10241, section 4); the makespan, if they wait for each other.
        """
        return max(row[-1][2] - row[0][1] for row in self.spans if row)

    @property
    def ideal(self) -> float:
        """Time that a rank works, in the mean over ranks: the makespan without any waiting."""
        return sum(end - start for row in self.spans for _, start, end in row) / len(self.spans)

    @property
    def idle(self) -> list[float]:
        """Of each rank: the part of the makespan in which it does not work."""
        return [self.makespan - sum(end - start for _, start, end in row) for row in self.spans]

    @property
    def bubble(self) -> float:
        """Idle time of a rank, in the mean over ranks: makespan - ideal."""
        return self.makespan - self.ideal

    @property
    def bubble_ratio(self) -> float:
        """r = bubble / ideal, as in the playbook."""
        return self.bubble / self.ideal

    @property
    def efficiency(self) -> float:
        """Share of the makespan in which a rank works: 1 / (1 + r), which is not 1 - r."""
        return self.ideal / self.makespan

    @property
    def in_flight(self) -> list[int]:
        """Of each rank: the most (micro-batch, chunk) pairs between F and B or I, whose activations it keeps."""
        return [_peak(row, {"F": 1, "B": -1, "I": -1}) for row in self.spans]

    @property
    def stores(self) -> list[int]:
        """Of each rank: the most pairs between I and W, of which it keeps what the weights' gradients need."""
        return [_peak(row, {"I": 1, "W": -1}) for row in self.spans]

    @property
    def unfinished(self) -> list[int]:
        """Of each rank: the most pairs between F and B or W, both of the above at a time: memory in Zero Bubble."""
        return [_peak(row, {"F": 1, "B": -1, "W": -1}) for row in self.spans]


def _peak(row, change: dict[str, int]) -> int:
    """A rank does one thing at a time, so its order alone decides."""
    now = peak = 0
    for action, _, _ in row:
        now += change.get(action.kind, 0)
        peak = max(peak, now)
    return peak


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Play the schedule. Raises UsageError, with one line, when its ranks come to wait for each other forever."""
    costs = costs or Costs()
    if costs.stages and len(costs.stages) != schedule.stages:
        raise UsageError(f"costs of {len(costs.stages)} stages, but schedule {schedule.name} has {schedule.stages}")
    spans = [[] for _ in schedule.actions]
    ended: dict[tuple, tuple[float, int]] = {}  # by (direction, copy, stage, micro-batch): when, and on which rank
    runnable, waiting = list(range(schedule.ranks)), {}  # ranks that wait, by what for

    def ready(rank: int, block: tuple[Action, ...]) -> float | None:
        """When everything is there that the block needs; None, and the rank waits, if nobody can say yet."""
        latest = spans[rank][-1][2] if spans[rank] else 0.0
        for action in block:
            if needed := schedule.needs(rank, action):
                if needed not in ended:
                    waiting.setdefault(needed, []).append(rank)
                    return None
                end, maker = ended[needed]
                latest = max(latest, end + (costs.communication if maker != rank else 0.0))
        return latest

    while runnable:
        rank = runnable.pop()
        actions = schedule.actions[rank]
        while len(spans[rank]) < len(actions):
            block = _block(actions, len(spans[rank]), costs)
            start = ready(rank, block)
            if start is None:
                break
            durations = [costs.of(action.kind, schedule.stage_of(rank, action.chunk)[1]) for action in block]
            if len(block) == 2:
                durations = [each * costs.FB / (costs.of("F") + costs.of("B")) for each in durations]
            end = start + sum(durations)
            for action, duration in zip(block, durations):
                spans[rank].append((action, start, start + duration))
                start += duration
                if made := schedule.makes(rank, action):
                    ended[made] = end, rank
                    runnable += waiting.pop(made, [])
    if waiting:
        raise UsageError(_deadlock(schedule, [len(row) for row in spans]))
    return Timeline(tuple(map(tuple, spans)))


def _block(actions: tuple[Action, ...], first: int, costs: Costs) -> tuple[Action, ...]:
    """The next action; or two, where they are to run as one."""
    pair = actions[first : first + 2]
    if costs.FB and [each.kind for each in pair] == ["F", "B"]:
        if pair[0].chunk != pair[1].chunk and pair[0].micro_batch != pair[1].micro_batch:
            return pair
    return pair[:1]


def _deadlock(schedule: Schedule, done: list[int]) -> str:
    waits = []
    for rank, actions in enumerate(schedule.actions):
        for action in actions[done[rank] : done[rank] + 1]:
            if needed := schedule.needs(rank, action):
                _, copy, stage, _ = needed
                waits.append(f"rank {rank} at {action} for rank {schedule.placement[copy][stage]}")
    more = f" and {len(waits) - 4} more" if len(waits) > 4 else ""
    return f"schedule {schedule.name}: deadlock: {', '.join(waits[:4])}{more} wait forever"
