"""One step in five dimensions: who computes, what travels meanwhile, and what of it hides behind computing."""

import tempfile
from collections.abc import Callable
from typing import NamedTuple

from common import collectives
from common.drawing.figures import COLOURS, DIMENSION_OF, DIMENSIONS, new_figure, save_figure
from common.drawing.tables import print_table
from common.experiments.even_routing import choosing
from common.experiments.local_ranks import on_ranks
from common.experiments.traces import quietest
from common.link import Link
from common.process_groups import Mesh
from common.tracing.chrome_trace import Trace, read_trace, time_by_state
from common.tracing.tracer import Tracer
from step01_single_gpu.slow_device import SlowDevice
from step07_expert_parallel.router import Router
from step08_5d.experiments.tools import EXPERTS, FIVE_D, Run

FLAGS = EXPERTS | FIVE_D | {"layers": 4, "kv_heads": 4, "seq_len": 256, "global_batch": 4, "zero": 1, "bucket_mb": 0.1}
SPEED, LINK = 0.1e9, Link(0.0, 2.5e6)  # FLOP/s of a rank; each group has a link of its own, of so many bytes/s
RANKS, DRAWN = 8, (0, 4)  # the first stage, and the rank of the second one that it sends to
# What the forward of a layer does, in order: products and attention (a hop has one or two blocks), and messages
PRODUCTS = ("q", "k", "v", "o", "router", "experts, gate", "experts, up", "experts, down")
MESSAGES = {
    "tp": ("all-\ngather", "reduce-\nscatter", "next micro-batch"),
    "cp": ("K", "V"),
    "ep": ("counts", "dispatch", "combine"),
}
MESSAGES |= {"pp": ("output",), "dp": ()}


class Sent(NamedTuple):
    """Something on the link of a rank's group, in microseconds."""

    start: float
    end: float
    dimension: str
    span: dict


def timeline(quick: bool) -> None:
    """A step of pp 2, cp 2, tp 2, ep 4 with ZeRO 1, on slow devices and links: shares of the step, and timelines."""
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(RANKS, run_steps, 1 if quick else 3, folder, title="timeline")
        trace = read_trace(folder)
    step = quietest(trace).step
    print_shares(trace, step)
    draw(trace, step)


def run_steps(mesh: Mesh, done: Callable, steps: int, folder: str) -> None:
    """On a rank: traced steps, after one that is not."""
    run = Run(mesh, **FLAGS, link=f"{1e6 * LINK.alpha},{1e-9 * LINK.bandwidth}")
    tracer = Tracer((0, steps - 1), run.mesh, folder)
    with choosing(Router), SlowDevice(SPEED, tracer):
        for step in range(-1, steps):
            collectives.barrier(run.mesh.world)
            with tracer.step(step):
                run.accumulate(tracer)
                with tracer.phase("optimizer"):
                    run.update(run.finish())
    tracer.close()


# ---- what the trace says ---------------------------------------------------------------------------------------------


def spans_of(trace: Trace, rank: int, step: int) -> list[dict]:
    return [span for span in trace.spans[rank] if span["args"]["step"] == step]


def interval(span: dict) -> tuple[float, float]:
    return span["ts"], span["ts"] + span["dur"]


def on_links(trace: Trace, rank: int, step: int) -> list[Sent]:
    """What a rank sent. The messages of a batch, which complete together, follow each other on the simulated link."""
    result, free = [], {}
    for span in spans_of(trace, rank, step):
        arguments = span["args"]
        if span["cat"] != "communication" or arguments["op"] == "receive" or arguments["group"] == "world":
            continue
        start, end = interval(span)
        if "peer" in arguments:
            start = max(arguments["issue_us"], free.get(arguments["group"], 0.0))
            end = free[arguments["group"]] = start + 1e6 * arguments["bytes"] / LINK.bandwidth
        result.append(Sent(start, end, DIMENSION_OF[arguments["group"]], span))
    return result


