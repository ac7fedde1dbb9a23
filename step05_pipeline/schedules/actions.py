"""What a schedule is made of, and where schedules are kept. Pure data: nothing here needs torch or a process group.

A schedule says in which order each rank of a pipeline works. One unit of that work is an `Action`: forward or backward
of one micro-batch through one stage. The functions that make schedules are in `schedules.py` and `zero_bubble.py`.
"""

import functools
import inspect
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import UsageError

Placement = tuple[tuple[int, ...], ...]  # as in common.process_groups: one row a copy of the model, row[stage] = rank
Output = tuple[str, int, int, int]  # (direction, copy, stage that makes it, micro-batch): activations or their gradient
DIRECTIONS = {"F": "forward", "B": "backward", "I": "backward"}  # which way an action's output goes


@dataclass(frozen=True)
class Action:
    """One unit of work of a rank; str() is `F3`, or `F3.1` for chunk 1.

    kind: "F" forward, "B" backward, or the backward's two parts: "I" gradient of the input, "W" of the weights.
    chunk: which of the rank's stages, counted in the order of (copy, stage).
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """`actions[rank]`: what each rank does, in order. `placement`: which rank holds which stage of which copy."""

    name: str
    placement: Placement
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Of one copy of the model."""
        return len(self.placement[0])

    @functools.cached_property
    def _held(self) -> list[list[tuple[int, int]]]:
        held = [[] for _ in self.actions]
        for copy, row in enumerate(self.placement):
            for stage, rank in enumerate(row):
                held[rank].append((copy, stage))
        return held

    def chunks(self, rank: int) -> int:
        """How many stages the rank holds, over all copies."""
        return len(self._held[rank])

    def stage_of(self, rank: int, chunk: int) -> tuple[int, int]:
        """(copy, stage) of a rank's chunk."""
        return self._held[rank][chunk]

    def place_of(self, copy: int, stage: int) -> tuple[int, int]:
        """(rank, chunk) that holds a stage."""
        rank = self.placement[copy][stage]
        return rank, self._held[rank].index((copy, stage))

    def makes(self, rank: int, action: Action) -> Output | None:
        """What an action makes for another stage, or for the loss. A W makes nothing."""
        copy, stage = self.stage_of(rank, action.chunk)
        return (DIRECTIONS[action.kind], copy, stage, action.micro_batch) if action.kind != "W" else None

    def needs(self, rank: int, action: Action) -> Output | None:
        """What an action takes from another stage; None where it takes data, the loss, or what its rank has kept."""
        copy, stage = self.stage_of(rank, action.chunk)
        stage += 1 if action.kind in "BI" else -1
        if action.kind == "W" or not 0 <= stage < self.stages:
            return None
        return DIRECTIONS[action.kind], copy, stage, action.micro_batch


# ---- where stages lie ------------------------------------------------------------------------------------------------


def looped(ranks: int, chunks: int) -> Placement:
    """Stage s on rank s % ranks: 0 1 2 3 0 1 2 3."""
    return (tuple(range(ranks)) * chunks,)


def v_shaped(ranks: int, chunks: int) -> Placement:
    """Down and up again: 0 1 2 3 3 2 1 0. The first and the last stage share a rank."""
    return (tuple(range(ranks)) + tuple(reversed(range(ranks))),)


def bidirectional(ranks: int, chunks: int) -> Placement:
    """Two copies of the model, one in each direction."""
    return tuple(range(ranks)), tuple(reversed(range(ranks)))


PLACEMENTS = {"looped": looped, "v": v_shaped, "bidirectional": bidirectional}

# ---- the functions that make schedules -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """What is known of a schedule by its name; see `schedule`."""

    name: str
    function: Callable
    placement: Callable[[int, int], Placement]
    chunks: int | None
    in_flight: Callable | None

    def build(self, ranks: int, micro_batches: int, chunks: int | None = None, **options) -> Schedule:
        """What the function makes of these numbers. Raises UsageError for those that the schedule cannot do."""
        for flag, value in (("--pp", ranks), ("micro-batches:", micro_batches), ("--virtual-stages", chunks)):
            if value is not None and value < 1:
                raise UsageError(f"{flag} {value} must be at least 1")
        if self.chunks and chunks not in (None, self.chunks):
            each = "1 stage" if self.chunks == 1 else f"{self.chunks} stages"
            raise UsageError(f"--virtual-stages {chunks}: --schedule {self.name} has {each} on each rank")
        if unknown := options.keys() - inspect.signature(self.function).parameters:
            raise UsageError(f"--schedule {self.name} has no --{min(unknown)}")
        chunks = chunks or self.chunks or 2
        actions = list(self.function(ranks, micro_batches, chunks, **options))
        if len(actions) != ranks:
            raise UsageError(f"--schedule {self.name} has actions for {len(actions)} ranks, not for --pp {ranks}")
        return Schedule(self.name, self.placement(ranks, chunks), micro_batches, tuple(map(tuple, actions)))


SCHEDULES: dict[str, Entry] = {}  # by the value of --schedule


def schedule(
    name: str,
    placement: Callable[[int, int], Placement] = looped,
    chunks: int | None = 1,
    in_flight: Callable | None = None,
):
    """Register a function `(ranks, micro_batches, chunks) -> [list of actions for each rank]` as `--schedule name`.

    Args:
        placement: `looped`, `v_shaped`, `bidirectional`, or another function (ranks, chunks) -> Placement.
        chunks: stages that a rank holds of one copy of the model; None where --virtual-stages may say it (default 2).
        in_flight: (ranks, micro_batches, chunks, rank) -> the most (micro-batch, chunk) pairs that the rank ever keeps
            between F and B (or I). It states a claim; the tests hold the schedule to it.
    """

    def register(function: Callable) -> Callable:
        if name in SCHEDULES:
            raise UsageError(f"--schedule {name} is registered twice; choose another name")
        SCHEDULES[name] = Entry(name, function, placement, chunks, in_flight)
        return function

    return register


def expand_pattern(*table: tuple[int, str], micro_batches: int) -> list[Action]:
    """The actions that a table of (how often, which) stands for: `(3, "F"), (5, "F B"), (3, "B")`.

    "F1" is F of chunk 1. Each of F and B counts its own micro-batches in each chunk, from 0 upwards; I is a B without
    its weight gradients; W takes the oldest I that lacks them, and those still lacking at the end come last.

    A table may count more micro-batches than there are. Leaving the others out is always safe: actions of different
    micro-batches never need each other, and the rest keeps its order.
    """
    actions, count, waiting = [], Counter(), deque()
    for times, words in table:
        for word in words.split() * times:
            kind, chunk = word[0], int(word[1:] or 0)
            if kind == "W":
                if waiting:
                    actions.append(waiting.popleft())
                continue
            direction = "F" if kind == "F" else "B"
            micro_batch = count[direction, chunk]
            count[direction, chunk] += 1
            actions.append(Action(kind, micro_batch, chunk))
            if kind == "I":
                waiting.append(Action("W", micro_batch, chunk))
    return [action for action in (*actions, *waiting) if action.micro_batch < micro_batches]
