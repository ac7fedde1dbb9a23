"""Sends and receives, placed between the actions of a schedule so that no schedule can deadlock.

NCCL runs the operations of a rank on one communicator one at a time, in the order in which the rank issued them, and an
operation between two ranks runs only when both have reached it. Two ranks that issue the same messages in different
orders wait for each other forever. Here all ranks issue their messages in one common order: that of the times at which
the messages would be ready, if each F, I and W took one unit of time and a message a quarter of one.

Issuing a message does not block. A rank waits in two places only: before an action, for the input of that action, and
before a send, until its previous send in the same direction is complete. Activations and their gradients use one
communicator each, so that neither delays the other. Two communicators alone would not prevent deadlocks: in a V, or
with two copies of the model, both ranks of a pair send activations.
"""

from dataclasses import dataclass

from step05_pipeline.schedules.actions import Action, Output, Schedule
from step05_pipeline.schedules.simulator import Costs, simulate


@dataclass(frozen=True)
class Transfer:
    """One rank's half of a message: `kind` is "send" or "receive", `peer` the pipeline rank at the other end."""

    kind: str
    output: Output
    peer: int

    def __str__(self) -> str:
        what = f"{self.output.direction} {self.output.micro_batch} of stage {self.output.stage}"
        return f"{self.kind} {what} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"


Program = tuple[Action | Transfer, ...]


def place_messages(schedule: Schedule) -> tuple[Program, ...]:
    """One program per rank: its actions in the schedule's order, with sends and receives between them.

    A message that is ready at time t is issued after what ends by t and before what ends later: by its sender right
    after the action that computes it, by its receiver before the action during which it arrives. Messages that are
    ready at the same time are sorted, so all ranks agree on the order.

    This cannot deadlock. Consider the earliest message that has not arrived, ready at time t. All actions that its two
    ranks have to finish before they issue it end by t, so they need earlier messages only, and those have arrived. The
    previous send, which its sender may wait for, is an earlier message too. So both ranks reach the message.

    Raises UsageError if the schedule itself makes ranks wait for each other.
    """
    # If messages took no time, actions that the receiver runs meanwhile would seem to end before the message is sent
    spans = simulate(schedule, Costs(communication=0.25)).spans
    messages = []
    for rank, row in enumerate(spans):
        for action, _, end in row:
            receiver = _receiver(schedule, rank, action)
            if receiver not in (None, rank):
                messages.append((end, rank, receiver, schedule.output_of(rank, action)))
    programs = [[(end, 0, action) for action, _, end in row] for row in spans]
    for time, sender, receiver, output in sorted(messages):
        programs[sender].append((time, 1, Transfer("send", output, receiver)))
        programs[receiver].append((time, 1, Transfer("receive", output, sender)))
    for program in programs:
        program.sort(key=lambda each: each[:2])  # actions that end at t, then messages of time t; stable
    return tuple(tuple(item for *_, item in program) for program in programs)


def _receiver(schedule: Schedule, rank: int, action: Action) -> int | None:
    """The rank of the stage that needs the action's output; None if no other stage does."""
    if action.kind == "W":
        return None
    copy, stage = schedule.stage_of(rank, action.chunk)
    stage += 1 if action.kind == "F" else -1
    return schedule.placement[copy][stage] if 0 <= stage < schedule.stages else None
