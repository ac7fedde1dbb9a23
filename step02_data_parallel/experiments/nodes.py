"""Does the all-reduce hide behind the backward? Measured on two nodes that are joined by a slow cable."""

import itertools
import math
import statistics
import time

from common import collectives
from common.config import TrainConfig
from common.data.batches import load_batches
from common.errors import UsageError
from common.experiments import tcp_bytes
from common.experiments.cost_model import all_reduce_bytes
from common.experiments.figures import COLOURS, new_figure, save_figure
from common.experiments.nodes import value_of
from common.experiments.on_nodes import on_nodes
from common.experiments.tables import compared, print_comparison, print_table
from common.link import Link
from common.model import Decoder, cross_entropy_sum
from common.process_groups import Mesh
from step02_data_parallel.experiments import predictions
from step02_data_parallel.train import build

RANKS = 2  # on a node of their own each
CABLE = "200mbit"
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 256, "vocab": 256, "data": "synthetic"}
MODEL |= {"seq_len": 128, "warmup": 1, "bucket_mb": 0.25}
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)  # of a rank
MODES = ("naive", "overlap", "bucket")
HIDDEN = 0.8  # an all-reduce of which this share hides is said to hide


def nodes(quick: bool) -> None:
    """Two nodes, a slow cable: the bytes that cross it, and how many tokens a rank needs to hide the all-reduce."""
    try:
        found = on_nodes(RANKS, 1, steps, SEQUENCES[::3] if quick else SEQUENCES, 2 if quick else 5, bandwidth=CABLE)[0]
    except UsageError as error:
        print(f"  left out: {error}")
        return
    sizes, costs = tensors()
    link = Link(0.0, value_of(CABLE) / 8 / tcp_bytes.PACKET)
    sent = tcp_bytes.PACKET * all_reduce_bytes(sum(sizes), RANKS)
    print(f"\n{RANKS} nodes of one rank, a cable of {CABLE}, {sum(sizes) / 1e6:.2f} MB of gradients")
    rows = [(mode, sent, statistics.median(each[mode]["sent"] for each in found.values())) for mode in MODES]
    print_comparison("MB that a node sends over the cable in a step", "mode", rows, ".3f", 1e6)

    rows, shares = [], {mode: {"predicted": {}, "measured": {}} for mode in MODES}
    for (sequences, each), mode in itertools.product(found.items(), MODES):
        tokens, alone, backward = sequences * MODEL["seq_len"], each["alone"]["seconds"], each["alone"]["backward"]
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

    per_token = statistics.median(each["alone"]["backward"] / sequences for sequences, each in found.items())
    per_token /= MODEL["seq_len"]
    condition = all_reduce_bytes(sum(sizes), RANKS) / link.bandwidth / per_token
    print(f"  the backward takes as long as the all-reduce with {condition:,.0f} tokens per rank")
    rows = [(mode, *(crossing(shares[mode][kind]) for kind in ("predicted", "measured"))) for mode in MODES[1:]]
    print_comparison(f"tokens per rank from which {HIDDEN:.0%} of the all-reduce hides", "mode", rows)
    draw(shares["bucket"], condition)


def tensors() -> tuple[list[int], list[float]]:
    """Return the bytes of each parameter's gradient of `MODEL`, in forward order, and what its backward costs."""
    named = list(Decoder(TrainConfig(**MODEL).model_config).named_parameters())
    costs = [0.0 if name == "embedding.weight" else float(parameter.numel()) for name, parameter in named]
    return [4 * parameter.numel() for _, parameter in named], costs


def crossing(shares: dict[float, float]) -> float:
    """Return where the shares, by tokens, first reach `HIDDEN`: straight lines between logarithms of tokens."""
    points = sorted(shares.items())
    for (x, low), (y, high) in itertools.pairwise(points):
        if low < HIDDEN <= high:
            way = (HIDDEN - low) / (high - low)
            return math.exp(math.log(x) + way * (math.log(y) - math.log(x)))
    return math.nan


def draw(shares: dict[str, dict[float, float]], condition: float) -> None:
    """What hides of the all-reduces against tokens per rank, in buckets."""
    figure, axes = new_figure(height=3.4)
    for kind, style in (("predicted", "-"), ("measured", "o")):
        tokens, values = zip(*sorted(shares[kind].items()))
        axes.plot(tokens, [100 * value for value in values], style, color=COLOURS[kind], label=kind)
    axes.axvline(condition, color="black", linestyle="--", linewidth=1)
    axes.text(condition * 1.05, 4, "backward = all-reduce", fontsize=10)
    axes.set(xscale="log", xlabel="tokens per rank", ylabel="% of the all-reduce hidden", ylim=(0, 100))
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens])
    axes.minorticks_off()
    axes.set_title("Enough tokens hide the all-reduce: two nodes, a slow cable", fontsize=11, loc="left")
    axes.legend(frameon=False)
    save_figure(figure, "nodes")


def steps(mesh: Mesh, sizes: tuple[int, ...], repeats: int) -> dict[int, dict[str, dict[str, float]]]:
    """On a rank: for each number of sequences and each mode, medians of a step's seconds and of the bytes sent.

    The mode `alone` computes and sends nothing. Modes take turns, so that whatever else the machine does meets all.
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
        runs = [("alone", *models["bucket"]), *((mode, *models[mode]) for mode in MODES)]
        times = [{mode: one_step(mesh, mode, *parts, *batch) for mode, *parts in runs} for _ in range(repeats + 1)]
        found[sequences] = {
            mode: {key: statistics.median(each[mode][key] for each in times[1:]) for key in times[0][mode]}
            for mode, *_ in runs
        }
    return found


def one_step(mesh: Mesh, mode: str, model, parallel, tokens, targets) -> dict[str, float]:
    """One forward and backward with its all-reduces, or without them if the mode is `alone`."""
    collectives.barrier(mesh.world)
    before = tcp_bytes.sent_through("cable")
    collectives.barrier(mesh.world)
    start = time.perf_counter()
    share = cross_entropy_sum(model(tokens), targets) / targets.numel() / mesh.world.size
    middle = time.perf_counter()
    with parallel.no_sync(mode == "alone"):
        share.backward()
    backward = time.perf_counter() - middle
    if mode == "alone":
        for bucket in parallel.buckets:
            bucket.start_over()
    else:
        parallel.finish()
    seconds = time.perf_counter() - start
    collectives.barrier(mesh.world)
    return {"seconds": seconds, "backward": backward, "sent": tcp_bytes.sent_through("cable") - before}
