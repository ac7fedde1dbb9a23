"""What schedules cost, by simulation alone: time lines, bubbles, micro-batches in flight, against the formulas."""

from common.drawing.figures import SERIES, new_figure, save_figure
from common.drawing.tables import compared, print_table
from step05_pipeline.experiments import predictions
from step05_pipeline.experiments.tools import ORDER, draw_figure, pipeline_of
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.simulator import Costs, Timeline, simulate
from step05_pipeline.schedules.validator import check_schedule

UNIT = "time; 1 is the forward of a quarter of the model"
LLAMA3 = "llama3 with N = 8"
GALLERY = {"afab": "AFAB", "1f1b": "1F1B", "interleaved": "interleaved, two stages per rank", "zb-h1": "ZB-H1"}
OTHERS = ("breadth-first", LLAMA3, "zb-h2", "zbv")


def played(name: str, ranks: int = 4, micro_batches: int = 8, chunks: int | None = None) -> Timeline:
    """The checked schedule, in comparable units."""
    schedule, costs = pipeline_of(name, ranks, micro_batches, chunks)
    check_schedule(schedule)
    return simulate(schedule, costs)


def title_of(label: str, timeline: Timeline) -> str:
    """`zbv: 25.5 units, bubble 1.5; in flight 8/8/8/8 halves`. A label begins with the name of its schedule."""
    return f"{label}: {timeline.makespan:g} units, bubble {timeline.bubble:g}; in flight {in_flight(label, timeline)}"


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
    panels = {f"{label}: {lines[name].makespan:g} units": lines[name] for name, label in GALLERY.items()}
    draw_figure(panels, "gallery", UNIT)
    draw_figure({title_of(name, lines[name]): lines[name] for name in OTHERS}, "others", UNIT)
    draw_both_ends()


def draw_both_ends() -> None:
    """DualPipe as in DeepSeek-V3's figure 5, and its half."""
    whole, half = played("dualpipe", 8, 20), simulate(build_schedule("dualpipev", 4, 10), Costs())
    titles = (
        title_of("dualpipe, 8 ranks, 20 micro-batches", whole),
        title_of("dualpipev, 4 ranks, 10 micro-batches", half),
    )
    unit = "time; 1 is the forward of a stage, here an eighth of the model"
    draw_figure(dict(zip(titles, (whole, half))), "both_ends", unit)


def naive(quick: bool) -> None:
    """SIMULATED: one whole batch through 4 ranks: 12 units where 3 would do; and cut into micro-batches."""
    rows = []
    for name, micro_batches in (("naive", 1), ("afab", 4), ("afab", 8), ("afab", 32)):
        unit = 1 / micro_batches
        line = simulate(build_schedule(name, 4, micro_batches), Costs(F=unit, I=unit, W=unit))
        label = "one batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
        r = predictions.bubble_ratio(4, micro_batches)
        rows.append((label, f"{line.makespan:g}", f"{line.ideal:g}", f"{r:.4f}", f"{line.bubble_ratio:.4f}"))
    header = ("4 ranks", "makespan", "ideal", "(p - 1)/m", "simulated r")
    print_table("one batch; a rank's forward of it takes 1, its backward 2", header, rows)


# ---- interleaving ----------------------------------------------------------------------------------------------------

MICRO_BATCHES, CHUNKS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)


def bubbles(quick: bool) -> None:
    """SIMULATED: the bubble of 8 ranks over m and v, beside (p - 1)/(v m), which holds from m = p on."""
    ranks, rows, ratios = 8, [], {}
    for m in MICRO_BATCHES:
        cells = []
        for v in CHUNKS:
            line = played("llama3", ranks, m, v)  # interleaved, but for any number of micro-batches
            ratios[m, v] = predictions.bubble_ratio(ranks, m, v), line.bubble_ratio
            formula, simulated = ratios[m, v]
            cells.append(f"{formula:.2f}" + (f" -> {simulated:.2f}" if abs(simulated - formula) > 1e-9 else ""))
        rows.append((m, *cells, f"{predictions.smallest_ratio(ranks, m):.2f}"))
    header = ("m", *(f"v = {v}" for v in CHUNKS), "p/m - 1")
    print_table(
        "r of 8 ranks: (p - 1)/(v m), and what was simulated where that differs; no order of these gets below p/m - 1",
        header,
        rows,
    )

    figure, axis = new_figure(width=9.0, height=3.8)
    for number, (v, colour) in enumerate(zip(CHUNKS, SERIES)):
        places = [place + (number - 1.5) * 0.2 for place in range(len(MICRO_BATCHES))]
        formulas, simulated = zip(*(ratios[m, v] for m in MICRO_BATCHES))
        axis.plot(places, simulated, "o", color=colour, markersize=5, label=f"v = {v}")
        cut = [(place, each) for place, each, real in zip(places, formulas, simulated) if real > each + 1e-9]
        axis.plot(*zip(*cut), "_", color="black", markersize=11) if cut else None
    axis.plot([], [], "_", color="black", markersize=11, label="(pp - 1)/(v m), where it is less")
    axis.set(yscale="log", ylim=(0.02, 14), ylabel="r = bubble / ideal")
    axis.set_yticks([0.03, 0.1, 0.3, 1, 3, 10], [0.03, 0.1, 0.3, 1, 3, 10])
    axis.set_xticks(range(len(MICRO_BATCHES)), [f"m = {m}" for m in MICRO_BATCHES])
    axis.grid(visible=False, axis="x")
    axis.set_title("8 ranks, m micro-batches, v stages on each rank: simulated", fontsize=10, loc="left")
    axis.legend(frameon=False, fontsize=9)
    save_figure(figure, "bubbles")


def llama3(quick: bool) -> None:
    """SIMULATED: Llama 3's figure 6, 4 ranks with 2 stages each, 10 micro-batches, N of them in a row."""
    rows = []
    for n in (4, 5, 7, 10):
        schedule = build_schedule("llama3", 4, 10, 2, consecutive=n)
        check_schedule(schedule)
        line = simulate(schedule, Costs(F=0.5, I=0.5, W=0.5))
        kept = in_flight("llama3", line)
        rows.append((n, f"{line.makespan:g}", f"{line.bubble:g}", f"{line.bubble_ratio:.3f}", kept))
    print_table("p 4, v 2, M 10; half a unit is a stage's forward", ("N", "makespan", "bubble", "r", "in flight"), rows)


# ---- split backwards -------------------------------------------------------------------------------------------------


def split_backward(quick: bool) -> None:
    """SIMULATED: bubbles of zero-bubble schedules and of DualPipe against their formulas, for several F, I, W."""
    rows = []
    for p in (4, 8):
        for F, I, W in ((1, 1, 1), (10, 13, 8)):  # noqa: E741
            where = f"p {p}, F {F}, I {I}, W {W}"
            for name, formula in predictions.BUBBLES.items():
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
            predicted = predictions.dualpipe_bubble(p, both, I + W, W)
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
