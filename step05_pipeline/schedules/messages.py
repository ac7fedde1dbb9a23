"""Sends and receives of a schedule, placed so that no schedule can deadlock; and the check that none does.

NCCL runs the operations of a rank on one communicator one at a time, in the order in which the rank issued them, and an
operation between two ranks only when both have come to it. So two ranks that issue the same messages in different order
wait for each other forever. Here every rank issues its messages in one order that all of them share: by the time at
which they would be ready, were each F, I and W to take one unit and a message a quarter of one.

Issuing does not block: a rank waits only before an action, for what this action needs, and before a send until its last
one in that direction is over. Activations and their gradients have a communicator each, so that neither holds up the
other. That alone is not enough: in a V, or with two copies of the model, both ends of a pair send activations.
"""

from collections import defaultdict
from dataclasses import dataclass

from common.errors import UsageError
from step05_pipeline.schedules.actions import DIRECTIONS, Action, Output, Schedule
from step05_pipeline.schedules.simulator import Costs, simulate


@dataclass(frozen=True, order=True)
class Message:
    """Activations ("forward") or their gradient ("backward") of a micro-batch. `stage` is the one that made it."""

    sender: int  # pipeline rank
    receiver: int
    direction: str
    copy: int
    stage: int
    micro_batch: int

    @property
    def output(self) -> Output:
        """What it carries."""
        return self.direction, self.copy, self.stage, self.micro_batch

    def __str__(self) -> str:
        return f"{self.direction} {self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True)
class Send:
    message: Message

    def __str__(self) -> str:
        return f"send {self.message} to rank {self.message.receiver}"


@dataclass(frozen=True)
class Receive:
    message: Message

    def __str__(self) -> str:
        return f"receive {self.message} from rank {self.message.sender}"


Program = tuple[Action | Send | Receive, ...]


def place_messages(schedule: Schedule) -> tuple[Program, ...]:
    """One program for each rank: its actions in the schedule's order, with sends and receives between them.

    A message that is ready at time t is issued after what ends by t and before what ends later: by its sender right
    after the action that makes it, by its receiver before the action during which it will come. Messages of the same
    time are sorted, so the order is the same on all ranks. It is deadlock-free: all that a rank has to do before it
    issues a message ended by t, so it needed only messages of an earlier time; and the send that it waits for is an
    earlier message as well.
    """
    # Messages take a little: without that, what a receiver does until they come would seem to end before they leave
    spans = simulate(schedule, Costs(communication=0.25)).spans
    messages = []
    for rank, row in enumerate(spans):
        for action, _, end in row:
            receiver = _receiver(schedule, rank, action)
            if receiver not in (None, rank):
                messages.append((end, Message(rank, receiver, *schedule.makes(rank, action))))
    inserted: list[list[tuple]] = [[] for _ in spans]
    for time, message in sorted(messages):
        inserted[message.sender].append((time, Send(message)))
        inserted[message.receiver].append((time, Receive(message)))
    programs = []
    for row, operations in zip(spans, inserted):
        program = [(end, 0, action) for action, _, end in row] + [(time, 1, item) for time, item in operations]
        program.sort(key=lambda each: each[:2])  # actions that end at t, then messages of time t; stable
        programs.append(tuple(item for *_, item in program))
    return tuple(programs)


def _receiver(schedule: Schedule, rank: int, action: Action) -> int | None:
    """The rank of the stage that needs what the action makes; None if no other stage does."""
    if action.kind == "W":
        return None
    copy, stage = schedule.stage_of(rank, action.chunk)
    stage += 1 if action.kind == "F" else -1
    return schedule.placement[copy][stage] if 0 <= stage < schedule.stages else None


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(schedule: Schedule) -> None:
    """Raise UsageError, with one line that says what is wrong, unless the schedule can run: complete and in order."""
    _check_placement(schedule)
    kinds = defaultdict(str)  # what each rank does with (micro-batch, chunk), in order: "FB" or "FIW"
    copies = [{} for _ in range(schedule.micro_batches)]  # that a micro-batch passes through, with an action of each
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not isinstance(action, Action) or {type(action.micro_batch), type(action.chunk)} != {int}:
                raise _wrong(schedule, f"rank {rank}: {action!r} is no Action of whole numbers")
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
            copies[action.micro_batch].setdefault(copy, f"{action} of rank {rank}")
    for micro_batch, passed in enumerate(copies):
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


