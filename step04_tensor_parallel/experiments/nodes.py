"""Why inside a node? Two ranks on one node, and on two that a real cable joins; and what such a cable can hide."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from common import collectives
from common.config import TrainConfig
from common.counts import count_parameters
from common.errors import UsageError
from common.experiments import tcp_bytes
from common.experiments.cost_model import Player, all_reduce_bytes
from common.experiments.figures import COLOURS, SERIES, new_figure, save_figure
from common.experiments.local_ranks import on_ranks
from common.experiments.nodes import value_of
from common.experiments.on_nodes import on_nodes
from common.experiments.tables import compared, print_table
from common.link import Link
from common.process_groups import Mesh
from step04_tensor_parallel.experiments import predictions
from step04_tensor_parallel.experiments.overlap import product_times
from step04_tensor_parallel.experiments.predictions import Way
from step04_tensor_parallel.experiments.tools import Run
from step04_tensor_parallel.operators import Split, start_all_gather
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear, apply_column_parallel

RANKS, CABLE = 2, "500mbit"
PACKET = (1514 + 66 / 2) / 1448  # bytes on the cable for each of TCP's: headers, acknowledgements (see step 5's)
LINK = Link(1e-4, value_of(CABLE) / 8 / PACKET)
MODEL = {"layers": 4, "hidden": 256, "ffn": 768, "heads": 4, "kv_heads": 4, "data": "synthetic", "warmup": 1}
MODEL |= {"seq_len": 256, "micro_batch": 4, "global_batch": 16}
LAYOUTS = {"tp 2": {"tp": 2}, "dp 2": {"dp": 2}}
# A pair of column layers, like gate and up, that share a gather
HIDDEN, TOKENS, WIDTHS = 512, (512, 1024), (256, 512, 1024, 2048, 4096, 8192)
HIDES = 0.1  # communication counts as hidden from here on: the part of it that is exposed


def nodes(quick: bool) -> None:
    """Two nodes and a slow cable: the step of tp 2 and of dp 2 inside a node and across; what hides, by width."""
    repeats = 2 if quick else 5
    cases = [MODEL | flags for flags in LAYOUTS.values()]
    inside = on_ranks(RANKS, steps_inside, cases, repeats, title="one node")[0]
    try:
        (across, pairs), _ = on_nodes(RANKS, 1, on_two_nodes, cases, repeats, bandwidth=CABLE)
    except UsageError as error:
        print(f"  left out: {error}")
        return
    bars = compare_steps(inside, across)
    draw(bars, compare_widths(pairs))


def steps_inside(mesh: Mesh, done: Callable, cases: list[dict], repeats: int) -> list[dict]:
    return steps(mesh, cases, repeats)


def on_two_nodes(mesh: Mesh, cases: list[dict], repeats: int) -> tuple[list[dict], dict]:
    return steps(mesh, cases, repeats), column_layers(mesh, repeats)


# ---- a step ----------------------------------------------------------------------------------------------------------


def steps(mesh: Mesh, cases: list[dict], repeats: int) -> list[dict]:
    """On a rank: for each case the median time of a step's gradients, the bytes that it logs and its node sends."""
    found = []
    for flags in cases:
        run, times = Run(mesh, **flags), []
        with collectives.record() as calls:
            run.gradients()
        collectives.barrier(mesh.world)
        before = tcp_bytes.sent_through("cable") or 0
        for _ in range(repeats):
            times.append(timed(run.gradients, mesh))
        sent = ((tcp_bytes.sent_through("cable") or 0) - before) / repeats
        collectives.barrier(mesh.world)  # all have read their counters
        found.append({"seconds": statistics.median(times), "sent": sent, "logged": sum(call.bytes for call in calls)})
        found[-1]["products"] = product_times(mesh, lambda: None, flags)
    return found


def timed(function: Callable, mesh: Mesh) -> float:
    """Seconds until all ranks have done it."""
    collectives.barrier(mesh.world)
    start = time.perf_counter()
    function()
    collectives.barrier(mesh.world)
    return time.perf_counter() - start


