"""ZeRO-3 on two nodes that a slow cable joins: over all ranks or inside nodes, and how many tokens hide its gathers.

The cable is real, the devices are simulated: four ranks cannot compute side by side on two cores.
"""

from functools import partial

import numpy as np

from common import collectives
from common.config import TrainConfig
from common.costs.alpha_beta import Player
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.errors import UsageError
from common.experiments import tcp_bytes
from common.experiments.on_nodes import CROSSES, HIDES, crosses, crossing, on_nodes, timed
from common.link import Link
from common.process_groups import Mesh
from common.virtual.nodes import value_of
from step01_single_gpu.slow_device import SlowDevice
from step03_zero.experiments import predictions
from step03_zero.experiments.tools import Run, units_of

CABLE = "100mbit"
SPEED = 2.5e9  # FLOP/s of each device
SHAPE = {"layers": 8, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 384, "vocab": 256, "data": "synthetic"}
SHAPE |= {"seq_len": 32, "warmup": 1, "zero": 3}
LAYOUTS = {"all four ranks": 1, "hybrid": 2}  # name: replicas
SEQUENCES = (1, 2, 4, 6, 8, 12)  # of a rank


def sweep_flags(tokens: int) -> dict:
    """The flags of one micro-batch of `tokens` on each of two ranks."""
    sequences = tokens // SHAPE["seq_len"]
    return SHAPE | {"micro_batch": sequences, "global_batch": 2 * sequences}


class Cable(Player):
    """A player whose messages are given as the bytes that cross the cable in one direction."""

    def message(self, size: float) -> float:
        return self.exchange(size)


def nodes(quick: bool) -> None:
    """Two nodes, a slow cable: stage 3 over all ranks against hybrid sharding, and how many tokens hide its gathers."""
    repeats = 1 if quick else 3
    shapes = [SHAPE | {"micro_batch": 2, "global_batch": 8 * m} for m in (1, 4)]
    sweep = [sweep_flags(b * SHAPE["seq_len"]) for b in (SEQUENCES[::3] if quick else SEQUENCES)]
    try:
        four = on_nodes(2, 2, compare_layouts, shapes, list(LAYOUTS.values()), repeats, bandwidth=CABLE)
        two = on_nodes(2, 1, compare_layouts, sweep, [1], repeats, bandwidth=CABLE)
    except UsageError as error:
        print(f"  left out: {error}")
        return
    bars = print_layouts(shapes, four)
    draw(bars, *print_sweep(sweep, two[0]))


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def compare_layouts(mesh: Mesh, shapes: list[dict], layouts: list[int], repeats: int) -> list[dict[int, dict]]:
    """On a rank: for each shape, what `timed` finds of a step's gradients, by number of replicas.

    0 replicas stand for a step that sends nothing. `crossing` is this rank's part of the predicted bytes.
    """
    found = []
    for flags in shapes:
        runs = {replicas: Run(mesh, **flags, zero_replicas=replicas or mesh.world.size) for replicas in (0, *layouts)}
        functions = [partial(gradients, run, replicas > 0) for replicas, run in runs.items()]
        expected = {}
        for replicas, run, function in zip(runs, runs.values(), functions):
            with collectives.record() as calls:
                function()
            expected[replicas] = sum(crosses(call, run.mesh) for call in calls)
        with SlowDevice(SPEED):
            results = timed(mesh, functions, repeats)
        found.append({key: result | {"crossing": expected[key]} for key, result in zip(runs, results)})
    return found


def gradients(run: Run, together: bool) -> None:
    """A step's gradients. With as many replicas as ranks and not `together`, every rank stays on its own."""
    run.zero.gather()
    for index in range(run.config.accumulation_steps):
        share = run.loss_share(0, index)
        with run.zero.backward(last=together and index == run.config.accumulation_steps - 1):
            share.backward()
    if together:
        run.zero.finish()
    else:
        for unit in run.zero.units:
            unit.start_over()


# ---- the tables ------------------------------------------------------------------------------------------------------


