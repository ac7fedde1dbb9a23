"""Plays the recorded messages of all ranks in time, on communicators that behave as NCCL's do."""

from collections import defaultdict

from common.collectives import Call

Event = tuple[str, object]  # ("issue", a message's call), ("wait", the same call), or ("work", how long it takes)


def replay(programs: list[list[Event]], communicators: list[dict[str, str]], latency: float) -> float:
    """The moment at which the last rank ends, if all begin at 0 and do what their programs say, in order.

    A communicator runs the operations of a rank one at a time, in the order in which they were issued, and a message
    begins when it is the first operation at both its ranks. Issuing takes no time.

    Args:
        programs: of each rank. Every message has a send and a receive, whose `peer` is a rank.
        communicators: of each rank, by the group of a call: the name of what torch made for it.
        latency: how long a message takes.

    Raises AssertionError when ranks wait for each other forever.
    """
    programs, time, done = [list(program) for program in programs], [0.0] * len(programs), {}
    queues, free = defaultdict(list), defaultdict(float)  # by (rank, communicator): operations; when the last one ended
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while program and (program[0][0] != "wait" or id(program[0][1]) in done):
                what, value = program.pop(0)
                if what == "issue":
                    queues[rank, communicators[rank][value.group]].append((value, time[rank]))
                else:
                    time[rank] = max(time[rank], done[id(value)]) if what == "wait" else time[rank] + value
                moved = True
        for rank, communicator in list(queues):
            mine = queues[rank, communicator]
            while mine and mine[0][0].op == "send":
                call, issued = mine[0]
                theirs, ends = queues[call.peer, communicator], ((rank, communicator), (call.peer, communicator))
                if not theirs or not _belongs_to(theirs[0][0], rank):
                    break
                end = max(issued, theirs[0][1], *(free[each] for each in ends)) + latency
                done[id(call)] = done[id(theirs[0][0])] = free[ends[0]] = free[ends[1]] = end
                mine.pop(0)
                theirs.pop(0)
                moved = True
    assert not any(programs) and not any(queues.values()), "ranks wait for each other forever"
    return max(time)


def _belongs_to(call: Call, sender: int) -> bool:
    return call.op == "receive" and call.peer == sender