def check_programs(schedule: Schedule, programs: tuple[Program, ...]) -> None:
    """Play programs as NCCL would. Raises UsageError, with one line, when they are not the schedule's or get stuck."""
    if len(programs) != schedule.ranks:
        raise _wrong(schedule, f"{len(programs)} programs for {schedule.ranks} ranks")
    for rank, program in enumerate(programs):
        if tuple(item for item in program if isinstance(item, Action)) != schedule.actions[rank]:
            raise _wrong(schedule, f"the program of rank {rank} has other actions than the schedule, or another order")
        _check_operations(schedule, rank, program)
    sends, receives = (
        {item.message for program in programs for item in program if isinstance(item, kind)} for kind in (Send, Receive)
    )
    for message in sorted(sends ^ receives):
        lacking, rank = ("receives", message.receiver) if message in sends else ("sends", message.sender)
        raise _wrong(schedule, f"rank {rank} never {lacking} {message}")
    _play(schedule, programs)


def _check_operations(schedule: Schedule, rank: int, program: Program) -> None:
    """What one rank's program shows alone: its messages are its own, each once; sent after they were made, and not
    received after they were needed.
    """
    made, seen = set(), set()
    for item in program:
        if isinstance(item, Action):
            made.add(schedule.makes(rank, item))
            needed = schedule.needs(rank, item)
            if needed and needed not in seen:
                maker = schedule.placement[needed[1]][needed[2]]
                if maker != rank:
                    message = Message(maker, rank, *needed)
                    raise _wrong(schedule, f"rank {rank} does not {Receive(message)} before {item}, which needs it")
            continue
        message, sends = item.message, isinstance(item, Send)
        if (message.sender if sends else message.receiver) != rank:
            raise _wrong(schedule, f"rank {rank} cannot {item}: that message is not its own")
        if message.output in seen:
            raise _wrong(schedule, f"rank {rank} has twice: {item}")
        if sends and message.output not in made:
            raise _wrong(schedule, f"rank {rank} has to {item} before it is made")
        seen.add(message.output)


def _play(schedule: Schedule, programs: tuple[Program, ...]) -> None:
    """Run all ranks as far as they come, in any order: with these rules the end does not depend on it.

    One rule more than NCCL's: before a rank sends, its last send in that direction is over, as the executor waits for.
    """
    position = [0] * len(programs)  # of each rank, in its program
    queues = {(rank, way): [] for rank in range(len(programs)) for way in ("forward", "backward")}
    head = dict.fromkeys(queues, 0)  # how many operations of each queue are complete
    there = set()  # (rank, output): made or received on this rank

    def next_of(queue: tuple[int, str]) -> Message | None:
        return queues[queue][head[queue]] if head[queue] < len(queues[queue]) else None

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                item = program[position[rank]]
                if not isinstance(item, Action):
                    queue = rank, item.message.direction
                    if isinstance(item, Send):
                        if any(message.sender == rank for message in queues[queue][head[queue] :]):
                            break
                    queues[queue].append(item.message)
                else:
                    if (needed := schedule.needs(rank, item)) and (rank, needed) not in there:
                        break
                    there.add((rank, schedule.makes(rank, item)))
                position[rank] += 1
                moved = True
        for queue in queues:
            message = next_of(queue)
            while message and all(next_of((end, queue[1])) == message for end in (message.sender, message.receiver)):
                for end in (message.sender, message.receiver):
                    head[end, queue[1]] += 1
                there.add((message.receiver, message.output))
                moved, message = True, next_of(queue)
    stuck = []
    for rank, program in enumerate(programs):
        if position[rank] < len(program):
            stuck.append(f"rank {rank} waits at {program[position[rank]]}")
        for way in ("forward", "backward"):
            if message := next_of((rank, way)):
                item = Send(message) if message.sender == rank else Receive(message)
                stuck.append(f"rank {rank}'s first {way} operation is to {item}")
    if stuck:
        raise _wrong(schedule, f"deadlock: {'; '.join(stuck[:6])}{' ...' if len(stuck) > 6 else ''}")


def _wrong(schedule: Schedule, what: str) -> UsageError:
    return UsageError(f"schedule {schedule.name}: {what}")
