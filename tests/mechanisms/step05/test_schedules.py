"""Every schedule is what its name says: complete, in order, free of deadlocks and within its memory."""

import random

import pytest

from common.errors import UsageError
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.simulator import Costs, simulate
from step05_pipeline.schedules.validator import check_schedule

NAMES = tuple(SCHEDULES)


def random_case(name: str, draw: random.Random) -> tuple[Schedule, dict]:
    """A schedule of that name and what it was built with."""
    ranks = draw.choice((2, 4, 6, 8)) if name == "dualpipe" else draw.randint(1, 8)
    case = {"ranks": ranks, "micro_batches": draw.randint(1, 20)}
    case["chunks"] = SCHEDULES[name].chunks or draw.randint(1, 4)
    if name == "interleaved":
        case["micro_batches"] = ranks * draw.randint(1, 4)
    if name == "llama3":
        case["consecutive"] = ranks + draw.randint(0, 6)
    return build_schedule(name, **case), case


@pytest.mark.parametrize("name", NAMES)
def test_properties_hold_for_random_sizes(name):
    draw = random.Random(name)
    for _ in range(40):
        schedule, case = random_case(name, draw)
        p, m, v = case["ranks"], case["micro_batches"], case["chunks"]
        check_schedule(schedule)
        options = {"consecutive": case["consecutive"]} if "consecutive" in case else {}
        timeline = simulate(schedule)
        # a claim that is too high fails as well: all of them are reached
        assert timeline.in_flight == [SCHEDULES[name].in_flight(p, m, v, rank, **options) for rank in range(p)], case
        weights = {"zb-h1": p, "zb-h2": 2 * p - 1, "zbv": 2 * p}.get(name)
        if weights:  # with those that wait for W
            assert max(timeline.unfinished) <= min(m * v, weights), case
        # with any costs, and so with any delays, the same actions end
        costs = Costs(*(draw.uniform(0.5, 2) for _ in range(3)), communication=draw.uniform(0, 3))
        assert [len(row) for row in simulate(schedule, costs).spans] == [len(row) for row in schedule.actions]


SPELT_OUT = {  # ranks, micro-batches, chunks
    ("naive", 2, 2, 1): ["F0 B0 F1 B1"] * 2,
    ("afab", 2, 2, 1): ["F0 F1 B0 B1"] * 2,
    ("1f1b", 3, 1, 1): ["F0 B0"] * 3,
    ("1f1b", 3, 4, 1): ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    ("breadth-first", 2, 2, 2): ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"] * 2,
    ("interleaved", 2, 4, 2): [  # Megatron-LM's order, by hand: rank 0 begins with 2 + 2 forwards, rank 1 with 2
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ],
    ("zb-h1", 3, 4, 1): [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ],
    ("zb-h2", 2, 4, 1): ["F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"],
}


@pytest.mark.parametrize("arguments", SPELT_OUT)
def test_schedules_spelt_out(arguments):
    rows = [" ".join(map(str, row)) for row in build_schedule(*arguments).actions]
    assert rows == SPELT_OUT[arguments]


def test_llama3_lies_between_depth_and_breadth_first():
    assert build_schedule("llama3", 4, 8, 2).actions == build_schedule("interleaved", 4, 8, 2).actions
    for n in (4, 5, 8):  # figure 6 of the paper: 4 ranks, N = 5 consecutive micro-batches of 10
        forwards = [each for each in build_schedule("llama3", 4, 10, 2, consecutive=n).actions[0] if each.kind == "F"]
        first = [each.micro_batch for each in forwards[:n]], [each.chunk for each in forwards[: 2 * n]]
        assert first == (list(range(n)), [0] * n + [1] * n)
    wide = [each for each in build_schedule("llama3", 4, 10, 2, consecutive=10).actions[2] if each.kind == "F"]
    assert wide == [each for each in build_schedule("breadth-first", 4, 10, 2).actions[2] if each.kind == "F"]
    assert build_schedule("llama3", 4, 6, 1).actions == build_schedule("1f1b", 4, 6).actions


@pytest.mark.parametrize("sizes", [(0, 6), (2, 0), (2, 2, 0)])
def test_nothing_is_less_than_one(sizes):
    with pytest.raises(UsageError, match="^[^\n]* 0 must be at least 1$"):
        build_schedule("interleaved", *sizes)
