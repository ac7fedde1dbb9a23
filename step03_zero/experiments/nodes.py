"""ZeRO-3 on two nodes that a slow cable joins: over all ranks or inside nodes, and how many tokens hide its gathers.

The cable is real, the devices are simulated: four ranks cannot compute side by side on two cores.
"""

import numpy as np

from common.costs.alpha_beta import Player
from common.drawing.charts import bars, legend, lines
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import print_table
from common.experiments.on_nodes import HIDES, Found, Workload, cable_link, crossing, two_nodes
from common.process_groups import Mesh
from step01_single_gpu.running.slow_device import SlowDevice
from step03_zero import cost
from step03_zero.by_layer import ZeroByLayer
from step03_zero.experiments.tools import run_with, units_of

CABLE = "100mbit"
SPEED = 2.5e9  # FLOP/s of each device
SHAPE = {"layers": 8, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 384, "vocab": 256, "data": "synthetic"}
SHAPE |= {"seq_len": 32, "warmup": 1, "zero": 3}
ALONE = "nothing sent"
LAYOUTS = {ALONE: 0, "all four ranks": 1, "hybrid": 2}  # name: replicas
SEQUENCES = (1, 2, 4, 6, 8, 12)  # of a rank
TIMES = np.array([1 / 3, 2 / 3])  # of a step's products, in the forward and in the backward


class Alone(ZeroByLayer):
    """With as many replicas as ranks, all gradients stay where they are: nothing is sent but two single numbers."""

    def backward(self, last: bool, complete: bool = True):
        return super().backward(False, complete)

    def finish(self) -> list:
        gradients = [unit.reduced[where] for unit in self.units for where, _ in unit.pieces]
        for unit in self.units:
            unit.start_over()
        return gradients


class Cable(Player):
    """A player whose messages are given as the bytes that cross the cable in one direction."""

    def message(self, size: float) -> float:
        return self.exchange(size)


def nodes(quick: bool) -> None:
    """Two nodes, a slow cable: stage 3 over all ranks against hybrid sharding, and how many tokens hide its gathers."""
    repeats = 1 if quick else 3
    seconds = compare_layouts(repeats)
    if seconds:
        draw(seconds, *compare_tokens(SEQUENCES[::3] if quick else SEQUENCES, repeats))


def gradients(mesh: Mesh, case: tuple[int, int, int]) -> Workload:
    """On a rank: a step's gradients. `case`: sequences of a micro-batch, micro-batches, replicas; 0 stay alone."""
    sequences, micro_batches, replicas = case
    flags = SHAPE | {"micro_batch": sequences, "global_batch": sequences * micro_batches * mesh.world.size}
    run = run_with(mesh, flags | {"zero_replicas": replicas or mesh.world.size}, None if replicas else Alone)

    def function() -> None:
        with SlowDevice(SPEED):
            run.gradients()

    return Workload(function, run.mesh)


def play(alone: float, replicas: int, ranks: int) -> Player:
    """Play a micro-batch over the cable: of stage 3 over both nodes or, with 2 replicas, of their sum alone.

    Args:
        alone: seconds of a micro-batch where nothing is sent. ranks: of a node.
    """
    units, times = units_of(SHAPE), tuple(TIMES * alone)
    whole, costs = [4 * size for size in units], [0, *units[1:]]  # the embedding only looks up
    player = Cable(2, cable_link(CABLE))
    if replicas == 1:
        share = 0.5 if ranks == 1 else 1.0  # of a tensor that crosses in each direction, as messages of all ranks
        cost.play_units(player, [share * size for size in whole], costs, times)
    else:  # gathers stay inside the nodes; each unit's shards are summed across
        player.now = times[0]
        for size, each in zip(reversed(whole), reversed(costs)):
            player.now += times[1] * each / sum(costs)
            done = player.exchange(size)
        player.wait(done)
    return player


# ---- two nodes of two ranks ------------------------------------------------------------------------------------------


def compare_layouts(repeats: int) -> dict[tuple[int, str], tuple[float, float]]:
    """Print bytes and seconds of both layouts. Returns seconds by micro-batches and name: predicted, measured."""
    cases = {f"m = {m}, {name}": (2, m, replicas) for m in (1, 4) for name, replicas in LAYOUTS.items()}
    alone = {}

    def predict(case: tuple[int, int, int], found: Found) -> float:
        _, m, replicas = case
        if not replicas:  # the first of its number of micro-batches
            alone[m] = found.free
            return found.free
        exposed = play(alone[m] / m, replicas, 2).blocked  # replicas are summed once per step
        return alone[m] + exposed * (m if replicas == 1 else 1)

    found = two_nodes("a step of stage 3", gradients, cases, predict, CABLE, repeats=repeats)
    names = {replicas: name for name, replicas in LAYOUTS.items()}
    return {
        (m, names[r]): (found[name].predicted, found[name].slow) for name, (_, m, r) in cases.items() if r and found
    }


