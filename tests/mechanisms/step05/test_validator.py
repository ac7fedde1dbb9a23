"""Messages are placed so that nobody waits forever; the check rejects what is incomplete or would get stuck."""

import re
from dataclasses import replace

import pytest

from common.errors import UsageError
from step05_pipeline.schedules.actions import Action, Schedule
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.messages import Transfer, place_messages
from step05_pipeline.schedules.validator import check_programs, check_schedule


def changed(schedule: Schedule, **texts: str) -> Schedule:
    """With other rows: r1="F0 B0" is that of rank 1."""
    actions = list(schedule.actions)
    for rank, text in texts.items():
        cells = [cell.partition(".") for cell in text.split()]
        actions[int(rank[1:])] = tuple(Action(cell[0], int(cell[1:]), int(chunk or 0)) for cell, _, chunk in cells)
    return replace(schedule, actions=tuple(actions))


BROKEN = [  # schedule, the row of rank 0 or 1, what the line says
    ("1f1b", {"r1": "F0 F1 B0"}, "rank 1 never does B1 (or I1 and W1)"),
    ("1f1b", {"r1": "F0 B0 B1"}, "rank 1 never does F1"),
    ("1f1b", {"r1": "F0 F1 I0 W0 I1"}, "rank 1 never does W1"),
    ("1f1b", {"r0": "F0 F1 F0 B0 B1"}, "rank 0 does F0 twice"),
    ("1f1b", {"r1": "F0 B0 W0 F1 B1"}, "rank 1 does B0 and also W0"),
    ("1f1b", {"r1": "F0 W0 I0 F1 B1"}, "rank 1 does W0 before I0"),
    ("1f1b", {"r1": "F0 B0 B1 F1"}, "rank 1 does B1 before F1"),
    ("1f1b", {"r1": "I0 F0 W0 F1 B1"}, "rank 1 does I0 before F0"),
    ("1f1b", {"r0": "F0 B0", "r1": "F0 B0"}, "micro-batch 1 is missing on all ranks"),
    ("1f1b", {"r1": "F0 B0 F1 B1 F2 B2"}, "rank 1: F2, but there are 2 micro-batches"),
    ("1f1b", {"r1": "F0 B0 F1.1 B1"}, "rank 1: F1.1 is of chunk 1"),
    ("1f1b", {"r1": "F0 B0 F1 X1"}, "rank 1: X1 is no F, B, I or W"),
    ("1f1b", {"r0": "F0 B0 F1 B1", "r1": "F1 B1 F0 B0"}, "deadlock: rank 0 at B0, rank 1 at F1 wait forever"),
    ("dualpipe", {"r0": "F0 F1.1 B1.1 B0 F0.1"}, "micro-batch 0 passes through two copies of the model: F0 of rank 0"),
    ("zbv", {"r1": "F0.1 I0.1 W0.1 F0 I0 W0 F1 F1.1 I1.1 W1.1 I1 W1"}, "deadlock: rank 0 at "),
]


@pytest.mark.parametrize(("name", "texts", "message"), BROKEN)
def test_broken_schedules_are_rejected(name, texts, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        check_schedule(changed(build_schedule(name, 2, 2), **texts))


def test_placements():
    """Each rank has a stage, and copies share whole ranks, which sum their gradients."""
    for placement in (((0, 5),), ((0, 0),), ((0, 1), (0,))):
        with pytest.raises(UsageError, match="does not name the rank of each stage, from 0 to 1"):
            check_schedule(replace(build_schedule("1f1b", 2, 2), placement=placement))
    whole = build_schedule("1f1b", 3, 2)
    both = [(*row, *(Action(each.kind, each.micro_batch + 2, 1) for each in row)) for row in whole.actions]
    with pytest.raises(UsageError, match="hold copies of some of each other's stages"):
        check_schedule(Schedule("own", ((0, 1, 2), (1, 2, 0)), 4, tuple(both)))


def test_a_different_but_possible_order_is_accepted():
    """One rank splits its backwards; one goes from back to front."""
    check_schedule(changed(build_schedule("afab", 2, 2), r1="F0 F1 I0 I1 W1 W0"))
    check_schedule(changed(build_schedule("afab", 2, 2), r0="F1 F0 B1 B0", r1="F0 F1 B0 B1"))


def test_messages_in_the_order_of_need_would_deadlock():
    """Each receive right before its action is what one writes first. With several stages on a rank it
    asks for messages in another order than they were sent in, and NCCL hangs. With one stage it hangs only if
    messages block: then neighbours that both begin to send, the one forward, the other backward, never receive.
    """
    said = {}
    for name in SCHEDULES:
        schedule, programs = build_schedule(name, 4, 8), []
        for rank, program in enumerate(place_messages(schedule)):
            receives = [each for each in program if isinstance(each, Transfer) and each.kind == "receive"]
            needs = {schedule.input_of(rank, action): action for action in schedule.actions[rank]}
            late = [each for each in program if each not in receives]
            for each in receives:
                late.insert(late.index(needs[each.output]), each)
            programs.append(tuple(late))
        try:
            check_programs(schedule, tuple(programs))
        except UsageError as error:
            said[name] = str(error)
    blocked = {name for name, line in said.items() if "deadlock when a message blocks" in line}
    assert blocked == {"1f1b", "zb-h1", "zb-h2"}  # naive and afab send in one direction at a time
    assert said.keys() - blocked == {"interleaved", "breadth-first", "llama3", "zbv", "dualpipe", "dualpipev"}
    assert said["1f1b"].endswith("rank 3's first backward operation is to send backward 0 of stage 3 to rank 2")


def move(old: int, new: int):
    return lambda program, _: program.insert(new, program.pop(old))


# Rank 0: F0, send 0, F1, send 1, receive 0, B0, receive 1, B1. Rank 1 asks for F1's input before the F0 during which
# it arrives: receive 0, receive 1, F0, B0, send 0, F1, B1, send 1
BROKEN_PROGRAMS = [  # rank, what is done to its program, what the line says
    (1, move(1, 0), "deadlock: rank 0 waits at send forward 1"),  # which is asked for first
    (1, move(1, 5), "rank 1 waits at F1"),  # received after it is needed
    (0, move(1, 0), "rank 0 waits at send forward 0 of stage 0 to rank 1"),  # before it is computed
    (0, lambda program, _: program.pop(1), "rank 1 waits at F0"),  # never sent
    (1, lambda program, _: program.pop(1), "rank 0's first forward operation is to send forward 1"),  # or received
    (0, lambda program, _: program.append(program[1]), "rank 0's first forward operation is to send forward 0"),
    (0, lambda program, other: program.append(other[0]), "rank 0's first forward operation is to receive forward 0"),
]


@pytest.mark.parametrize(("rank", "change", "message"), BROKEN_PROGRAMS)
def test_broken_programs_are_rejected(rank, change, message):
    schedule = build_schedule("1f1b", 2, 2)
    programs = [list(program) for program in place_messages(schedule)]
    change(programs[rank], programs[1 - rank])
    with pytest.raises(UsageError, match=message):
        check_programs(schedule, tuple(map(tuple, programs)))
