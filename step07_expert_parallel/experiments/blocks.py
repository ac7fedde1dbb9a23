"""Computation that takes as long as one says, and a picture of what travels meanwhile.

On two cores several ranks cannot compute side by side, so experiments on overlap let modules take a given time, as
`--layer-delay` does for layers, and messages that of `--link`. What is measured is who waits for what.
"""

import itertools
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

from common.drawing.figures import COLOURS, new_figure, save_figure
from common.tracing.chrome_trace import Trace
from common.tracing.tracer import Tracer
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Action

BACKWARD = 2.0  # times a forward: the gradient of the input, and that of the weights


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


def slow_down(module: nn.Module, name: str, seconds: float, tracer: Tracer) -> None:
    """Let a module's forward take at least this time, and its backward `BACKWARD` times that, as phases of the trace.

    A backward that defers the gradients of weights takes as long as the forward.
    """
    compute = module.forward

    def backward() -> None:
        deferred = any(hasattr(each, "postpone") for each in module.parameters())
        with tracer.phase("backward", block=name):
            time.sleep(seconds * (BACKWARD - 1 if deferred else BACKWARD))

    def forward(*args):
        start = time.perf_counter()
        with tracer.phase("forward", block=name):
            y = compute(*args)
            time.sleep(max(0.0, start + seconds - time.perf_counter()))
        return _Backward.apply(y, backward)

    module.forward = forward


def slow_weight_gradients(seconds: float):
    """Context manager: the deferred gradients of a stage's weights take at least this time."""
    compute = Pipeline._weight_gradients

    def slower(pipeline: Pipeline, action: Action) -> None:
        time.sleep(seconds)
        compute(pipeline, action)

    return mock.patch.object(Pipeline, "_weight_gradients", slower)


LEGEND = {"forward": "forward", "backward": "backward", "all_to_all": "all-to-all, written in the color of its phase"}

# ---- the picture -----------------------------------------------------------------------------------------------------


def draw_lanes(name: str, panels: list[tuple[str, list[dict], float, float]], unit: str, letters: bool = False) -> None:
    """Draw what a rank computes, and below what its link carries, as NAME.png. With `letters`, words are cut to one.

    Args:
        panels: (title, spans of a rank, start, end), the times in microseconds.
        unit: label of the axis of time.
    """
    from matplotlib.patches import Patch

    figure, _ = new_figure(len(panels), width=8.0, height=0.9 + 1.25 * len(panels), sharex=True)
    for axis, (title, spans, start, end) in zip(figure.axes, panels):
        names = ("dispatch", "combine")
        order = {"forward": itertools.cycle(names), "backward": itertools.cycle(names[::-1])}
        for span in sorted(spans, key=lambda span: span["ts"]):
            arguments, look = span["args"], None
            if "block" in arguments:
                look = 0, arguments["block"], COLOURS[span["name"]], "white"
            elif span["name"] == "all_to_all" and arguments["dtype"] != "int64":
                phase = arguments["phase"]
                look = 1, next(order[phase]), COLOURS["all_to_all"], COLOURS[phase]
            if look and start <= span["ts"] + 1000 and span["ts"] < end:
                row, word, *colours = look
                text = word[0].upper() if letters else word
                draw_box(axis, (span["ts"] - start) / 1e3, span["dur"] / 1e3, row, text, *colours)
        length = (end - start) / 1e3
        axis.broken_barh([(0, length)], (0.08, 0.84), facecolors=COLOURS["idle"], zorder=0)
        axis.axvline(length, color="black", linewidth=1)
        axis.set_yticks([0.5, 1.4], ["computes", "link"], fontsize=9)
        axis.set(ylim=(1.85, 0))
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False, axis="y")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set_title(title, loc="left", fontsize=10)
    figure.axes[-1].set(xlabel=unit, xlim=(0, 1.01 * max((end - start) / 1e3 for *_, start, end in panels)))
    handles = [Patch(facecolor=COLOURS[key], label=label) for key, label in LEGEND.items()]
    handles.append(Patch(facecolor=COLOURS["idle"], label="waits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    save_figure(figure, name)


def draw_box(axis, left: float, width: float, row: int, text: str, colour: str, ink: str) -> None:
    """A box in the row of the computation (0) or of the link (1, which is flatter), with a word in it."""
    bottom, height = (0.08, 0.84) if row == 0 else (1.12, 0.58)
    axis.broken_barh([(left, width)], (bottom, height), facecolors=colour, edgecolors="white", linewidth=0.6)
    look = {"ha": "center", "va": "center", "fontsize": 8.5, "color": ink, "fontweight": "bold", "clip_on": True}
    axis.text(left + width / 2, bottom + height / 2, text, **look)


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