def compare_steps(inside: list[dict], across: list[dict]) -> dict[str, tuple[float, float, float]]:
    """Print both layouts inside and across. Returns seconds by layout: inside, across predicted and measured."""
    rows, result = [], {}
    for (name, flags), here, there in zip(LAYOUTS.items(), inside, across, strict=True):
        predicted = here["seconds"] + exposed(flags, here["products"])
        sent = compared(PACKET * there["logged"], there["sent"], ".1f", 1e6)
        seconds = compared(predicted, there["seconds"], ".2f")
        slower = f"{there['seconds'] / here['seconds']:.2f}"
        rows.append((name, *sent, f"{here['seconds']:.2f}", *seconds, slower))
        result[name] = here["seconds"], predicted, there["seconds"]
    header = ("", "MB over the cable, predicted", "measured", "ratio", "s, one node", "s across: predicted", "measured")
    title = f"two ranks on one node and on two, a cable of {CABLE}: a step of 4,096 tokens"
    print_table(title, (*header, "ratio", "times slower"), rows)
    return result


def exposed(flags: dict, products: dict) -> float:
    """Predicted seconds of a step that a rank waits for its messages on the cable."""
    config = TrainConfig(**MODEL | flags)
    model, tokens = config.model_config, config.micro_batch * config.seq_len
    if "dp" in flags:  # one bucket, sent after the last backward
        return all_reduce_bytes(4 * count_parameters(model).total, RANKS) / LINK.bandwidth
    player, norms = Player(RANKS, LINK), 4 * (2 * model.layers + 1) * model.hidden
    predictions.play_step(Way(), player, model.layers, 4 * tokens * model.hidden, tokens, norms, products)
    return player.blocked * config.global_batch / config.micro_batch


# ---- one pair of column layers ---------------------------------------------------------------------------------------


def column_layers(mesh: Mesh, repeats: int) -> dict[tuple[int, int], dict[str, float]]:
    """On a rank: `column_pair` for all numbers of tokens and columns."""
    return {(tokens, width): column_pair(mesh, tokens, width, repeats) for tokens in TOKENS for width in WIDTHS}