# ---- two nodes of one rank -------------------------------------------------------------------------------------------


def compare_tokens(sequences: tuple[int, ...], repeats: int) -> tuple[dict[str, dict[float, float]], float, float]:
    """Print what hides by tokens. Returns the hidden shares by kind and tokens, and where forward and gather are equal:
    the forward of these runs, and one of its products alone, as the formula says.

    The prediction is also played between the measured points, with the interpolated time of a step that sends nothing.
    """
    cases = {f"{32 * each} tokens{', ' + ALONE if not r else ''}": (each, 1, r) for each in sequences for r in (0, 1)}
    alone = {}  # seconds by tokens

    def predict(case: tuple[int, int, int], found: Found) -> float:
        tokens = case[0] * SHAPE["seq_len"]
        alone.setdefault(tokens, found.free)  # the first of its number of tokens sends nothing
        return alone[tokens] + (play(alone[tokens], 1, 1).blocked if case[2] else 0.0)

    found = two_nodes("a step of stage 3", gradients, cases, predict, CABLE, ranks=1, repeats=repeats)
    rows, shares = [], {"predicted": {}, "measured": {}}
    for name, (each, _, replicas) in cases.items():
        if replicas:
            tokens, messages = each * SHAPE["seq_len"], play(1.0, 1, 1).communication
            for kind, seconds in (("predicted", found[name].predicted), ("measured", found[name].slow)):
                shares[kind][tokens] = 1 - (seconds - alone[tokens]) / messages
            rows.append((tokens, f"{1e3 * messages:.0f}", *(f"{shares[kind][tokens]:.0%}" for kind in shares)))
    print_table("what hides", ("tokens per rank", "messages, ms", "predicted", "measured"), rows)
    bandwidth = cable_link(CABLE).bandwidth
    condition = cost.tokens_to_hide_gather(2, bandwidth, SPEED, width=4)
    print(f"  at {SPEED / 1e9:g} GFLOP/s a forward's products take as long as its gather with {condition:,.0f} tokens")
    predicted, measured = (crossing(shares[kind]) for kind in shares)
    print(f"  {HIDES:.0%} hide from {predicted:,.0f} tokens on (predicted), {measured:,.0f} (measured)")

    fine = range(min(alone), max(alone) + 1)
    seconds = np.interp(fine, list(alone), list(alone.values()))
    played = [play(each, 1, 1) for each in seconds]
    shares["predicted"] = {tokens: 1 - each.blocked / each.communication for tokens, each in zip(fine, played)}
    forward, gather = seconds * TIMES[0] / sum(units_of(SHAPE)[1:]), 4 * 0.5 / bandwidth  # seconds per parameter
    equal = fine[int(np.argmax(forward >= gather))]
    print(f"  a layer's whole forward with {equal:,} tokens")
    return shares, equal, condition


def draw(
    seconds: dict[tuple[int, str], tuple], shares: dict[str, dict[float, float]], equal: float, condition: float
) -> None:
    """Left the steps of both layouts as bars, right the share that hides over the tokens; dashed at `equal` tokens, and
    dotted at those of the formula.
    """
    figure, (left, right) = new_figure(columns=2, width=9.6, height=3.9)
    groups, marks = {}, {}
    for (m, name), (predicted, measured) in seconds.items():
        label = f"{m} micro-batch{'es' * (m > 1)}"
        groups.setdefault(label, []).append({name: measured})
        marks.setdefault(label, []).append(predicted)
    colours = {"all four ranks": COLOURS["all_gather"], "hybrid": COLOURS["all_reduce"]}
    bars(left, groups, marks, colours, value="{:.1f} s")
    left.set(ylabel="seconds of a step")
    left.set_title("Hybrid sharding crosses the cable once per step", fontsize=11.5, loc="left", fontweight="bold")
    lines(
        right,
        shares,
        dots=("measured",),
        colours={"predicted": "black"},
        log="x",
        ticks=list(shares["measured"]),
        ends=False,
    )
    right.axvline(equal, color="black", linestyle="--", linewidth=1.2)
    right.axvline(condition, color="black", linestyle=":", linewidth=1.2)
    right.text(equal / 1.08, 0.04, "a layer's forward = its gather", fontsize=11, ha="right")
    right.text(condition * 1.06, 0.04, f"formula: {condition:.0f}", fontsize=11)
    what = "never hidden:\nfirst gathers,\nlast sums"
    never = right.text(max(shares["measured"]), 0.5, what, fontsize=11, ha="right")
    never.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # over the dotted line
    right.set(xlabel="tokens per rank", ylabel="of the messages hidden", ylim=(0, 1))
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_title("Plain stage 3: enough tokens hide messages", fontsize=11.5, loc="left", fontweight="bold")
    legend(figure)
    save_figure(figure, "nodes")
