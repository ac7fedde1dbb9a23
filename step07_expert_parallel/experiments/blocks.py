"""Modules that take as long as one says, and a picture of what a rank computes and what travels meanwhile.

On two cores several ranks cannot compute side by side, so experiments on overlap let modules take a given time, and
messages that of `--link`. What is measured is who waits for what.
"""

import itertools
import time
from collections.abc import Callable

import torch
from torch import nn

from common.drawing.figures import save_figure
from common.drawing.lanes import Lane, Span, panels_of_lanes
from common.tracing.chrome_trace import Trace

BACKWARD = 2.0  # times a forward: the gradient of the input, and that of the weights
LEGEND = {"forward": "of a forward", "backward": "of a backward", "idle": "waits"}


class _Backward(torch.autograd.Function):
    """Passes x on. Its backward begins with `act`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, act: Callable[[], None]):
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.act()
        return gradient, None


def slow_down(module: nn.Module, name: str, seconds: float, owner) -> None:
    """Let a module's forward take at least this time, and its backward `BACKWARD` times that, as phases of the trace.

    A backward that postpones the gradients of weights takes as long as the forward.

    Args:
        owner: its `tracer` is the current one.
    """
    compute = module.forward

    def backward() -> None:
        postponed = any(hasattr(each, "gradient_sink") for each in module.parameters())
        with owner.tracer.phase("backward", block=name):
            time.sleep(seconds * (BACKWARD - 1 if postponed else BACKWARD))

    def forward(*args):
        start = time.perf_counter()
        with owner.tracer.phase("forward", block=name):
            y = compute(*args)
            time.sleep(max(0.0, start + seconds - time.perf_counter()))
        return _Backward.apply(y, backward)

    module.forward = forward


def draw_blocks(name: str, panels: list[tuple[str, list[dict], float, float]], unit: str) -> None:
    """Draw what a rank computes and, below, what its link carries, as NAME.png: each with the first letter of its word.

    Args:
        panels: (title, spans of a rank, start, end), the times in microseconds.
        unit: label of the axis of time.
    """
    drawn = []
    for title, spans, start, end in panels:
        ways = {"forward": itertools.cycle("DC"), "backward": itertools.cycle("CD")}  # dispatch, combine
        rows = [[Span(0, (end - start) / 1e3, "idle")], []]
        for span in sorted(spans, key=lambda span: span["ts"]):
            arguments, times = span["args"], ((span["ts"] - start) / 1e3, span["dur"] / 1e3)
            if "block" in arguments:
                row, look = 0, (span["name"], arguments["block"][0].upper())
            elif span["name"] == "all_to_all" and arguments["dtype"] != "int64":
                row, look = 1, (arguments["phase"], next(ways[arguments["phase"]]))
            else:
                continue
            if start <= span["ts"] + 1000 and span["ts"] < end:
                rows[row].append(Span(*times, *look))
        drawn.append((title, [Lane("computes", rows[0]), Lane("link", rows[1], 0.7)]))
    save_figure(panels_of_lanes(drawn, unit, LEGEND, row=0.5), name)


def phases(trace: Trace, rank: int, step: int) -> dict[str, tuple[float, float]]:
    """Start and end of what a rank did in a step, by action or, where there are none, by phase: in microseconds."""
    result = {}
    for span in trace.spans[rank]:
        arguments = span["args"]
        if span["cat"] == "phase" and arguments["step"] == step and "block" not in arguments:
            name = arguments.get("action", span["name"])  # which has several spans if it took turns
            start, _ = result.get(name, (span["ts"], None))
            result[name] = start, span["ts"] + span["dur"]
    return result
