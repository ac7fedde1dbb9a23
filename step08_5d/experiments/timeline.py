"""One step in five dimensions: who computes, what travels meanwhile, and what of it hides behind computing."""

from typing import NamedTuple

from common.drawing.figures import COLOURS, DIMENSIONS, new_figure, save_figure
from common.drawing.lanes import Lane, Span, lanes
from common.drawing.tables import print_table
from common.experiments.traces import TracedPart, quietest, run_parts
from common.process_groups import DIMENSION_OF, Mesh
from common.tracing.chrome_trace import Trace, time_by_state
from common.tracing.tracer import Tracer
from step01_single_gpu.running.slow_device import SlowDevice
from step08_5d.experiments.tools import EXPERTS, FIVE_D, Training, route_evenly

SPEED, BANDWIDTH = 0.1e9, 2.5e6  # FLOP/s of a rank, and bytes/s of the link that each of its groups has to itself
FLAGS = EXPERTS | FIVE_D | {"layers": 4, "kv_heads": 4, "seq_len": 256, "global_batch": 4, "zero": 1, "bucket_mb": 0.1}
FLAGS |= {"link": f"0,{1e-9 * BANDWIDTH}"}
RANKS, DRAWN = 8, (0, 4)  # the first stage, and the rank of the second one that it sends to
# What the forward of a layer does, in order: products and attention (a hop has one or two blocks), and messages, with
# the numbers of the items in the lesson's "One step, in order"
WORDS = {"product": ("q", "k", "v", "o", "router", "gate", "up", "down"), "attention": ("attn", "attn")}
WORDS |= {"tp": ("3: all-gather", "3: reduce-scatter", ""), "cp": ("3: K", "3: V"), "pp": ("5: output",)}
WORDS |= {"ep": ("4: counts", "4: dispatch", "4: combine"), "dp": ()}


class Sent(NamedTuple):
    """Something on the link of a rank's group, in microseconds."""

    start: float
    end: float
    dimension: str
    op: str


def timeline(quick: bool) -> None:
    """A step of pp 2, cp 2, tp 2, ep 4 with ZeRO 1, on slow devices and links: shares of the step, and timelines."""
    trace = run_parts(RANKS, slow_steps, {"5d": FLAGS}, 1 if quick else 3, title="timeline")["5d"]
    step = quietest(trace).step
    print_shares(trace, step)
    draw(trace, step)


def slow_steps(mesh: Mesh, flags: dict) -> TracedPart:
    """On a rank: training steps on a slow device, with experts that are chosen in turn."""
    training = Training(mesh, **flags)
    route_evenly(training.pipeline.stages)

    def take(tracer: Tracer) -> None:
        with SlowDevice(SPEED, tracer):
            training.take(tracer=tracer)

    return TracedPart(take, training.mesh)


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
            end = free[arguments["group"]] = start + 1e6 * arguments["bytes"] / BANDWIDTH
        result.append(Sent(start, end, DIMENSION_OF[arguments["group"]], arguments["op"]))
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
    rest = whole - computing - meeting - sum(waited for waited, *_ in times.values())
    rows = [("computes", computing, None, None)]
    rows += [(f"waits for {name}" + ", in the bubble too" * (name == "pp"), *each) for name, each in times.items()]
    rows += [("waits for the norm of the gradient", meeting, None, None), ("all else", rest, None, None)]
    cells = []
    for name, time, flying, hidden in rows:
        links = (f"{1e-3 * flying / RANKS:,.0f}", f"{hidden / flying:.0%}") if flying else ("", "")
        cells.append((name, f"{1e-3 * time / RANKS:,.0f}", f"{time / whole:.1%}", *links))
    header = ("", "ms", "share", "on its links, ms", "of that while this rank computes")
    print_table(f"a step of {1e-3 * whole / RANKS:,.0f} ms, mean over {RANKS} ranks", header, cells)


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw(trace: Trace, step: int) -> None:
    """Above a whole step of two ranks, below the forward of one layer."""
    from matplotlib.patches import Patch

    figure, axes = new_figure(3, 1, width=11.0, height=8.0)
    windows = [trace.window(rank, step) for rank in trace.ranks]
    panels = [(rank, min(start for start, _ in windows), max(end for _, end in windows), False) for rank in DRAWN]
    panels.append((DRAWN[0], *second_layer(trace, step), True))
    for axis, (rank, start, end, words) in zip(axes, panels):
        lanes(axis, lanes_of(trace, rank, step, start, end, words), 1e-3 * (end - start))
        what = f"the forward of one layer ({1e-3 * (end - start):.0f} ms)" if words else f"stage {DRAWN.index(rank)}"
        axis.set_title(f"rank {rank}: {what}", loc="left", fontsize=11, fontweight="bold")
    axes[-1].set_xlabel("ms")
    for axis in axes[:-1]:  # each has its unit, as slides show them without the last
        axis.annotate("ms", (1, 0), (0, -7.5), "axes fraction", "offset points", ha="right", va="top")
    names = {name: name for name in ("forward", "backward", "optimizer")} | {"idle": "waits, or Python"}
    handles = [Patch(facecolor=COLOURS[name], label=label) for name, label in names.items()]
    handles += [Patch(facecolor=colour, label=f"sends for {name}") for name, colour in DIMENSIONS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    save_figure(figure, "step")


def second_layer(trace: Trace, step: int) -> tuple[float, float]:
    """From where the last layer of the first stage begins its first forward until the next stage has its output."""
    first = next(span for span in spans_of(trace, DRAWN[0], step) if span["args"].get("action") == "F0")
    sent, (begin, end) = on_links(trace, DRAWN[0], step), interval(first)
    gathers = [each.start for each in sent if (each.dimension, each.op) == ("tp", "all_gather")]
    output = next(each for each in sent if each.dimension == "pp")
    return [start for start in gathers if begin <= start < end][-1] - 1000, output.end


def lanes_of(trace: Trace, rank: int, step: int, origin: float, end: float, words: bool) -> list[Lane]:
    """What a rank computes, and its links: in the boxes what a forward computes and sends, or the actions of a step."""
    labels = {name: iter(each) for name, each in WORDS.items()}
    boxes = {name: [] for name in ("computes", *DIMENSIONS)}

    def add(row: str, start: float, stop: float, colour: str, kind: str = "", text: str = "") -> None:
        left, right = (1e-3 * (min(max(each, origin), end) - origin) for each in (start, stop))
        if right > left:
            text = next(labels[kind], "") if words and kind else text
            boxes[row].append(Span(left, right - left, colour, text))

    add("computes", origin, end, "idle")
    spans = spans_of(trace, rank, step)
    for span in spans:
        name, what = span["name"], span["args"].get("op")
        if span["cat"] == "phase" and (what or name == "optimizer"):
            add("computes", *interval(span), name, what or "")
        elif span["cat"] == "wait" and span["args"]["phase"] == "optimizer":
            add("computes", *interval(span), "idle")
    for sent in on_links(trace, rank, step):
        add(sent.dimension, sent.start, sent.end, sent.dimension, sent.dimension)
    if not words:  # the name of an action, without a box of its own
        for span in spans:
            if action := span["args"].get("action"):
                add("computes", *interval(span), "none", text=action)
    return [Lane(name, each) for name, each in boxes.items()]
