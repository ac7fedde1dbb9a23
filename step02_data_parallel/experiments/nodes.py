"""Does the all-reduce hide behind the backward? Measured on two nodes that a slow cable joins.

The cable is real, the devices are simulated: two ranks cannot compute side by side without disturbing each other here.
"""

import itertools
from functools import partial

import numpy as np

from common.config import TrainConfig
from common.costs.alpha_beta import all_reduce_bytes
from common.data.batches import load_batches
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import compared, print_comparison, print_table
from common.errors import UsageError
from common.experiments import tcp_bytes
from common.experiments.nodes import value_of
from common.experiments.on_nodes import HIDES, crossing, on_nodes, timed
from common.experiments.slow_device import SlowDevice
from common.link import Link
from common.model import Decoder, cross_entropy_sum
from common.process_groups import Mesh
from step02_data_parallel.experiments import predictions
from step02_data_parallel.train import build

RANKS = 2  # on a node of their own each
CABLE = "200mbit"
SPEED = 1e10  # FLOP/s of each device
BACKWARD = 2 / 3  # of a step's FLOPs
MODEL = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 512, "vocab": 256, "data": "synthetic"}
MODEL |= {"seq_len": 64, "warmup": 1, "bucket_mb": 1}
SEQUENCES = (1, 2, 4, 6, 8, 12, 16)  # of a rank
MODES = ("naive", "overlap", "bucket")


def nodes(quick: bool) -> None:
    """Two nodes, a slow cable: the bytes that cross it, and how many tokens a rank needs to hide the all-reduce."""
    try:
        found = on_nodes(RANKS, 1, steps, SEQUENCES[::3] if quick else SEQUENCES, 1 if quick else 3, bandwidth=CABLE)[0]
    except UsageError as error:
        print(f"  left out: {error}")
        return
    sizes, costs = tensors()
    link = Link(0.0, value_of(CABLE) / 8 / tcp_bytes.PACKET)
    sent = tcp_bytes.PACKET * all_reduce_bytes(sum(sizes), RANKS)
    print(f"\n{RANKS} nodes of one rank, a cable of {CABLE}, {sum(sizes) / 1e6:.2f} MB of gradients")
    rows = [(mode, sent, found[SEQUENCES[0]][mode]["sent"]) for mode in MODES]
    print_comparison("MB that a node sends over the cable in a step", "mode", rows, ".3f", 1e6)

    rows, shares = [], {mode: {"predicted": {}, "measured": {}} for mode in MODES}
    for (sequences, each), mode in itertools.product(found.items(), MODES):
        tokens, alone = sequences * MODEL["seq_len"], each["alone"]["seconds"]
        backward = BACKWARD * alone
        limit = MODEL["bucket_mb"] * 1e6
        expected = predictions.overlap(sizes, costs, backward, RANKS, link, mode, limit)
        predicted, measured = alone + expected.exposed, each[mode]["seconds"]
        shares[mode]["predicted"][tokens] = expected.overlap_share
        shares[mode]["measured"][tokens] = 1 - (measured - alone) / expected.communication
        times = [f"{1e3 * seconds:.0f}" for seconds in (backward, expected.communication)]
        hidden = [f"{shares[mode][kind][tokens]:.0%}" for kind in ("predicted", "measured")]
        rows.append((f"{tokens:,}, {mode}", *times, *compared(predicted, measured, ".0f", 1e-3), *hidden))
    header = ("tokens per rank, mode", "backward, ms", "all-reduces, ms", "step, predicted", "measured", "ratio")
    print_table("time of a step's gradients", (*header, "hidden, predicted", "measured"), rows)

    per_token = 4 * sum(costs) / SPEED  # a product's backward: 2 FLOPs for the input's gradient, 2 for the weight's
    condition = all_reduce_bytes(sum(sizes), RANKS) / link.bandwidth / per_token
    print(f"  the backward takes as long as the all-reduce with {condition:,.0f} tokens per rank")
    rows = [(mode, *(crossing(shares[mode][kind]) for kind in ("predicted", "measured"))) for mode in MODES[1:]]
    print_comparison(f"tokens per rank from which {HIDES:.0%} of the all-reduce hides", "mode", rows)
    alone = {sequences * MODEL["seq_len"]: each["alone"]["seconds"] for sequences, each in found.items()}
    line = {}  # also between the measured points
    for tokens in range(min(alone), max(alone) + 1, 8):
        backward = BACKWARD * float(np.interp(tokens, list(alone), list(alone.values())))
        line[tokens] = predictions.overlap(sizes, costs, backward, RANKS, link, "bucket", limit).overlap_share
    draw({"predicted": line, "measured": shares["bucket"]["measured"]}, condition)


def tensors() -> tuple[list[int], list[float]]:
    """Return the bytes of each parameter's gradient of `MODEL`, in forward order, and what its backward costs."""
    named = list(Decoder(TrainConfig(**MODEL).model_config).named_parameters())
    costs = [0.0 if name == "embedding.weight" else float(parameter.numel()) for name, parameter in named]
    return [4 * parameter.numel() for _, parameter in named], costs


def draw(shares: dict[str, dict[float, float]], condition: float) -> None:
    """What hides of the all-reduces against tokens per rank, in buckets."""
    figure, axes = new_figure(height=3.4)
    for kind, style in (("predicted", "-"), ("measured", "o")):
        tokens, values = zip(*sorted(shares[kind].items()))
        axes.plot(tokens, [100 * value for value in values], style, color=COLOURS[kind], label=kind)
    axes.axvline(condition, color="black", linestyle="--", linewidth=1)
    axes.text(condition * 1.05, 4, "backward = all-reduce", fontsize=10)
    axes.set(xscale="log", xlabel="tokens per rank", ylabel="% of the all-reduce hidden", ylim=(0, 100))
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens])  # those that were measured
    axes.minorticks_off()
    axes.set_title("Enough tokens hide the all-reduce: two nodes, a slow cable", fontsize=11, loc="left")
    axes.legend(frameon=False)
    save_figure(figure, "nodes")


def steps(mesh: Mesh, sizes: tuple[int, ...], repeats: int) -> dict[int, dict[str, dict[str, float]]]:
    """On a rank: for each number of sequences and each mode, the seconds of a step's gradients and the bytes sent.

    The mode `alone` computes and sends nothing.
    """
    found = {}
    for sequences in sizes:
        flags = MODEL | {"micro_batch": sequences, "global_batch": sequences * mesh.world.size, "device": "cpu"}
        models = {}
        for mode in MODES:
            config = TrainConfig(**flags, dp_mode=mode)
            config.resolve_and_check(mesh.world.size)
            models[mode] = build(config, mesh)[:2]
        batch = load_batches(config, mesh).micro_batch(0, 0, sequences, mesh.dp.rank, mesh.dp.size)
        models = {"alone": models["bucket"]} | models
        functions = [partial(gradients, mode, *parts, *batch) for mode, parts in models.items()]
        with SlowDevice(SPEED):
            timed(mesh, functions, 1)
            found[sequences] = dict(zip(models, timed(mesh, functions, repeats)))
    return found


def gradients(mode: str, model, parallel, tokens, targets) -> None:
    """One forward and backward with its all-reduces, or without them if the mode is `alone`."""
    share = cross_entropy_sum(model(tokens), targets) / targets.numel() / RANKS
    with parallel.no_sync(mode == "alone"):
        share.backward()
    if mode == "alone":
        for bucket in parallel.buckets:
            bucket.start_over()
    else:
        parallel.finish()
