"""What a schedule is made of. Pure data: nothing in this folder needs torch or a process group.

A schedule says in which order each rank of a pipeline works. One unit of that work is an `Action`: the forward or the
backward of one micro-batch through one stage. The functions that make schedules are in `whole_backward.py`,
`split_backward.py` and `further/`; `catalogue.py` lists them by name.
"""

import functools
import itertools
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

# One row per copy of the model, row[stage] = rank. Not imported from common.process_groups, because that needs torch.
Placement = tuple[tuple[int, ...], ...]
DIRECTIONS = {"F": "forward", "B": "backward", "I": "backward"}  # in which direction an action's output travels


@dataclass(frozen=True)
class Action:
    """One unit of a rank's work; str() is `F3`, or `F3.1` for chunk 1.

    kind: "F" forward, "B" backward, or the backward's two parts: "I" gradient of the input, "W" of the weights. These
        are the letters of torch.distributed.pipelining. Zero Bubble (Qi et al., arXiv:2401.10241) calls I `B`.
    chunk: which of the rank's stages, counted in the order of (copy, stage).
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Output(NamedTuple):
    """What one action computes and another takes as its input. If that is on another rank, this names the message."""

    direction: str  # "forward": activations, "backward": their gradient
    copy: int
    stage: int  # the stage that computed it
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """`actions[rank]`: what each rank does, in order. `placement`: which rank holds which stage of which copy.

    overlapped: meant for runs in which an F and the B of another stage right behind it hide each other's messages, as
        DualPipe's do. They do so only where a layer has messages of its own (`--ep`).
    """

    name: str
    placement: Placement
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    overlapped: bool = False

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        """The number of stages of one copy of the model."""
        return len(self.placement[0])

    @property
    def splits_backward(self) -> bool:
        """Whether some backward comes in two halves, I and W."""
        return any(action.kind == "I" for row in self.actions for action in row)

    @functools.cached_property
    def _held(self) -> list[list[tuple[int, int]]]:
        held = [[] for _ in self.actions]
        for copy, row in enumerate(self.placement):
            for stage, rank in enumerate(row):
                held[rank].append((copy, stage))
        return held

    def chunks(self, rank: int) -> int:
        """The number of stages that the rank holds, over all copies."""
        return len(self._held[rank])

    def stage_of(self, rank: int, chunk: int) -> tuple[int, int]:
        """(copy, stage) of a rank's chunk."""
        return self._held[rank][chunk]

    def place_of(self, copy: int, stage: int) -> tuple[int, int]:
        """(rank, chunk) that holds a stage."""
        rank = self.placement[copy][stage]
        return rank, self._held[rank].index((copy, stage))

    def output_of(self, rank: int, action: Action) -> Output | None:
        """What an action passes on, even if no stage takes it (the loss, the first input's gradient). None for a W."""
        copy, stage = self.stage_of(rank, action.chunk)
        return Output(DIRECTIONS[action.kind], copy, stage, action.micro_batch) if action.kind != "W" else None

    def input_of(self, rank: int, action: Action) -> Output | None:
        """The output of a neighboring stage that an action takes; None if it starts from data, the loss or an I."""
        copy, stage = self.stage_of(rank, action.chunk)
        stage += 1 if action.kind in "BI" else -1
        if action.kind == "W" or not 0 <= stage < self.stages:
            return None
        return Output(DIRECTIONS[action.kind], copy, stage, action.micro_batch)


# ---- placement: which rank holds which stage, unless a schedule has its own ------------------------------------------


def looped(ranks: int, chunks: int) -> Placement:
    """Stage s on rank s % ranks: 0 1 2 3 0 1 2 3."""
    return (tuple(range(ranks)) * chunks,)


# ---- a short way to write down a rank's actions ----------------------------------------------------------------------


def expand_pattern(*table: tuple[int, str], micro_batches: int) -> list[Action]:
    """The actions that a table of (how often, which) stands for: `(3, "F"), (5, "F B"), (3, "B")`.

    "F.1" is F of chunk 1, as in str(Action), but without the micro-batch. That is counted: in each chunk, forwards
    count from 0 upwards, and so do backwards (B and I together). So `(2, "F F.1")` is F0 F0.1 F1 F1.1. W takes the
    oldest I that still lacks its weight gradients; those that lack them at the end follow last.

    A table may count more micro-batches than there are, and the surplus is left out. That is always safe: actions of
    different micro-batches never need each other, and the others keep their order.
    """
    actions, waiting, numbers = [], deque(), defaultdict(itertools.count)  # of micro-batches, by (direction, chunk)
    for times, words in table:
        for word in words.split() * times:
            kind, _, number = word.partition(".")
            chunk = int(number or 0)
            if kind == "W":
                if waiting:
                    actions.append(waiting.popleft())
                continue
            micro_batch = next(numbers[DIRECTIONS[kind], chunk])
            actions.append(Action(kind, micro_batch, chunk))
            if kind == "I":
                waiting.append(Action("W", micro_batch, chunk))
    return [action for action in (*actions, *waiting) if action.micro_batch < micro_batches]
