"""Plays what all ranks have issued: messages in time, on communicators that behave as NCCL's do, or everything under a
rule stricter than NCCL's.
"""

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
        for rank, communicator in [mine for mine, queue in queues.items() if queue and queue[0][0].op == "send"]:
            call, issued = queues[rank, communicator][0]
            ends = (rank, communicator), (call.peer, communicator)
            theirs = next(iter(queues[ends[1]]), None)
            if theirs and theirs[0].op == "receive" and theirs[0].peer == rank:
                end = max(issued, theirs[1], *(free[each] for each in ends)) + latency
                done |= dict.fromkeys((id(queues[each].pop(0)[0]) for each in ends), end)
                free |= dict.fromkeys(ends, end)
                moved = True
    assert not any(programs) and not any(queues.values()), "ranks wait for each other forever"
    return max(time)


def play_strictly(orders: list[list[list[Call]]], members: list[dict[str, tuple[int, ...]]]) -> None:
    """Return if all ranks come to the end when every operation blocks its rank until all its members have come to it.

    NCCL does not promise more: the first use of a communicator, or of a pair of ranks in it, blocks until the others
    come, and operations on several communicators may be too many for one GPU to run at the same time.

    Args:
        orders: of each rank, its operations in the order of their launch, each as its calls: one, or those of a batch
            of messages, which blocks the rank until all of them have met their other end.
        members: of each rank, by the group of a call: the group's global ranks.

    Raises AssertionError, which names the ranks and what they have come to, if they wait for each other forever.
    """
    rest = [iter(order) for order in orders]
    now = [list(next(operations, ())) for operations in rest]  # what each rank has come to, and is not over
    changed = list(range(len(orders)))  # ranks that have come to something new
    while changed:
        rank = changed.pop()
        for call in tuple(now[rank]):
            ends = members[rank][call.group] if call.peer is None else (rank, call.peer)
            halves = [next((each for each in now[end] if _is_half(each, end, call, rank)), None) for end in ends]
            if None not in halves:
                for end, half in zip(ends, halves, strict=True):
                    now[end].remove(half)
                    if not now[end]:
                        now[end] = list(next(rest[end], ()))
                        changed.append(end)
    stuck = [f"rank {rank} at {', '.join(map(_named, calls))}" for rank, calls in enumerate(now) if calls]
    assert not stuck, f"ranks wait for each other forever: {'; '.join(stuck)}"


def _is_half(call: Call, rank: int, other: Call, other_rank: int) -> bool:
    """Whether two ranks' calls belong to one operation."""
    if rank == other_rank:
        return call is other
    if call.peer is None:
        same_op = call.op == other.op and other.peer is None
    else:
        same_op = {call.op, other.op} == {"send", "receive"} and (call.peer, other.peer) == (other_rank, rank)
    same_size = call.elements == other.elements or call.op == "all_to_all"
    return same_op and same_size and (call.group, call.dtype) == (other.group, other.dtype)


def _named(call: Call) -> str:
    to = "" if call.peer is None else f" {'to' if call.op == 'send' else 'from'} rank {call.peer}"
    return f"{call.op} of {call.elements} in {call.group}{to}"
