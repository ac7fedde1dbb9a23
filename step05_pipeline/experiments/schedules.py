"""What schedules cost, by simulation alone: time lines, bubbles, micro-batches in flight, against the formulas."""

from common.drawing.tables import compared, print_table
from step05_pipeline import cost
from step05_pipeline.experiments.tools import ORDER, draw_figure, pipeline_of
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.simulator import Costs, Timeline, simulate
from step05_pipeline.schedules.validator import check_schedule

UNIT = "time; 1 is the forward of a quarter of the model"
LLAMA3 = "llama3 with N = 8"
DRAWN = {"afab": "AFAB", "1f1b": "1F1B", "interleaved": "interleaved, two stages per rank", "zb-h1": "ZB-H1"}
DRAWN |= {"zbv": "ZBV, two stages per rank, in a V"}


def played(name: str, ranks: int = 4, micro_batches: int = 8, chunks: int | None = None) -> Timeline:
    """The checked schedule, in comparable units."""
    schedule, costs = pipeline_of(name, ranks, micro_batches, chunks)
    check_schedule(schedule)
    return simulate(schedule, costs)


def in_flight(label: str, timeline: Timeline) -> str:
    """`11/9/7/5 halves`, of what a rank holds (of one copy of the model), where that is two stages."""
    halves = SCHEDULES[label.replace(",", " ").split()[0]].chunks != 1
    return "/".join(map(str, timeline.in_flight)) + (" halves" if halves else "")


def beside(title: str, rows: list[tuple[str, float, float]]) -> None:
    """Print what a formula says and what was simulated."""
    cells = [(name, *compared(formula, simulated, "g")) for name, formula, simulated in rows]
    print_table(title, ("", "formula", "simulated", "ratio"), cells)


def schedules(quick: bool) -> None:
    """SIMULATED: every schedule on 4 ranks with 8 micro-batches: makespan, bubble, what is kept; drawn."""
    lines = {name: played(name) for name in ORDER}
    lines[LLAMA3] = simulate(build_schedule("llama3", 4, 8, 2, consecutive=8), Costs(F=0.5, I=0.5, W=0.5))
    rows = []
    for name, line in lines.items():
        lost = f"{line.makespan:g}", f"{line.bubble:g}", f"{line.bubble_ratio:.1%}", f"{line.efficiency:.1%}"
        numbers = ["/".join(map(str, each)) for each in (line.stores, line.unfinished)]
        rows.append((name, *lost, f"{line.span:g}", in_flight(name, line), *numbers))
    header = ("schedule", "makespan", "bubble", "r", "efficiency", "within a rank", "in flight", "I to W", "unfinished")
    print_table(
        "p 4, m 8, F = I = W = 1 (of a quarter of the model), B = 2; 24 units of work on each rank", header, rows
    )
    end = max(lines[name].makespan for name in DRAWN)  # one scale, to compare pictures
    for name, label in DRAWN.items():
        draw_figure({f"{label}: {lines[name].makespan:g} units": lines[name]}, name, UNIT, end)


# ---- interleaving ----------------------------------------------------------------------------------------------------

MICRO_BATCHES, CHUNKS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)


def bubbles(quick: bool) -> None:
    """SIMULATED: the bubble of 8 ranks over m and v, beside (p - 1)/(v m), which holds from m = p on."""
    ranks, rows = 8, []
    for m in MICRO_BATCHES:
        cells = []
        for v in CHUNKS:
            simulated = played("llama3", ranks, m, v).bubble_ratio  # interleaved, but for any number of micro-batches
            formula = cost.bubble_ratio(ranks, m, v)
            cells.append(f"{formula:.2f}" + (f" -> {simulated:.2f}" if abs(simulated - formula) > 1e-9 else ""))
        rows.append((m, *cells, f"{cost.smallest_ratio(ranks, m):.2f}"))
    header = ("m", *(f"v = {v}" for v in CHUNKS), "p/m - 1")
    print_table(
        "r of 8 ranks: (p - 1)/(v m), and what was simulated where that differs; no order of these gets below p/m - 1",
        header,
        rows,
    )


# ---- split backwards -------------------------------------------------------------------------------------------------


def split_backward(quick: bool) -> None:
    """SIMULATED: bubbles of zero-bubble schedules and of DualPipe against their formulas, for several F, I, W."""
    rows = []
    for p in (4, 8):
        for F, I, W in ((1, 1, 1), (10, 13, 8)):  # noqa: E741
            where = f"p {p}, F {F}, I {I}, W {W}"
            for name, formula in cost.BUBBLES.items():
                if name == "dualpipev" and F != I:
                    continue  # its formula, as DualPipe's without F&B, is for F = I
                line = _with_times(name, p, F, I, W)
                staggered = name in ("zb-h2", "zbv")
                bubble = (line.span if staggered else line.makespan) - line.ideal
                rows.append(
                    (f"{name}{', within a rank' if staggered else ''}: {where}", formula(p, F, I + W, W), bubble)
                )
            both = F + I + W
            line = _with_times("dualpipe", p, F, I, W, FB=both)
            predicted = cost.dualpipe_bubble(p, both, I + W, W)
            rows.append((f"dualpipe, F&B as one of {both}: {where}", predicted, line.bubble))
    beside("bubble, 4p micro-batches", rows)
    rows = []
    for name in ("1f1b", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"):
        cells = []
        for F, I, W in ((1, 1, 1), (10, 13, 8), (10, 14, 6)):  # noqa: E741
            line = _with_times(name, 8, F, I, W)
            within = (line.span - line.ideal) / line.ideal
            cells.append(f"{line.bubble_ratio:.1%}" + (f" ({within:.1%})" if line.makespan - line.span > 1e-9 else ""))
        rows.append((name, *cells))
    header = ("r (within a rank)", "F = I = W", "F 10, I 13, W 8", "F 10, I 14, W 6")
    print_table("8 ranks, 32 micro-batches: the less W there is, the less can be filled", header, rows)


def _with_times(name: str, p: int, F: float, I: float, W: float, **more) -> Timeline:  # noqa: E741
    schedule, costs = pipeline_of(name, p, 4 * p)
    return simulate(schedule, Costs(F=F * costs.F, I=I * costs.I, W=W * costs.W, **more))