def column_pair(mesh: Mesh, tokens: int, width: int, repeats: int) -> dict[str, float]:
    """Least seconds of the backward of two column layers, and alone of the gather and the products that it has.

    Args:
        width: columns of both layers together, over all ranks.
    """
    split, out = Split(mesh.world, True, "overlap"), width // 2 // RANKS
    layers = [ColumnParallelLinear(nn.Parameter(torch.randn(out, HIDDEN)), split) for _ in range(2)]
    weights, gradients = [layer.weight for layer in layers], [torch.randn(1, tokens, out) for _ in layers]
    mine, whole = torch.randn(1, tokens // RANKS, HIDDEN, requires_grad=True), torch.randn(tokens, HIDDEN)

    def input_gradients() -> None:
        for gradient, weight in zip(gradients, weights, strict=True):
            gradient @ weight.detach()

    def weight_gradients() -> None:
        for gradient in gradients:
            gradient[0].t() @ whole

    def gather() -> None:
        start_all_gather(mine.detach(), mesh.world)[1].wait()

    def backward() -> float:
        outputs = apply_column_parallel(mine, layers)
        return timed(lambda: torch.autograd.grad(outputs, [mine, *weights], gradients), mesh)

    alone = {"dx": input_gradients, "dw": weight_gradients, "gather": gather}
    found = {name: min(timed(function, mesh) for _ in range(repeats)) for name, function in alone.items()}
    return found | {"backward": min(backward() for _ in range(repeats))}


def compare_widths(pairs: dict[tuple[int, int], dict[str, float]]) -> dict[int, list[tuple[int, float, float]]]:
    """Print what is exposed by width. Returns, by tokens, (width, predicted, measured share of the communication)."""
    result = {}
    for tokens in TOKENS:
        rows, result[tokens] = [], []
        message = LINK.alpha + 4 * tokens * HIDDEN / RANKS / LINK.bandwidth
        for width in WIDTHS:
            found = pairs[tokens, width]
            wait = max(0.0, message - found["dx"]) + max(0.0, message - found["dw"])
            products = found["dx"] + found["dw"]
            shares = wait / (2 * message), max(0.0, found["backward"] - products) / (2 * message)
            cells = compared(products + wait, found["backward"], ".1f", 1e-3)
            rows.append((f"{width:,}", f"{1e3 * products:.1f}", *cells, *(f"{share:.0%}" for share in shares)))
            result[tokens].append((width, *shares))
        measured = pairs[tokens, WIDTHS[0]]["gather"]
        print_table(
            f"{tokens:,} tokens: backward of two column layers, ms; a message takes {1e3 * message:.1f} ms "
            f"(measured alone: {1e3 * measured:.1f})",
            ("columns", "products", "backward: predicted", "measured", "ratio", "exposed: predicted", "measured"),
            rows,
        )
        crossings = [crossing([(each[0], each[1 + which]) for each in result[tokens]]) for which in (0, 1)]
        found = pairs[tokens, WIDTHS[-1]]
        speed = tokens * HIDDEN * WIDTHS[-1] / found["dx"]  # FLOP/s: 2 tokens h width / tp
        formula = 4 * (RANKS - 1) * speed / (2 * LINK.bandwidth)
        print(
            f"  {1 - HIDES:.0%} hide from {crossings[0]:,.0f} columns on (predicted), {crossings[1]:,.0f} (measured);"
        )
        print(f"  by the formula all of it at {formula:,.0f} ({speed / 1e9:.0f} GFLOP/s)")
    return result


def crossing(points: list[tuple[int, float]]) -> float:
    """The width where the exposed share falls below `HIDES`, between two measured ones on a straight line."""
    for (left, high), (right, low) in zip(points, points[1:]):
        if low <= HIDES < high:
            return left + (right - left) * (high - HIDES) / (high - low)
    return float("nan")


# ---- the figure ------------------------------------------------------------------------------------------------------


def draw(bars: dict[str, tuple[float, float, float]], shares: dict[int, list[tuple[int, float, float]]]) -> None:
    """Left the steps as bars, right the exposed share over the width."""
    figure, (left, right) = new_figure(columns=2, width=9.6, height=3.9)
    for place, (name, (inside, predicted, across)) in enumerate(bars.items()):
        colour = COLOURS["reduce_scatter" if name.startswith("tp") else "all_reduce"]
        for x, value, face in ((place - 0.2, inside, "#BBBBBB"), (place + 0.2, across, colour)):
            left.bar(x, value, width=0.36, color=face)
            left.text(x, value, f"{value:.1f} s", ha="center", va="bottom", fontsize=11)
        left.plot([place + 0.01, place + 0.39], [predicted] * 2, color="black", linewidth=1.6)
    left.set_xticks([0 - 0.2, 0.2, 0.8, 1.2], ["one\nnode", "two\nnodes"] * 2, fontsize=11)
    top = 1.25 * max(each[2] for each in bars.values())
    left.set(ylim=(0, top), ylabel="seconds of a step")
    for place, title in enumerate(("tensor parallel", "data parallel")):
        left.text(place, 0.96 * top, title, ha="center", va="top", fontsize=12, fontweight="bold")
    for number, (tokens, points) in enumerate(shares.items()):
        widths, predicted, measured = zip(*points)
        right.plot(widths, predicted, color=SERIES[number], linewidth=1.6)
        right.plot(widths, measured, "o", color=SERIES[number], label=f"{tokens:,} tokens")
    right.plot([], [], color="black", label="predicted")
    right.plot([], [], "o", color="black", label="measured")
    right.set(xscale="log", xlabel="columns that share the gather", ylabel="part of the communication\nthat is exposed")
    right.minorticks_off()
    right.set_xticks(WIDTHS, [f"{width:,}" for width in WIDTHS])
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.legend(frameon=False, fontsize=10.5)
    save_figure(figure, "nodes")
