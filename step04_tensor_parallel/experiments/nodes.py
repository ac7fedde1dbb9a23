"""Why inside a node? Two ranks on one node, and on two that a slow cable joins; and what such a cable can hide.

The cable is real, a network that the kernel limits. The device is simulated: products take the time of their FLOPs.
"""

from collections.abc import Callable

import torch
from torch import nn

from common import collectives
from common.config import TrainConfig
from common.costs.vocabulary import sent
from common.counts import count_parameters
from common.drawing.charts import bars, lines
from common.drawing.figures import COLOURS, DIMENSIONS, SERIES, new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.errors import UsageError
from common.experiments.local_ranks import on_ranks
from common.experiments.on_nodes import HIDES, cable_link, crossing, on_nodes, timed
from common.experiments.tcp_bytes import PACKET
from common.process_groups import Mesh
from step01_single_gpu.running.slow_device import SlowDevice
from step04_tensor_parallel.experiments.overlap import play, product_shapes
from step04_tensor_parallel.experiments.tools import training
from step04_tensor_parallel.operators import Split
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear, apply_column_parallel

RANKS, CABLE, SPEED = 2, "50mbit", 2.5e9  # FLOP/s of a simulated device
LINK = cable_link(CABLE)
MODEL = {"layers": 4, "hidden": 128, "ffn": 384, "heads": 4, "kv_heads": 4, "data": "synthetic", "warmup": 1}
MODEL |= {"seq_len": 128, "micro_batch": 8, "global_batch": 16}
PREDICTED = "predicted, any number of tokens"
LAYOUTS = {"tp 2": {"tp": 2}, "dp 2": {"dp": 2}}
NAMES = {"tp 2": "tensor parallel", "dp 2": "data parallel"}
PLACES = {"one node": COLOURS["other"], "two nodes": DIMENSIONS["tp"]}
LINES = "black", SERIES[0], SERIES[3]  # predicted, and measured with each number of tokens
# A pair of column layers, like gate and up, that share a gather
HIDDEN, TOKENS, WIDTHS = 256, (512, 1024), (200, 400, 600, 800, 1000, 1200, 1600)


def nodes(quick: bool) -> None:
    """Two nodes and a slow cable: the step of tp 2 and of dp 2 inside a node and across; what hides, by width."""
    repeats, cases = 1 if quick else 3, [MODEL | flags for flags in LAYOUTS.values()]
    inside = on_ranks(RANKS, steps, cases, repeats, title="one node")[0]
    try:
        across, pairs = on_nodes(RANKS, 1, on_two_nodes, cases, repeats, bandwidth=CABLE)[0]
    except UsageError as error:
        print(f"  left out: {error}")
        return
    draw(compare_steps(inside, across), compare_widths(pairs))


def on_two_nodes(mesh: Mesh, cases: list[dict], repeats: int) -> tuple[list[dict], dict]:
    return steps(mesh, None, cases, repeats), column_layers(mesh, repeats)


# ---- a step ----------------------------------------------------------------------------------------------------------


def steps(mesh: Mesh, done: Callable | None, cases: list[dict], repeats: int) -> list[dict]:
    """On a rank, for each case: least time of a step's gradients, that of its FLOPs, bytes logged and on the cable."""
    found = []
    for flags in cases:
        run = training(mesh, flags)
        with collectives.record() as calls, SlowDevice(SPEED) as device:
            run.gradients()
        flops = device.flops
        with device:
            (result,) = timed(mesh, [run.gradients], repeats)
        found.append(result | {"logged": sum(call.bytes for call in calls), "computes": flops / SPEED})
    return found


def compare_steps(inside: list[dict], across: list[dict]) -> dict[str, list[tuple[float, float]]]:
    """Print both layouts inside and across. Returns their seconds, predicted and measured: inside, then across."""
    rows, result = [], {}
    for (name, flags), here, there in zip(LAYOUTS.items(), inside, across, strict=True):
        predicted = there["computes"] + exposed(flags)
        sent = compared(PACKET * there["logged"], there["sent"], ".1f", 1e6)
        one = compared(here["computes"], here["seconds"], ".2f")
        rows.append((name, *sent, *one, *compared(predicted, there["seconds"], ".2f")))
        result[name] = [(here["computes"], here["seconds"]), (predicted, there["seconds"])]
    header = ("", "MB on the cable: predicted", "measured", "ratio", "s, one node: predicted", "measured", "ratio")
    header += ("s, two nodes: predicted", "measured", "ratio")
    tokens = MODEL["global_batch"] * MODEL["seq_len"]
    print_table(f"a step of {tokens:,} tokens, two devices of {SPEED / 1e9:g} GFLOP/s, {CABLE}", header, rows)
    return result