def play(flags: dict, alone: dict, replicas: int, ranks: int) -> Player:
    """Play a micro-batch over the cable: of stage 3 over both nodes or, with 2 replicas, of their sum alone.

    Args:
        alone: what `timed` finds of a step that sends nothing. ranks: of a node.
    """
    micro_batches = flags["global_batch"] // (flags["micro_batch"] * 2 * ranks)
    times = alone["seconds"] / 3 / micro_batches, alone["seconds"] * 2 / 3 / micro_batches
    units = list(units_of(flags).units)
    whole, costs = [4 * size for size in units], [0, *units[1:]]  # the embedding only looks up
    player = Cable(2, Link(0.0, value_of(CABLE) / 8 / tcp_bytes.PACKET))
    if replicas == 1:
        gathered, scattered = (0.5, 0.5) if ranks == 1 else (CROSSES["all_gather"], CROSSES["reduce_scatter"])
        sizes = [[share * size for size in whole] for share in (gathered, scattered)]
        predictions.play_units(player, sizes[0], costs, times, scattered=sizes[1])
    else:  # gathers stay inside the nodes; each unit's shards are summed across
        player.now = times[0]
        for size, cost in zip(reversed(whole), reversed(costs)):
            player.now += times[1] * cost / sum(costs)
            done = player.exchange(size)
        player.wait(done)
    return player


def print_layouts(shapes: list[dict], found: list[list[dict]]) -> dict[tuple[int, str], tuple[float, float]]:
    """Print bytes and seconds of both layouts. Returns seconds by micro-batches and name: predicted, measured."""
    rows, bars = [], {}
    for index, flags in enumerate(shapes):
        alone, m = found[0][index][0], flags["global_batch"] // (4 * flags["micro_batch"])
        for name, replicas in LAYOUTS.items():
            ranks = [rank[index][replicas] for rank in found]
            sent = tcp_bytes.PACKET * sum(each["crossing"] for each in ranks[:2])  # by the ranks of the first node
            player = play(flags, alone, replicas, 2)
            exposed = player.blocked * (m if replicas == 1 else 1)  # replicas are summed once per step
            bars[m, name] = alone["seconds"] + exposed, ranks[0]["seconds"]
            cells = compared(sent, ranks[0]["sent"], ".2f", 1e6), compared(*bars[m, name], ".2f")
            rows.append((f"m = {m}, {name}", *cells[0], f"{alone['seconds']:.2f}", *cells[1]))
    header = ("", "MB over the cable, predicted", "measured", "ratio", "s, nothing sent", "s, predicted", "measured")
    print_table(f"stage 3 on 2 nodes of 2 ranks, a cable of {CABLE}: one step", (*header, "ratio"), rows)
    return bars


