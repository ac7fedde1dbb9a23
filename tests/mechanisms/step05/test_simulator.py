"""The simulator against the numbers and formulas of the playbook and of the schedules' papers."""

import random

import pytest

from common.errors import UsageError
from step05_pipeline.schedules.actions import Action
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.simulator import Costs, Timeline, simulate

HALF = Costs(F=0.5, I=0.5, W=0.5)  # of a stage, with two on each rank


def run(name: str, ranks: int, micro_batches: int, costs: Costs | None = None, chunks: int | None = None, **options):
    return simulate(build_schedule(name, ranks, micro_batches, chunks, **options), costs)


def test_charts_of_the_playbook():
    """p = 4, m = 8, t_b = 2 t_f: 24 units of work."""
    makespans = {name: run(name, 4, 8).makespan for name in ("naive", "afab", "1f1b", "zb-h1")}
    assert makespans == {"naive": 96, "afab": 33, "1f1b": 33, "zb-h1": 27}
    assert run("naive", 4, 1).makespan == 12  # the whole batch as one: 12 stage-units, of which each rank works 3
    interleaved = run("interleaved", 4, 8, HALF, chunks=2)
    assert (interleaved.makespan, interleaved.ideal, interleaved.bubble) == (28.5, 24, 4.5)
    assert run("interleaved", 4, 8, chunks=2).makespan == 57  # in half units
    assert run("breadth-first", 4, 8, HALF, chunks=2).makespan == 28.5
    figure_6 = run("llama3", 4, 10, HALF, chunks=2, consecutive=5)  # 8 stages
    assert (figure_6.makespan, figure_6.bubble) == (34.5, 4.5)


def test_in_flight():
    assert run("naive", 4, 8).in_flight == [1] * 4
    assert run("afab", 4, 8).in_flight == [8] * 4
    assert run("1f1b", 4, 8).in_flight == [4, 3, 2, 1]
    assert run("1f1b", 4, 3).in_flight == [3, 3, 2, 1]
    assert run("interleaved", 4, 8, chunks=2).in_flight == [11, 9, 7, 5]  # 2 (p - 1 - rank) + (v - 1) p + 1
    assert run("interleaved", 4, 8).stores == [0] * 4
    h1, h2, v = run("zb-h1", 4, 8), run("zb-h2", 4, 8), run("zbv", 4, 8)
    assert (h1.in_flight, h1.stores, h1.unfinished) == ([4, 3, 2, 1], [1, 2, 3, 4], [4] * 4)
    assert (h2.in_flight, h2.stores, h2.unfinished) == ([7, 5, 3, 1], [1, 3, 5, 7], [7] * 4)
    assert (v.in_flight, v.stores, v.unfinished) == ([8] * 4, [1, 3, 5, 7], [8] * 4)  # halves of a rank's layers
    assert run("dualpipe", 8, 20).in_flight == [9] * 8  # PP + 1
    assert run("dualpipev", 4, 10).in_flight == [9] * 4  # of 8 stages


def test_zero_bubble_2_is_zero_within_each_rank():
    """The last rank can start at p - 1 only, so with a common end the bubble stays."""
    for name, work in (("zb-h2", 24), ("zbv", 48)):
        timeline = run(name, 4, 8)
        assert (timeline.span, timeline.ideal, timeline.makespan) == (work, work, work + 3)
    for p, m in ((2, 4), (5, 9), (8, 16), (8, 40)):
        for name in ("zb-h2", "zbv"):
            assert run(name, p, m).span == run(name, p, m).ideal


def longest_idle(timeline: Timeline) -> float:
    """The most that any rank waits within the makespan."""
    return timeline.makespan - min(sum(end - start for _, start, end in row) for row in timeline.spans)


# ---- formulas --------------------------------------------------------------------------------------------------------


def test_bubble_of_whole_backwards():
    """(p - 1)(F + B) whatever the costs, and whatever the number of micro-batches; efficiency 1 / (1 + r)."""
    draw = random.Random(0)
    for _ in range(60):
        p, m, costs = draw.randint(1, 8), draw.randint(1, 20), Costs(F=draw.uniform(0.3, 2), B=draw.uniform(0.3, 3))
        both = costs.F + costs.B
        for name in ("afab", "1f1b"):
            timeline = run(name, p, m, costs)
            assert timeline.bubble == pytest.approx((p - 1) * both)
            assert timeline.bubble_ratio == pytest.approx((p - 1) / m)
            assert (
                timeline.efficiency == pytest.approx(1 / (1 + timeline.bubble_ratio)) == pytest.approx(m / (m + p - 1))
            )
        assert run("naive", p, m, costs).bubble == pytest.approx((p - 1) * m * both)


def test_bubble_of_interleaved():
    """(p - 1)(F + B) / v of a rank's costs, that is (p - 1)(F + B) of a stage's."""
    draw = random.Random(0)
    for _ in range(40):
        p, v = draw.randint(1, 8), draw.randint(2, 4)
        m = p * draw.randint(1, 4)
        for name in ("interleaved", "llama3"):
            assert run(name, p, m, chunks=v).bubble == pytest.approx(3 * (p - 1))
        assert run("breadth-first", p, draw.randint(p, 3 * p), chunks=v).bubble == pytest.approx(3 * (p - 1))


