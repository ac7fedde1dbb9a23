"""Timelines of one rank: of whole steps with the names of the layers, and of one MLP's backward, product by product."""

from common.drawing.figures import save_figure
from common.drawing.lanes import Lane, Span, panels_of_lanes
from common.experiments.traces import one_rank, quietest
from common.tracing.chrome_trace import Trace
from common.tracing.timelines import NAMES, lanes_of

LAYERS = ("embed", "attention", "MLP", "head")


def draw_layers(panels: list[tuple[str, Trace, bool]], name: str) -> None:
    """Draw rank 0's quietest step of each (title, trace, with sequence parallelism), above each other on one axis."""
    rows = []
    for title, trace, sequence_parallel in panels:
        row, alone = quietest(trace), one_rank(trace)
        waits = row.exposed_s + row.waiting_s  # for messages, and for the other rank to send its own
        origin, _ = alone.window(0, row.step)
        spans = [span for span in alone.spans[0] if span["args"]["step"] == row.step]
        layers = [
            Span(start - origin / 1000, end - start, "white", layer)
            for layer, start, end in layers_of(spans, sequence_parallel)
        ]
        title = f"{title}: {1e3 * row.step_time_s:.0f} ms, of which it waits {1e3 * waits:.0f}"
        rows.append((title, [Lane("layer", layers, 0.55), *lanes_of(alone, row.step)]))
    save_figure(panels_of_lanes(rows, "ms since the start of the step", NAMES), name)


MESSAGES = {"all_gather": "gather", "reduce_scatter": "sum"}
GRADIENTS = {"dx": "input's gradient", "dW": "weights' gradient"}
# The six products of an MLP's backward, in order, and its messages. (Autograd goes back through up first, then gate)
PLAIN = ("dx of down", "dW of down", "dx of up", "dW of up", "dx of gate", "dW of gate"), ("dy", "dx")
OVERLAP = ("dx of down", "dW of down", "dx of gate", "dx of up", "dW of gate", "dW of up"), ("dy", "x", "dx")


def draw_backwards(traces: dict[str, Trace], name: str) -> dict[str, tuple[float, float]]:
    """Draw an MLP's backward on rank 0 in `plain` and in `overlap`, traced with a simulated device (--compute).

    Returns, for each, the milliseconds that it takes, and those of them in which the rank waits.
    """
    rows, found = [], {}
    for (mode, trace), (products, messages) in zip(traces.items(), (PLAIN, OVERLAP), strict=True):
        row, alone = quietest(trace), one_rank(trace)
        spans = [span for span in alone.spans[0] if span["args"]["step"] == row.step]
        begin, end = [each[1:] for each in layers_of(spans, True) if each[0] == "MLP"][1]

        def within(category: str, spans=spans, begin=begin, end=end) -> list[Span]:
            """What rank 0 does between begin and end; of phases, those of the simulated device."""
            some = [span for span in spans if span["cat"] == category and (category != "phase" or "op" in span["args"])]
            timed = sorted((*bounds(span), span["name"]) for span in some)
            return [Span(a - begin, b - a, name) for a, b, name in timed if begin <= (a + b) / 2 <= end]

        computing = [
            each._replace(name=GRADIENTS[word[:2]], words=word)
            for each, word in zip(within("phase"), products, strict=True)
        ]
        sent = [
            each._replace(words=f"{MESSAGES[each.name]} {word}")
            for each, word in zip(within("communication"), messages, strict=True)
        ]
        waits = [each._replace(name="blocked") for each in within("wait")]
        found[mode] = end - begin, sum(each.width for each in waits)
        title = f"{mode}: {end - begin:.0f} ms, of which it waits {found[mode][1]:.0f}"
        rows.append((title, [Lane("rank 0", [*computing, *waits]), Lane("messages", sent, 0.7)]))
    names = {each: each for each in GRADIENTS.values()} | {"blocked": "waits"}
    figure = panels_of_lanes(rows, "ms since the backward of the MLP has begun", names, row=0.5)
    figure.axes[0].set_xlim(0, 1.01 * max(takes for takes, _ in found.values()))  # the last wait ends before the edge
    save_figure(figure, name)
    return found


def layers_of(spans: list[dict], sequence_parallel: bool) -> list[tuple[str, float, float]]:
    """(layer, start, end) in ms of each layer's forward and backward in one step of a model of one block.

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
