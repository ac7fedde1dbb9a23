"""Sends and receives, placed between the actions of a schedule so that no schedule can deadlock.

NCCL runs the operations of a rank on one communicator one at a time, in the order in which the rank issued them, and an
operation between two ranks runs only when both have reached it. Two ranks that issue the same messages in different
orders wait for each other forever. Here all ranks issue their messages in one common order: by the time at which each
message would be ready in a simulation where F, I and W take 1, B takes 2 and a message takes 1/4. These times fix the
order only; real durations may differ.

Issuing a message does not block (on NCCL, the first between two ranks does). A rank waits in two places only: before an
action, for the input of that action, and before a send, until its previous send in the same direction is complete.
Activations and their gradients use one communicator each, so that neither delays the other. Two communicators alone
would not prevent deadlocks: in a V, or with two copies of the model, both ranks of a pair send activations.
"""

from dataclasses import dataclass

from step05_pipeline.schedules.actions import Action, Output, Schedule
from step05_pipeline.schedules.simulator import Costs, Spans, simulate

# The time of a message, where a forward takes 1. With 0, an action that the receiver runs meanwhile would end exactly
# when the message is ready. It would be sorted before the receive, which would be posted one action late.
MESSAGE_TIME = 0.25


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


def place_messages(schedule: Schedule, spans: Spans | None = None) -> tuple[Program, ...]:
    """One program per rank: its actions in the schedule's order, with sends and receives between them.

    For example, 1F1B on 2 ranks with 2 micro-batches, where > sends and < receives the message with that number:

        rank 0    F0  >1  F1  >2  <3  B0  <4  B1          1, 2: activations of micro-batches 0 and 1
        rank 1    <1  <2  F0  B0  >3  F1  B1  >4          3, 4: their gradients

    Both ranks issue 1, 2, 3, 4. Rank 1 asks for 2 before it runs F0, because 2 is ready while it does.

    A message that is ready at time t is issued after all actions that end by t and before those that end later: by its
    sender right after the action that computes it, by its receiver before the action during which it arrives. If two
    messages are ready at the same time, that of the lower sender is first, so all ranks agree on the order.

    This cannot deadlock. Consider the earliest message that has not arrived, ready at time t. All actions that its two
    ranks have to finish before they issue it end by t, so they need earlier messages only, and those have arrived. The
    previous send, which its sender may wait for, is an earlier message too. So both ranks reach the message, even if
    every message blocks its ranks until it has arrived.

    Raises UsageError if the schedule itself makes ranks wait for each other.

    Args:
        spans: when each rank does what, in place of that simulation, if an executor runs pairs of actions as one.
    """
    spans = spans or simulate(schedule, Costs(communication=MESSAGE_TIME)).spans
    # When each output has been computed (None stands for the W, which have none)
    ready = {schedule.output_of(rank, action): end for rank, row in enumerate(spans) for action, _, end in row}
    messages = []
    for receiver, actions in enumerate(schedule.actions):
        for needed in filter(None, (schedule.input_of(receiver, action) for action in actions)):
            sender = schedule.placement[needed.copy][needed.stage]
            if sender != receiver:
                messages.append((ready[needed], sender, receiver, needed))
    programs = [[(end, 0, action) for action, _, end in row] for row in spans]
    for time, sender, receiver, output in sorted(messages):
        programs[sender].append((time, 1, Transfer("send", output, receiver)))
        programs[receiver].append((time, 1, Transfer("receive", output, sender)))
    for program in programs:
        program.sort(key=lambda each: each[:2])  # actions that end at t, then messages of time t; stable
    return tuple(tuple(item for *_, item in program) for program in programs)