def test_bubble_chart_of_the_playbook():
    """p = 8: r = (p - 1) / (v m), 7.00 to 0.03; but with fewer micro-batches than ranks, chunks do not help as much."""
    chart = {
        (m, v): run("llama3", 8, m, chunks=v).bubble_ratio if v > 1 else run("1f1b", 8, m).bubble_ratio
        for m in (1, 2, 4, 8, 16, 32)
        for v in (1, 2, 4, 8)
    }
    for (m, v), ratio in chart.items():
        if v == 1 or m >= 8:
            assert ratio == pytest.approx(7 / (v * m))
        else:
            assert ratio > 7 / (v * m) + 0.1
    shown = {case: f"{chart[case]:.2f}" for case in ((1, 1), (8, 1), (32, 1), (32, 2), (32, 8))}
    assert shown == {(1, 1): "7.00", (8, 1): "0.88", (32, 1): "0.22", (32, 2): "0.11", (32, 8): "0.03"}
    assert chart[1, 8] == 7  # one micro-batch passes through all stages one after the other, however many they are


def test_bubble_of_zero_bubble():
    """(p - 1)(F + B - 2W) for H1, within a rank (p - 1)(F + B - 3W) for H2, with costs near each other."""
    for p, m in ((2, 5), (4, 8), (8, 16), (8, 31)):
        for costs in (Costs(), Costs(F=1, I=1.1, W=0.9), Costs(F=1, I=1, W=0.8), Costs(F=1.05, I=1.1, W=1)):
            both = costs.F + costs.I + costs.W
            assert run("zb-h1", p, m, costs).bubble == pytest.approx((p - 1) * (both - 2 * costs.W))
            h2 = run("zb-h2", p, m, costs)
            assert h2.span - h2.ideal == pytest.approx((p - 1) * (both - 3 * costs.W))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 20), (8, 16), (8, 20), (6, 40)])
@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 1, 0.5), (1, 1.5, 0.5)])
def test_bubble_of_dualpipe(p, m, costs):
    """(PP/2 - 1)(F&B + B - 3W), in the middle of the pipeline; and less when F and B do not run as one."""
    f, i, w = costs
    backward = i + w
    for overlap in (1, 0.9):
        together = overlap * (f + backward)
        whole = run("dualpipe", p, m, Costs(f, i, w, FB=together))
        formula = (p // 2 - 1) * (together + backward - 3 * w)
        if overlap == 1 or f == i:
            assert longest_idle(whole) == pytest.approx(formula)
        cut = run("dualpipev", p // 2, m // 2, Costs(f, i, w, FB=together))  # of as many stages
        assert longest_idle(cut) == pytest.approx(longest_idle(whole))
    if f == i:
        assert run("dualpipe", p, m, Costs(f, i, w)).bubble == pytest.approx((p // 2 - 1) * (f + backward - 2 * w))


# ---- what costs mean -------------------------------------------------------------------------------------------------


def test_communication_delays_only_what_other_ranks_need():
    assert run("naive", 3, 2, Costs(communication=0.5)).makespan == 2 * (3 * 3 + 4 * 0.5)
    assert run("1f1b", 1, 4, Costs(communication=9)).bubble == 0
    v_shaped = run("zbv", 2, 1, Costs(communication=10)).spans  # the turn from stage 1 to stage 2 is on rank 1
    assert [(str(action), start) for action, start, _ in v_shaped[1][:2]] == [("F0", 11), ("F0.1", 12)]


def test_unequal_stages():
    timeline = run("1f1b", 2, 8, Costs(stages=(1, 1.5)))
    assert timeline.makespan == 1 + 8 * 4.5 + 2  # the slow rank works without a pause
    assert timeline.ideal == 8 * 3 * 1.25
    with pytest.raises(UsageError, match="costs of 2 stages, but schedule zbv has 4"):
        run("zbv", 2, 2, Costs(stages=(1, 1)))


def test_bad_costs():
    for wrong, message in (({"W": 0}, "cost W = 0 must be positive"), ({"communication": -1}, "must not be negative")):
        with pytest.raises(UsageError, match=message):
            Costs(**wrong)


@pytest.mark.parametrize("name", SCHEDULES)
def test_actions_take_their_time_in_order_and_after_what_they_need(name):
    schedule, costs = build_schedule(name, 4, 8), Costs(F=1, I=1.3, W=0.7, communication=0.2)
    spans = simulate(schedule, costs).spans
    ended = {
        schedule.output_of(rank, action): (end, rank)
        for rank, row in enumerate(spans)
        for action, _, end in row
        if action.kind != "W"
    }
    for rank, row in enumerate(spans):
        assert tuple(action for action, _, _ in row) == schedule.actions[rank]
        free = 0.0
        for action, start, end in row:
            assert end - start == pytest.approx(costs.of(action.kind))
            end_of_input, maker = ended.get(schedule.input_of(rank, action), (0.0, rank))
            assert start == max(free, end_of_input + (0.2 if maker != rank else 0))  # at once, but not earlier
            free = end


def test_a_measured_timeline():
    """Times from anywhere: zero is the first start."""
    f, b = Action("F", 0), Action("B", 0)
    timeline = Timeline((((f, 10.0, 11.0), (b, 14.0, 16.0)), ((f, 11.5, 12.5), (b, 12.5, 14.0))))
    assert (timeline.makespan, timeline.span, timeline.ideal) == (6, 6, 2.75)
    assert (timeline.bubble, timeline.in_flight) == (3.25, [1, 1])
