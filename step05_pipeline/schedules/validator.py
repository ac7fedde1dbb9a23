"""The check that a schedule can run: complete, in a possible order, and with messages that do not deadlock.

For example, four stages are interleaved on two ranks, and each rank asks for a message only when it needs it, not in
the order of `messages.py`. What they have come to, if > sends and < receives the message with that number:

    rank 0    F0  >1  F1  >2  <3, then F0.1, which waits    1, 2: activations of micro-batches 0 and 1, for stage 1
    rank 1    <1  F0  >3  <2, then F1, which waits          3: those of micro-batch 0, for stage 2

Message 1 has arrived. Now the queue of rank 0 is >2 <3, and that of rank 1 is >3 <2. Both begin with a send whose
receive is not the first in the other queue. So nothing more can arrive, and the schedule is refused:

    deadlock: rank 0 waits at F0.1; rank 0's first forward operation is to send forward 1 of stage 0 to rank 1; rank 1
    waits at F1; rank 1's first forward operation is to send forward 0 of stage 1 to rank 0
"""

from collections import defaultdict

from common.errors import UsageError
from step05_pipeline.schedules.actions import DIRECTIONS, Action, Schedule
from step05_pipeline.schedules.messages import Program, Transfer, place_messages


def check_schedule(schedule: Schedule) -> None:
    """Return if the schedule can run; otherwise raise UsageError, with one line that says what is wrong."""
    _check_placement(schedule)
    kinds = defaultdict(str)  # the actions on each (rank, micro-batch, chunk), in order: "FB" or "FIW"
    # Per micro-batch: copy of the model -> an example of an action there, for the error line
    copies_used = [{} for _ in range(schedule.micro_batches)]
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind not in DIRECTIONS and action.kind != "W":
                raise _wrong(schedule, f"rank {rank}: {action} is no F, B, I or W")
            if not 0 <= action.chunk < schedule.chunks(rank):
                held = f"{schedule.chunks(rank)} stage{'s' if schedule.chunks(rank) > 1 else ''}"
                raise _wrong(schedule, f"rank {rank}: {action} is of chunk {action.chunk}, but the rank holds {held}")
            if not 0 <= action.micro_batch < schedule.micro_batches:
                raise _wrong(schedule, f"rank {rank}: {action}, but there are {schedule.micro_batches} micro-batches")
            if action.kind in kinds[rank, action.micro_batch, action.chunk]:
                raise _wrong(schedule, f"rank {rank} does {action} twice")
            kinds[rank, action.micro_batch, action.chunk] += action.kind
            copy, _ = schedule.stage_of(rank, action.chunk)
            copies_used[action.micro_batch].setdefault(copy, f"{action} of rank {rank}")
    for micro_batch, passed in enumerate(copies_used):
        if not passed:
            raise _wrong(schedule, f"micro-batch {micro_batch} is missing on all ranks")
        if len(passed) > 1:
            where = " and ".join(passed.values())
            raise _wrong(schedule, f"micro-batch {micro_batch} passes through two copies of the model: {where}")
        for stage in range(schedule.stages):
            rank, chunk = schedule.place_of(next(iter(passed)), stage)
            if wrong := _what_is_wrong(kinds[rank, micro_batch, chunk], micro_batch, chunk):
                raise _wrong(schedule, f"rank {rank} {wrong}")
    check_programs(schedule, place_messages(schedule))


def _check_placement(schedule: Schedule) -> None:
    rows, ranks = schedule.placement, set(range(schedule.ranks))
    if len({len(row) for row in rows}) != 1 or {rank for row in rows for rank in row} != ranks:
        raise _wrong(schedule, f"placement {rows} does not name the rank of each stage, from 0 to {schedule.ranks - 1}")
    held = [{schedule.stage_of(rank, chunk)[1] for chunk in range(schedule.chunks(rank))} for rank in ranks]
    for rank, stages in enumerate(held):
        for other in range(rank):
            if stages & held[other] and stages != held[other]:  # no group of ranks could sum their gradients
                both = f"stages {sorted(held[other])} and {sorted(stages)}"
                raise _wrong(schedule, f"ranks {other} and {rank} hold copies of some of each other's stages: {both}")


def _what_is_wrong(kinds: str, micro_batch: int, chunk: int) -> str | None:
    """What a rank does wrong with one micro-batch in one of its stages, where it should do "FB" or "FIW"."""
    name = {kind: str(Action(kind, micro_batch, chunk)) for kind in "FBIW"}
    part = next((kind for kind in kinds if kind in "IW"), None)
    if "B" in kinds and part:
        return f"does {name['B']} and also {name[part]}, a part of it"
    complete = "FIW" if part else "FB"
    for kind in complete:
        if kind not in kinds:
            return f"never does {name[kind]}" + (f" (or {name['I']} and {name['W']})" if kind == "B" else "")
    for done, expected in zip(kinds, complete):
        if done != expected:
            return f"does {name[done]} before {name[expected]}"
    return None


