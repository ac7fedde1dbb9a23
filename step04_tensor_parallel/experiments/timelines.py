"""Timelines of a rank that name the layers, and have one lane for all messages."""

from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.lanes import WAITING
from common.experiments.traces import quietest
from common.tracing.chrome_trace import Trace
from common.tracing.timelines import ISSUE_SHARE

LAYERS = ("embed", "attention", "MLP", "head")
NAMES = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "send": "ring"}
TOP, COMPUTES, MESSAGES, BOTTOM = 0.0, (0.55, 0.9), (1.6, 0.5), 2.2  # of a panel; (upper edge, height) of a lane


def layers_of(spans: list[dict], sequence_parallel: bool) -> list[tuple[str, float, float]]:
    """(layer, start, end) of each layer's forward and backward in one step of a model of one block.

    A layer ends where its rank has waited for its last message: in the forward that of its `end_sublayer` (with
    sequence parallelism every second message, and none for the head), in the backward the sum of dx.
    """
    result = []
    for phase, layers in (("forward", LAYERS), ("backward", LAYERS[::-1])):
        phases = [bounds(span) for span in spans if span["cat"] == "phase" and span["name"] == phase]
        waits = sorted(
            (bounds(span)[1], span["name"])
            for span in spans
            if span["cat"] == "wait" and span["args"]["phase"] == phase
        )
        if phase == "forward":
            ends = [time for time, _ in waits][:: 2 if sequence_parallel else 1]
        else:
            ends = [time for time, name in waits if not name.endswith("all_gather")]
        edges = [phases[0][0], *ends[: len(layers) - 1], phases[-1][1]]
        result += zip(layers, edges, edges[1:])
    return result


def bounds(span: dict) -> tuple[float, float]:
    return span["ts"] / 1000, (span["ts"] + span["dur"]) / 1000  # ms


def draw_layers(panels: list[tuple[str, Trace, bool]], name: str) -> None:
    """Draw rank 0's quietest step of each (title, trace, with sequence parallelism), above each other on one axis."""
    from matplotlib.patches import Patch

    figure, axes = new_figure(len(panels), width=10, height=1.75 * len(panels) + 0.9, sharex=True)
    longest, drawn = 0.0, set()
    for axis, (title, trace, sequence_parallel) in zip(axes, panels, strict=True):
        row = quietest(trace)
        waits = row.exposed_s + row.waiting_s  # for messages, and for the other rank to send its own
        step, title = row.step, f"{title}: {1e3 * row.step_time_s:.0f} ms, of which it waits {1e3 * waits:.0f}"
        origin, end = trace.window(0, step)
        spans = [span | {"ts": span["ts"] - origin} for span in trace.spans[0] if span["args"]["step"] == step]
        longest = max(longest, (end - origin) / 1000)
        drawn |= _draw(axis, spans, ISSUE_SHARE * (end - origin) / 1000)
        _name_layers(axis, layers_of(spans, sequence_parallel))
        axis.set_title(title, loc="left", fontsize=13, fontweight="bold")
        axis.set(ylim=(BOTTOM, TOP))
        axis.set_yticks([top + height / 2 for top, height in (COMPUTES, MESSAGES)], ["rank 0", "messages"], fontsize=12)
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.grid(visible=False, axis="y")
    axes[-1].set(xlim=(0, longest))
    axes[-1].set_xlabel("ms since the start of the step", fontsize=12)
    axes[-1].tick_params(axis="x", labelsize=12)
    handles = [Patch(label=NAMES.get(each, each), color=colour) for each, colour in COLOURS.items() if each in drawn]
    handles.append(Patch(label="waits", **WAITING))
    look = {"handlelength": 1.2, "columnspacing": 1.0, "handletextpad": 0.4, "frameon": False, "fontsize": 11.5}
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), **look)
    save_figure(figure, name)


def _draw(axis, spans: list[dict], shortest: float) -> set[str]:
    """Draw one step: what the rank computes, the time that it waits, its messages. Returns what the colors mean.

    A launch of a collective may have to wait for a core. Those of less than `shortest` ms are left out.
    """
    drawn, blocked = set(), ("issue", "wait")
    for span in sorted(spans, key=lambda span: span["cat"] in blocked):  # what it waits for covers what it computes
        (start, end), kind = bounds(span), span["cat"]
        if kind == "wait" or (kind == "issue" and end - start >= shortest):
            axis.broken_barh([(start, end - start)], COMPUTES, **WAITING)
        elif kind == "phase" or (kind == "communication" and span["args"]["op"] != "receive"):  # it is in the send
            name, place = (span["name"], COMPUTES) if kind == "phase" else (span["args"]["op"], MESSAGES)
            look = {"facecolor": COLOURS[name], "edgecolor": "white", "linewidth": 0.6}
            axis.broken_barh([(start, end - start)], place, **look)
            drawn.add(name)
    return drawn


def _name_layers(axis, layers: list[tuple[str, float, float]]) -> None:
    """Write each layer's name above it, that of the head once, and a line where it ends."""
    last = len(layers) - 1
    for number, (layer, left, right) in enumerate(layers):
        axis.axvline(right, ymax=1 - COMPUTES[0] / BOTTOM, color="black", linewidth=0.9)
        place, align = (left + right) / 2, "center"
        if layer == "head":
            place = right  # between its forward and its backward
            if number > last / 2:
                continue
        elif number in (0, last):  # the embedding may be narrower than its name
            place, align = (right, "right") if number == 0 else (left, "left")
        axis.text(place, 0.3, layer, ha=align, va="center", fontsize=11.5)
