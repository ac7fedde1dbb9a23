"""Does the all-reduce hide behind the backward? Measured on two nodes that a slow cable joins.

The cable is real, the devices are simulated: two ranks cannot compute side by side without disturbing each other here.
"""

import numpy as np

from common.config import TrainConfig
from common.costs.alpha_beta import Player
from common.drawing.charts import legend, lines
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import print_comparison, print_table
from common.experiments.on_nodes import HIDES, Found, Workload, cable_link, crossing, two_nodes
from common.model import Decoder, cross_entropy_sum
from common.process_groups import Mesh
from step01_single_gpu.data.batches import load_batches
from step01_single_gpu.running.slow_device import SlowDevice
from step02_data_parallel import cost
from step02_data_parallel.data_parallel import pack
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
    tokens = [each * MODEL["seq_len"] for each in (SEQUENCES[::3] if quick else SEQUENCES)]
    cases = {f"{each:,} tokens, {mode}": (each, mode) for each in tokens for mode in ("alone", *MODES)}
    alone, players = {}, {}

    def predict(case: tuple[int, str], found: Found) -> float:
        each, mode = case
        if mode == "alone":  # the first of its number of tokens
            alone[each] = found.free
        players[case] = play(alone[each], mode)
        return alone[each] + players[case].blocked

    title = "a step's gradients"
    found = two_nodes(title, gradients, cases, predict, CABLE, ranks=1, repeats=1 if quick else 3)
    if not found:
        return
    rows, hidden = [], {mode: ({}, {}) for mode in MODES}  # the share of the all-reduces, predicted and measured
    for (name, (each, mode)), result in zip(cases.items(), found.values()):
        if mode != "alone":
            player = players[each, mode]
            exposed = player.blocked, result.slow - alone[each]
            hidden[mode][0][each], hidden[mode][1][each] = (1 - late / player.communication for late in exposed)
            shares = (f"{which[each]:.0%}" for which in hidden[mode])
            rows.append((name, f"{1e3 * BACKWARD * alone[each]:.0f}", f"{1e3 * player.communication:.0f}", *shares))
    print_table("what hides", ("", "backward, ms", "all-reduces, ms", "hidden: predicted", "measured"), rows)
    rows = [(mode, *map(crossing, hidden[mode])) for mode in MODES[1:]]
    print_comparison(f"tokens per rank from which {HIDES:.0%} of the all-reduce hides", "mode", rows)
    formula = cost.tokens_to_hide(RANKS, cable_link(CABLE).bandwidth, SPEED, gradient_bytes=4)
    print(f"  by the formula, which counts products alone, all of it hides from {formula:,.0f} tokens per rank on")
    draw(hidden["bucket"][1], alone, formula)


def draw(measured: dict[int, float], alone: dict[int, float], formula: float) -> None:
    """What hides of the all-reduces against tokens per rank, in buckets; predicted also between the measured points."""
    fine = range(min(alone), max(alone) + 1, 8)
    played = [play(seconds, "bucket") for seconds in np.interp(fine, list(alone), list(alone.values()))]
    predicted = {each: 1 - player.blocked / player.communication for each, player in zip(fine, played)}
    most = max(predicted.values())
    figure, axis = new_figure(height=3.4)
    series = {"predicted, bucket by bucket": predicted, "measured": measured}
    colours = {"predicted, bucket by bucket": COLOURS["predicted"]}
    lines(axis, series, dots=("measured",), colours=colours, log="x", ticks=list(measured), ends=False)
    axis.axvline(formula, color="black", linestyle="--", linewidth=1)
    axis.text(formula * 1.05, 0.04, f"the formula:\n{formula:,.0f} tokens", fontsize=10)
    axis.text(64, most, f"the last buckets, {1 - most:.1%}, never hide", fontsize=10, va="center")
    axis.set(xlabel="tokens per rank", ylabel="of the all-reduce hidden", ylim=(0, 1))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_title("Enough tokens hide the all-reduce: two nodes, a slow cable", fontsize=11, loc="left")
    legend(figure)
    save_figure(figure, "nodes")


def tensors() -> tuple[list[int], list[float]]:
    """Return the bytes of each parameter's gradient of `MODEL`, in forward order, and what its backward costs."""
    named = list(Decoder(TrainConfig(**MODEL).model_config).named_parameters())
    costs = [0.0 if name == "embedding.weight" else float(parameter.numel()) for name, parameter in named]
    return [4 * parameter.numel() for _, parameter in named], costs


def play(alone: float, mode: str) -> Player:
    """A step's gradients over the cable, if they take `alone` seconds where nothing is sent."""
    (sizes, costs), player = tensors(), Player(RANKS, cable_link(CABLE))
    if mode != "alone":
        buckets = pack(sizes, MODEL["bucket_mb"] * 1e6 if mode == "bucket" else 0)
        times = (1 - BACKWARD) * alone, BACKWARD * alone
        cost.play_step(player, buckets, sizes, costs, times, naive=mode == "naive")
    return player


def gradients(mesh: Mesh, case: tuple[int, str]) -> Workload:
    """On a rank: forward and backward with its all-reduces, or without any if the mode is `alone`."""
    (tokens, mode), sequences = case, case[0] // MODEL["seq_len"]
    flags = MODEL | {"micro_batch": sequences, "global_batch": sequences * mesh.world.size, "device": "cpu"}
    config = TrainConfig(**flags, dp_mode="bucket" if mode == "alone" else mode)
    config.resolve_and_check(mesh.world.size)
    model, parallel, _ = build(config, mesh)
    tokens, targets = load_batches(config, mesh).micro_batch(0, 0, sequences, mesh.dp)

    def function() -> None:
        with SlowDevice(SPEED):
            share = cross_entropy_sum(model(tokens), targets) / targets.numel() / RANKS
            with parallel.backward(last=mode != "alone"):
                share.backward()
            if mode == "alone":
                for bucket in parallel.buckets:
                    bucket.start_over()
            else:
                parallel.finish()

    return Workload(function, mesh)