# ---- the messages ----------------------------------------------------------------------------------------------------


def check_programs(schedule: Schedule, programs: tuple[Program, ...]) -> None:
    """Play one program per rank as NCCL would run it. Raises UsageError, with one line, if ranks get stuck.

    An operation completes when it is the first in the queues of both its ranks; each rank has one queue per direction.
    Like the executor, a rank waits before an action for the action's input, and before a send until its previous send
    in that direction is complete. Under these rules the result does not depend on which rank runs first.

    The programs are played a second time with operations that block: a rank goes on only when the operation that it has
    issued is complete. NCCL connects two ranks at their first message, and that blocks the one until the other comes.
    """
    if stuck := _stuck(schedule, programs, blocking=False):
        raise _wrong(schedule, f"deadlock: {stuck}")
    if stuck := _stuck(schedule, programs, blocking=True):
        raise _wrong(schedule, f"deadlock when a message blocks, as the first between two ranks does on NCCL: {stuck}")


def _stuck(schedule: Schedule, programs: tuple[Program, ...], blocking: bool) -> str:
    """Where the ranks wait forever; empty if all of them come to the end of their programs."""
    play = _Play(schedule, programs, blocking)
    while play.let_ranks_run() or play.let_messages_pass():
        pass
    stuck = play.waiting()
    return "; ".join(stuck[:6]) + (" ..." if len(stuck) > 6 else "")


class _Play:
    """How far each rank has come in its program.

    position   of each rank: the index of its next item
    queues     (rank, direction) -> operations that the rank has issued and that are not complete
    available  (rank, output) that the rank has computed or received; (rank, None), because some actions take no output
    """

    def __init__(self, schedule: Schedule, programs: tuple[Program, ...], blocking: bool):
        self.schedule, self.programs, self.blocking = schedule, programs, blocking
        self.position = [0] * len(programs)
        self.queues = {(rank, each): [] for rank in range(len(programs)) for each in ("forward", "backward")}
        self.available = {(rank, None) for rank in range(len(programs))}

    def let_ranks_run(self) -> bool:
        """Each rank goes on until it waits. Returns whether any of them moved."""
        before = sum(self.position)
        for rank in range(len(self.programs)):
            while (item := self.next_item(rank)) and self.can_go_on(rank, item):
                if isinstance(item, Action):
                    self.available.add((rank, self.schedule.output_of(rank, item)))
                else:
                    self.queues[rank, item.output.direction].append(item)
                self.position[rank] += 1
        return sum(self.position) > before

    def let_messages_pass(self) -> bool:
        """Each message whose send and receive are both the first in their queues arrives. Returns whether any did."""
        moved = False
        for rank, direction in self.queues:
            while (item := self.first(rank, direction)) and item.kind == "receive":
                if self.first(item.peer, direction) != Transfer("send", item.output, rank):
                    break
                self.queues[rank, direction].pop(0)
                self.queues[item.peer, direction].pop(0)
                self.available.add((rank, item.output))
                moved = True
        return moved

    def can_go_on(self, rank: int, item: Action | Transfer) -> bool:
        """Whether the rank may begin with `item` now."""
        if self.blocking and self.issued(rank):
            return False
        if isinstance(item, Action):
            return (rank, self.schedule.input_of(rank, item)) in self.available
        sending = any(each.kind == "send" for each in self.queues[rank, item.output.direction])
        return item.kind == "receive" or ((rank, item.output) in self.available and not sending)

    def next_item(self, rank: int) -> Action | Transfer | None:
        program, index = self.programs[rank], self.position[rank]
        return program[index] if index < len(program) else None

    def first(self, rank: int, direction: str) -> Transfer | None:
        return next(iter(self.queues[rank, direction]), None)

    def issued(self, rank: int) -> list[tuple[str, Transfer]]:
        """The first operation in each direction that the rank has issued and that is not complete."""
        return [(each, item) for each in ("forward", "backward") if (item := self.first(rank, each))]

    def waiting(self) -> list[str]:
        """What each rank waits for, in words."""
        found = []
        for rank in range(len(self.programs)):
            if (item := self.next_item(rank)) and not (self.blocking and self.issued(rank)):
                found.append(f"rank {rank} waits at {item}")
            for direction, transfer in self.issued(rank):
                found.append(f"rank {rank}'s first {direction} operation is to {transfer}")
        return found


def _wrong(schedule: Schedule, what: str) -> UsageError:
    return UsageError(f"schedule {schedule.name}: {what}")