def print_sweep(shapes: list[dict], found: list[dict]) -> tuple[dict[str, dict[float, float]], float]:
    """Print what hides by tokens. Returns the hidden shares by kind and tokens, and where forward and gather are equal.

    The prediction is also played between the measured points, with the interpolated time of a step that sends nothing.
    """
    rows, shares = [], {"predicted": {}, "measured": {}}
    for flags, each in zip(shapes, found):
        tokens, alone, measured = flags["micro_batch"] * flags["seq_len"], each[0], each[1]["seconds"]
        player = play(flags, alone, 1, 1)
        predicted = alone["seconds"] + player.blocked
        shares["predicted"][tokens] = 1 - player.blocked / player.communication
        shares["measured"][tokens] = 1 - (measured - alone["seconds"]) / player.communication
        hidden = [f"{shares[kind][tokens]:.0%}" for kind in shares]
        times = [f"{1e3 * seconds:.0f}" for seconds in (alone["seconds"], player.communication)]
        rows.append((f"{tokens:,}", *times, *compared(predicted, measured, ".0f", 1e-3), *hidden))
    header = ("tokens per rank", "computing, ms", "messages, ms", "step, predicted", "measured", "ratio")
    title = f"stage 3 on 2 nodes of 1 rank, a cable of {CABLE}"
    print_table(title, (*header, "hidden, predicted", "measured"), rows)
    bandwidth = value_of(CABLE) / 8 / tcp_bytes.PACKET
    condition = predictions.tokens_to_hide_gather(2, bandwidth, SPEED, width=TrainConfig(**SHAPE).torch_dtype.itemsize)
    print(f"  at {SPEED / 1e9:g} GFLOP/s a forward's products take as long as its gather with {condition:,.0f} tokens")
    cells = compared(*(crossing(shares[kind]) for kind in ("predicted", "measured")))
    print(f"  {HIDES:.0%} hide from {cells[0]} tokens on (predicted), {cells[1]} (measured), ratio {cells[2]}")

    seconds = {flags["micro_batch"] * flags["seq_len"]: each[0]["seconds"] for flags, each in zip(shapes, found)}
    fine = range(min(seconds), max(seconds) + 1)
    alone = np.interp(fine, list(seconds), list(seconds.values()))
    line = [play(sweep_flags(SHAPE["seq_len"]), {"seconds": each}, 1, 1) for each in alone]
    shares["predicted"] = {tokens: 1 - each.blocked / each.communication for tokens, each in zip(fine, line)}
    units = units_of(SHAPE).units
    forward, gather = alone / 3 / sum(units[1:]), 4 * 0.5 / bandwidth  # seconds per parameter
    equal = fine[int(np.argmax(forward >= gather))]
    print(f"  a layer's whole forward with {equal:,} tokens")
    return shares, equal


def draw(bars: dict[tuple[int, str], tuple], shares: dict[str, dict[float, float]], equal: float) -> None:
    """Left the steps of both layouts as bars, right the share that hides over the tokens; dashed at `equal` tokens."""
    figure, (left, right) = new_figure(columns=2, width=9.6, height=3.9)
    colours = dict(zip(LAYOUTS, (COLOURS["all_gather"], COLOURS["all_reduce"])))
    for place, ((_, name), (predicted, measured)) in enumerate(bars.items()):
        x = place + 0.3 * (place // len(LAYOUTS))
        left.bar(x, measured, width=0.8, color=colours[name], label=name if place < len(LAYOUTS) else None)
        left.plot([x - 0.4, x + 0.4], [predicted] * 2, color="black", linewidth=1.6)
        left.text(x, max(measured, predicted), f"{measured:.1f} s", ha="center", va="bottom", fontsize=11)
    left.plot([], [], color="black", linewidth=1.6, label="predicted")
    left.set_xticks([0.5, 2.8], ["1 micro-batch", "4 micro-batches"], fontsize=11)
    left.set(ylabel="seconds of a step", ylim=(0, 1.2 * max(max(each) for each in bars.values())))
    left.legend(frameon=False, fontsize=11, loc="upper left")
    left.set_title("Hybrid sharding sends once per step", fontsize=11.5, loc="left", fontweight="bold")
    for kind, style in (("predicted", "-"), ("measured", "o")):
        tokens, values = zip(*sorted(shares[kind].items()))
        right.plot(tokens, [100 * value for value in values], style, color=COLOURS[kind], label=kind, linewidth=1.8)
    right.axvline(equal, color="black", linestyle="--", linewidth=1.2)
    right.text(equal / 1.08, 4, "a layer's forward = its gather", fontsize=11, ha="right")
    right.text(max(tokens), 50, "never hidden:\nfirst gather,\nlast reduce-\nscatter", fontsize=11, ha="right")
    right.set(xscale="log", xlabel="tokens per rank", ylabel="% of the messages hidden", ylim=(0, 100))
    right.set_xticks(tokens, [f"{each:,}" for each in tokens])
    right.minorticks_off()
    right.legend(frameon=False, fontsize=11, loc="upper left")
    right.set_title("Enough tokens hide the messages", fontsize=11.5, loc="left", fontweight="bold")
    save_figure(figure, "nodes")