def print_shares(trace: Trace, step: int) -> None:
    """Of a step, mean over ranks: what takes which share, and what of each dimension's messages computing covers."""
    times = {name: [0.0, 0.0, 0.0] for name in DIMENSIONS}  # waited for, on the link, covered
    whole = computing = meeting = 0.0
    for rank in trace.ranks:
        spans, (start, end) = spans_of(trace, rank, step), trace.window(rank, step)
        compute = [interval(span) for span in spans if "op" in span["args"] and span["cat"] == "phase"]
        whole += end - start
        computing += sum(end - start for start, end in compute)
        sent, blocked = on_links(trace, rank, step), [each for each in spans if each["cat"] in ("wait", "issue")]
        meeting += sum(each["dur"] for each in blocked if each["args"]["group"] == "world")
        for name in DIMENSIONS:
            states = time_by_state([(each.start, each.end) for each in sent if each.dimension == name], compute)
            times[name][0] += sum(each["dur"] for each in blocked if DIMENSION_OF.get(each["args"]["group"]) == name)
            times[name][1] += states.get((True, False), 0) + states.get((True, True), 0)
            times[name][2] += states.get((True, True), 0)
    scale, rows = (
        1e-3 / len(trace.ranks),
        [("computes", f"{1e-3 * computing / RANKS:,.0f}", f"{computing / whole:.1%}")],
    )
    rows[0] += ("", "", "")
    for name, (waited, flying, hidden) in times.items():
        label = f"waits for {name}" + (", in the bubble too" if name == "pp" else "")
        cells = f"{scale * waited:,.0f}", f"{waited / whole:.1%}", f"{scale * flying:,.0f}", f"{scale * hidden:,.0f}"
        rows.append((label, *cells, f"{hidden / flying:.0%}"))
    rows.append(("waits for the norm of the gradient", f"{scale * meeting:,.0f}", f"{meeting / whole:.1%}", "", "", ""))
    rest = whole - computing - meeting - sum(waited for waited, *_ in times.values())
    rows.append(("all else", f"{scale * rest:,.0f}", f"{rest / whole:.1%}", "", "", ""))
    header = ("", "ms", "share", "on its links, ms", "while computing, ms", "share")
    print_table(f"a step of {scale * whole:,.0f} ms, mean over {RANKS} ranks", header, rows)


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw(trace: Trace, step: int) -> None:
    """Above a whole step of two ranks, below the forward of one layer."""
    from matplotlib.patches import Patch

    figure, axes = new_figure(3, 1, width=11.0, height=8.0, height_ratios=(6, 6, 6))
    origin = min(trace.window(rank, step)[0] for rank in trace.ranks)
    end = max(trace.window(rank, step)[1] for rank in trace.ranks)
    for axis, rank in zip(axes, DRAWN):
        draw_rank(axis, trace, rank, step, origin, end, words=False)
        axis.set_title(f"rank {rank}: stage {DRAWN.index(rank)}", loc="left", fontsize=11, fontweight="bold")
    start, end = second_layer(trace, step)
    draw_rank(axes[-1], trace, DRAWN[0], step, start, end, words=True)
    title = f"rank {DRAWN[0]}: the forward of one layer ({(end - start) / 1e3:.0f} ms)"
    axes[-1].set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes[-1].set_xlabel("ms")
    handles = [Patch(facecolor=COLOURS[name], label=name) for name in ("forward", "backward", "optimizer")]
    handles.append(Patch(facecolor=COLOURS["idle"], label="waits, or Python"))
    handles += [Patch(facecolor=colour, label=f"sends for {name}") for name, colour in DIMENSIONS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    save_figure(figure, "step")


def second_layer(trace: Trace, step: int) -> tuple[float, float]:
    """From where the last layer of the first stage begins its first forward until the next stage has its output."""
    spans = spans_of(trace, DRAWN[0], step)
    first = next(span for span in spans if span["args"].get("action") == "F0")
    tp = [
        each for each in on_links(trace, DRAWN[0], step) if each.span["name"] == "all_gather" and each.dimension == "tp"
    ]
    start = [each.start for each in tp if interval(first)[0] <= each.start < interval(first)[1]][-1]
    output = next(each for each in on_links(trace, DRAWN[0], step) if each.dimension == "pp")
    return start - 1000, output.end


def draw_rank(axis, trace: Trace, rank: int, step: int, origin: float, end: float, words: bool) -> None:
    """A row for what a rank computes, and one for each dimension's link. In the boxes: what is computed and sent in a
    forward (`words`), or the actions of a step."""
    from matplotlib.patheffects import withStroke

    length, rows = (end - origin) / 1e3, ["computes", *DIMENSIONS]
    labels = {name: iter(each) for name, each in MESSAGES.items()} | {"product": iter(PRODUCTS)}
    boxes = [(origin, end, 0, COLOURS["idle"], "")]
    for span in spans_of(trace, rank, step):
        name, what = span["name"], span["args"].get("op")
        if span["cat"] == "phase" and (what or name == "optimizer"):
            boxes.append((*interval(span), 0, COLOURS[name], what))
        elif span["cat"] == "wait" and span["args"]["phase"] == "optimizer":
            boxes.append((*interval(span), 0, COLOURS["idle"], ""))
    for sent in on_links(trace, rank, step):
        name = sent.dimension
        boxes.append((sent.start, sent.end, rows.index(name), DIMENSIONS[name], name))
    for start, stop, row, colour, what in boxes:
        left, right = ((min(max(each, origin), end) - origin) / 1e3 for each in (start, stop))
        if right <= left:
            continue
        edge = "white" if words and right - left > 0.01 * length else colour
        axis.broken_barh([(left, right - left)], (row + 0.08, 0.84), facecolor=colour, edgecolor=edge, linewidth=0.5)
        text = next(labels.get(what, iter(["attn"])), "") if words and what else ""
        if words:
            inside = right - left > 0.005 * length * max(map(len, text.split("\n")))  # if not, it stands before the box
            ink = "white" if inside and (what == "pp" or row == 0) else "black"
            look = {"ha": "center" if inside else "right", "va": "center", "fontsize": 7.5, "color": ink}
            place = (left + right) / 2 if inside else left - 0.004 * length
            axis.text(place, row + 0.5, text, **look, linespacing=0.9)
    if not words:
        for span in spans_of(trace, rank, step):
            if action := span["args"].get("action"):
                centre = (sum(interval(span)) / 2 - origin) / 1e3
                look = {"ha": "center", "va": "center", "fontsize": 9, "fontweight": "bold", "color": "white"}
                axis.text(centre, 0.5, action, **look, path_effects=[withStroke(linewidth=2, foreground="#333333")])
    axis.set_yticks([row + 0.5 for row in range(len(rows))], rows, fontsize=9)
    axis.set(ylim=(len(rows), 0), xlim=(0, length))
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.spines[["top", "right", "left"]].set_visible(False)
