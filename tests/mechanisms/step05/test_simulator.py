"""The simulator against the numbers and formulas of the playbook and of the schedules' papers."""

import itertools
import random

import pytest

from common.errors import UsageError
from common.presets import PRESETS
from step05_pipeline.cost import (
    BUBBLES,
    bubble_ratio,
    dualpipe_bubble,
    efficiency,
    hide_ratio,
    hide_ratio_of,
)
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
    assert run("breadth-first", 4, 8, HALF, chunks=2).makespan == 28.5
    figure_6 = run("llama3", 4, 10, HALF, chunks=2, consecutive=5)  # 8 stages
    assert (figure_6.makespan, figure_6.bubble) == (34.5, 4.5)


def test_zero_bubble():
    """What is in flight or waits for W; and no bubble within each rank. The last rank can start at p - 1 only, so with
    a common end a bubble stays.
    """
    h1, h2, v = run("zb-h1", 4, 8), run("zb-h2", 4, 8), run("zbv", 4, 8)
    assert (h1.in_flight, h1.stores, h1.unfinished) == ([4, 3, 2, 1], [1, 2, 3, 4], [4] * 4)
    assert (h2.in_flight, h2.stores, h2.unfinished) == ([7, 5, 3, 1], [1, 3, 5, 7], [7] * 4)
    assert (v.in_flight, v.stores, v.unfinished) == ([8] * 4, [1, 3, 5, 7], [8] * 4)  # halves of a rank's layers
    for name, (p, m) in itertools.product(("zb-h2", "zbv"), ((2, 4), (4, 8), (5, 9), (8, 16), (8, 40))):
        timeline = run(name, p, m)
        assert (timeline.span, timeline.makespan) == (timeline.ideal, timeline.ideal + p - 1)


@pytest.mark.parametrize("name", BUBBLES)
def test_bubbles_are_those_of_the_formulas(name):
    """Whole backwards: with any costs, for any number of micro-batches. Zero Bubble: with little less W than F and I.

    For zb-h2 the bubble is that within a rank.
    """
    draw, share = random.Random(name), 0.5 if name in ("interleaved", "dualpipev") else 1  # of a rank's layers
    for _ in range(40):
        p = 2 * draw.randint(1, 4) if name == "dualpipe" else draw.randint(1, 8)
        m, costs = draw.randint(1, 20), [draw.uniform(0.3, 2) for _ in range(3)]
        if name == "interleaved":
            m *= p
        elif "dualpipe" in name:
            m, costs = 2 * draw.randint(p, 2 * p), [costs[0], costs[0], costs[0] * draw.uniform(0.3, 1)]
        elif "zb" in name:
            m = draw.randint(2 * p, 4 * p)
            costs = [draw.uniform(1, 1.02), draw.uniform(1, 1.02), draw.uniform(0.94, 0.97)]
        timeline, (f, i, w) = run(name, p, m, Costs(*(share * each for each in costs))), costs
        bubble = (timeline.span if name == "zb-h2" else timeline.makespan) - timeline.ideal
        assert bubble == pytest.approx(BUBBLES[name](p, f, i + w, w), abs=1e-9), (p, m, costs)