def exposed(flags: dict) -> float:
    """Predicted seconds of a step that a rank waits for messages on the cable."""
    config = TrainConfig(**MODEL | flags)
    tokens = config.micro_batch * config.seq_len
    if "dp" in flags:  # one bucket, sent after the last backward
        return sent("all_reduce", 4 * count_parameters(config.model_config).total, RANKS) / LINK.bandwidth
    products = {
        name: (sum(2 * tokens * out * inside for out, inside in weights) / SPEED,) * 3
        for name, weights in product_shapes(MODEL).items()
    }
    player = play(MODEL | flags, LINK, products)
    return player.blocked * config.global_batch / config.micro_batch


# ---- one pair of column layers ---------------------------------------------------------------------------------------


def column_layers(mesh: Mesh, repeats: int) -> dict[tuple[int, int], float]:
    """On a rank: seconds of the backward of two column layers that share a gather, by (tokens, columns of both)."""
    split, found = Split(mesh.world, True, "overlap"), {}
    for tokens in TOKENS:
        x = torch.randn(1, tokens // RANKS, HIDDEN, requires_grad=True)
        for width in WIDTHS:
            out = width // 2 // RANKS
            layers = [ColumnParallelLinear(nn.Parameter(torch.randn(out, HIDDEN)), split) for _ in range(2)]
            gradients = [torch.randn(1, tokens, out) for _ in layers]

            def trial(layers=layers, gradients=gradients, x=x) -> float:
                outputs = apply_column_parallel(x, layers)
                with SlowDevice(SPEED):
                    (result,) = timed(mesh, [lambda: torch.autograd.backward(outputs, gradients)], 1)
                return result["seconds"]

            found[tokens, width] = min(trial() for _ in range(3 * repeats))  # other work can only add to it
    return found


def compare_widths(seconds: dict[tuple[int, int], float]) -> dict[int, list[tuple[int, float, float]]]:
    """Print what is exposed by width. Returns, by tokens, (width, predicted, measured share of the communication)."""
    result = {}
    for tokens in TOKENS:
        rows, result[tokens] = [], []
        message = 4 * tokens * HIDDEN / RANKS / LINK.bandwidth
        for width in WIDTHS:
            product = 2 * tokens * HIDDEN * width / RANKS / SPEED
            wait = 2 * max(0.0, message - product)  # the gather behind one product, the reduce-scatter behind the other
            shares = wait / (2 * message), (seconds[tokens, width] - 2 * product) / (2 * message)
            cells = compared(2 * product + wait, seconds[tokens, width], ".1f", 1e-3)
            rows.append((f"{width:,}", f"{2e3 * product:.1f}", *cells, *(f"{share:.0%}" for share in shares)))
            result[tokens].append((width, *shares))
        header = ("columns", "products", "backward: predicted", "measured", "ratio", "exposed: predicted", "measured")
        title = (
            f"{tokens:,} tokens: backward of two column layers, ms; each of its two messages takes {1e3 * message:.1f}"
        )
        print_table(title, header, rows)
        hidden = [{each[0]: 1 - each[1 + which] for each in result[tokens]} for which in (0, 1)]
        predicted, measured = map(crossing, hidden)
        print(f"  {HIDES:.0%} hide from {predicted:,.0f} columns on (predicted), {measured:,.0f} (measured)")
    return result


# ---- the figure ------------------------------------------------------------------------------------------------------


def draw(steps: dict[str, list[tuple[float, float]]], shares: dict[int, list[tuple[int, float, float]]]) -> None:
    """Left the exposed share over the width, right the steps as bars."""
    figure, (left, right) = new_figure(columns=2, width=9.6, height=4.3)
    formula = 4 * (RANKS - 1) * SPEED / (2 * LINK.bandwidth)
    left.axvspan(formula, 1.05 * WIDTHS[-1], color=COLOURS["idle"], zorder=0)
    left.text(1.02 * formula, 0.5, f"from {formula:,.0f} columns on,\nall should hide", fontsize=12)
    corners = WIDTHS[0], formula, WIDTHS[-1]
    series = {PREDICTED: {width: max(0.0, 1 - width / formula) for width in corners}}
    for tokens, points in shares.items():
        series[f"measured, {tokens:,} tokens"] = {width: measured for width, _, measured in points}
    lines(left, series, dots=tuple(series)[1:], colours=dict(zip(series, LINES)), ends=False)
    left.set(ylim=(-0.03, 1.12), xlabel="columns that share the gather")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    left.set_title("exposed part of a backward's two messages", loc="left", fontsize=12)
    left.legend(loc="upper right", frameon=False)
    places = "one node", "two nodes"
    names = {name: NAMES[name] for name in steps}
    groups = {names[name]: [{place: each[1]} for place, each in zip(places, both)] for name, both in steps.items()}
    marks = {names[name]: [predicted for predicted, _ in both] for name, both in steps.items()}
    bars(right, groups, marks, colours=PLACES, value="{:.1f} s")
    right.set(ylabel="seconds")
    right.set_title("a step, measured (black lines: predicted)", loc="left", fontsize=12)
    right.legend(loc="upper right", frameon=False)
    save_figure(figure, "nodes")
