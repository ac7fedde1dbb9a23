"""Plays a schedule in time, with given costs: how long it takes, how long ranks wait, how much they hold in memory.

Each rank performs its actions in order, and each action starts as soon as its input is available. Nothing else delays
it: messages take the time `communication`, and they delay neither a rank nor each other.
"""

from dataclasses import dataclass

from common.errors import UsageError
from step05_pipeline.schedules.actions import Action, Output, Schedule

Spans = tuple[tuple[tuple[Action, float, float], ...], ...]  # [rank]: (action, start, end) in order


@dataclass(frozen=True)
class Costs:
    """The time of each kind of action in one stage, in any unit. A whole backward B takes I + W unless given.

    FB: of an F directly followed by a B of another chunk and micro-batch, run as one (DualPipe's F&B). None: F, then B,
        as `Pipeline` runs them.
    communication: from the end of an action until its output is available on another rank.
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
        """The time of one action of this kind."""
        cost = self.I + self.W if kind == "B" and self.B is None else getattr(self, kind)
        return cost * (self.stages[stage] if self.stages and stage is not None else 1)


@dataclass(frozen=True)
class Timeline:
    """When each rank did what, simulated or measured, and what follows from that."""

    spans: Spans

    @property
    def start(self) -> float:
        """When the first action of any rank starts."""
        return min(row[0][1] for row in self.spans if row)

    @property
    def makespan(self) -> float:
        """From the first start of any rank to the last end of any rank."""
        return max(row[-1][2] for row in self.spans if row) - self.start

    @property
    def span(self) -> float:
        """The longest time between a rank's own first start and its own last end.

        A step costs this much if a rank may start its next step while others still finish theirs (Qi et al.,
        arXiv:2401.10241, section 4), and the makespan if ranks wait for each other.
        """
        return max(row[-1][2] - row[0][1] for row in self.spans if row)

    @property
    def ideal(self) -> float:
        """The time that a rank works, as the mean over ranks: the makespan if nobody ever waited."""
        return sum(end - start for row in self.spans for _, start, end in row) / len(self.spans)

    @property
    def bubble(self) -> float:
        """The idle time of a rank, as the mean over ranks: makespan - ideal."""
        return self.makespan - self.ideal

    @property
    def bubble_ratio(self) -> float:
        """r = bubble / ideal, as in the playbook."""
        return self.bubble / self.ideal

    @property
    def efficiency(self) -> float:
        """The part of the makespan in which a rank works: 1 / (1 + r), which is not 1 - r."""
        return self.ideal / self.makespan

    @property
    def in_flight(self) -> list[int]:
        """For each rank, its most (micro-batch, chunk) pairs between F and B or I, whose activations it holds."""
        return [_peak(row, {"F": 1, "B": -1, "I": -1}) for row in self.spans]

    @property
    def stores(self) -> list[int]:
        """For each rank, its most pairs between I and W, for which it holds the operands of the weight gradients."""
        return [_peak(row, {"I": 1, "W": -1}) for row in self.spans]

    @property
    def unfinished(self) -> list[int]:
        """For each rank, its most pairs between F and B or W, that is both of the above: memory in Zero Bubble."""
        return [_peak(row, {"F": 1, "B": -1, "W": -1}) for row in self.spans]


def _peak(row, change: dict[str, int]) -> int:
    """The largest running sum of `change` over a rank's actions. (Times do not matter.)"""
    now = peak = 0
    for action, _, _ in row:
        now += change.get(action.kind, 0)
        peak = max(peak, now)
    return peak


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Play the schedule. Raises UsageError, with one line, if its ranks end up waiting for each other forever."""
    costs = costs or Costs()
    if costs.stages and len(costs.stages) != schedule.stages:
        raise UsageError(f"costs of {len(costs.stages)} stages, but schedule {schedule.name} has {schedule.stages}")
    spans = [[] for _ in schedule.actions]
    ended: dict[Output, tuple[float, int]] = {}  # when, and on which rank

    def start_of(rank: int, block: tuple[Action, ...]) -> float | None:
        """When the rank can start these actions; None if that is not known yet."""
        start = spans[rank][-1][2] if spans[rank] else 0.0
        for needed in filter(None, (schedule.input_of(rank, action) for action in block)):
            if needed not in ended:
                return None
            end, sender = ended[needed]
            start = max(start, end + (costs.communication if sender != rank else 0.0))
        return start

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while block := _block(actions, len(spans[rank]), costs):
                start = start_of(rank, block)
                if start is None:
                    break
                durations = [costs.of(action.kind, schedule.stage_of(rank, action.chunk)[1]) for action in block]
                if len(block) == 2:
                    durations = [each * costs.FB / (costs.of("F") + costs.of("B")) for each in durations]
                end = start + sum(durations)
                for action, duration in zip(block, durations):
                    spans[rank].append((action, start, start + duration))
                    start += duration
                    ended[schedule.output_of(rank, action)] = end, rank
                moved = True
    rest = [actions[len(row) :] for actions, row in zip(schedule.actions, spans)]
    if any(rest):
        waits = [f"rank {rank} at {actions[0]}" for rank, actions in enumerate(rest) if actions]
        raise UsageError(f"schedule {schedule.name}: deadlock: {', '.join(waits)} wait forever")
    return Timeline(tuple(map(tuple, spans)))


def runs_as_one(first: Action, second: Action) -> bool:
    """Whether an action and the next one are an F and a B of other chunks and micro-batches, as DualPipe joins them."""
    kinds, differ = first.kind + second.kind, first.chunk != second.chunk and first.micro_batch != second.micro_batch
    return kinds == "FB" and differ


def _block(actions: tuple[Action, ...], first: int, costs: Costs) -> tuple[Action, ...]:
    """The next action; or the next two, if they run as one."""
    pair = actions[first : first + 2]
    return pair if costs.FB and len(pair) == 2 and runs_as_one(*pair) else pair[:1]