def test_bubble_chart_of_the_playbook():
    """p = 8: r = (p - 1) / (v m), 7.00 to 0.03; but with fewer micro-batches than ranks, chunks do not help as much."""
    ratios = {}
    for m, v in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8)):
        timeline = run("llama3", 8, m, chunks=v)
        ratios[m, v] = round(timeline.bubble_ratio, 2)
        assert timeline.efficiency == pytest.approx(efficiency(timeline.bubble_ratio))
        if v == 1 or m >= 8:
            assert timeline.bubble_ratio == pytest.approx(bubble_ratio(8, m, v))
        else:
            assert timeline.bubble_ratio > bubble_ratio(8, m, v) + 0.1
    chart = {(1, 1): 7.00, (8, 1): 0.88, (32, 1): 0.22, (32, 2): 0.11, (32, 8): 0.03}
    assert (chart | {(1, 8): 7.00}).items() <= ratios.items()  # one micro-batch passes through all stages in turn


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 20), (6, 40)])
@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 1, 0.5), (1, 1.5, 0.5)])
def test_bubble_of_dualpipe_whose_f_and_b_run_as_one(p, m, costs):
    """(PP/2 - 1)(F&B + B - 3W), in the middle of the pipeline."""

    def longest_idle(timeline: Timeline) -> float:
        return timeline.makespan - min(sum(end - start for _, start, end in row) for row in timeline.spans)

    f, i, w = costs
    for overlap in (1, 0.9):
        together = overlap * (f + i + w)
        whole = longest_idle(run("dualpipe", p, m, Costs(f, i, w, FB=together)))
        if overlap == 1 or f == i:
            assert whole == pytest.approx(dualpipe_bubble(p, together, i + w, w))
        cut = run("dualpipev", p // 2, m // 2, Costs(f, i, w, FB=together))  # of as many stages
        assert longest_idle(cut) == pytest.approx(whole)


def test_when_a_message_could_hide():
    """Appendix A3's ratio for Llama 3 70B in 8 stages: in elements as printed, in bytes, with the model's own FLOPs."""
    model, peak, bandwidth = PRESETS["llama3-70b"], 989e12, 50e9
    printed = hide_ratio(model.hidden, 10, peak, bandwidth, beta=1)
    assert printed == pytest.approx(8 * peak / (32 * model.hidden * model.layers * bandwidth))  # the cheatsheet's row
    assert printed == pytest.approx(0.00755, rel=1e-3)
    assert hide_ratio(model.hidden, 10, peak, bandwidth) == pytest.approx(0.0151, rel=1e-3)
    assert hide_ratio_of(model, 8192, 10, peak, bandwidth) == pytest.approx(0.0164, rel=1e-2)


def test_unequal_stages():
    timeline = run("1f1b", 2, 8, Costs(stages=(1, 1.5)))
    assert timeline.makespan == 1 + 8 * 4.5 + 2  # the slow rank works without a pause
    assert timeline.ideal == 8 * 3 * 1.25
    with pytest.raises(UsageError, match="costs of 2 stages, but schedule zbv has 4"):
        run("zbv", 2, 2, Costs(stages=(1, 1)))
    for wrong, message in (({"W": 0}, "cost W = 0 must be positive"), ({"communication": -1}, "must not be negative")):
        with pytest.raises(UsageError, match=message):
            Costs(**wrong)


@pytest.mark.parametrize("name", SCHEDULES)
def test_actions_take_their_time_in_order_and_after_what_they_need(name):
    schedule, costs = build_schedule(name, 4, 8), Costs(F=1, I=1.3, W=0.7, communication=0.2)
    spans = simulate(schedule, costs).spans
    ended = {schedule.output_of(rank, each): (end, rank) for rank, row in enumerate(spans) for each, _, end in row}
    for rank, row in enumerate(spans):
        assert tuple(action for action, _, _ in row) == schedule.actions[rank]
        free = 0.0
        for action, start, end in row:
            assert end - start == pytest.approx(costs.of(action.kind))
            needed = schedule.input_of(rank, action)
            end_of_input, sender = ended[needed] if needed else (0.0, rank)
            assert start == max(free, end_of_input + (0.2 if sender != rank else 0))  # at once, but not earlier
            free = end


def test_a_measured_timeline():
    """Times from anywhere: zero is the first start."""
    f, b = Action("F", 0), Action("B", 0)
    timeline = Timeline((((f, 10.0, 11.0), (b, 14.0, 16.0)), ((f, 11.5, 12.5), (b, 12.5, 14.0))))
    assert (timeline.makespan, timeline.span, timeline.ideal) == (6, 6, 2.75)
    assert (timeline.bubble, timeline.in_flight) == (3.25, [1, 1])
