"""What each dimension costs, alone and together: bytes sent, bytes held, and time spent waiting in the pipeline."""

import gc
import statistics
import time
from collections import Counter
from contextlib import contextmanager

from common import collectives
from common.config import TrainConfig
from common.drawing.figures import COLOURS, DIMENSION_OF, DIMENSIONS, new_figure, save_figure
from common.drawing.tables import compared, print_comparison, print_table
from common.experiments.even_routing import choosing
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.measure.allocator import MemoryMeter, live_bytes
from common.process_groups import Mesh
from step07_expert_parallel.router import Router
from step08_5d.experiments import formulas
from step08_5d.experiments.tools import DENSE, EXPERTS, FIVE_D, FOUR_D, Run

RANKS = 8
CASES = {
    "dp 8": DENSE,
    "ZeRO-3 over 8": DENSE | {"zero": 3},
    "pp 8": DENSE | {"pp": 8},
    "cp 8": DENSE | {"cp": 8},
    "tp 8": DENSE | {"tp": 8},
    "pp 2 x cp 2 x tp 2": DENSE | FOUR_D,
    "experts: dp 8": EXPERTS,
    "experts: ep 8": EXPERTS | {"ep": 8},
    "experts: pp 2 x cp 2 x tp 2, ep 4": EXPERTS | FIVE_D,
}
KINDS = ("parameters", "gradients", "optimizer state")
DELAY = 20.0  # milliseconds of a layer's forward, for the bubble


def cost(quick: bool) -> None:
    """Nine ways to use 8 ranks for the same global batch: bytes, messages and memory of a rank, and the bubble."""
    names = [name for name in CASES if not quick or "pp" in name]
    found = on_ranks(RANKS, on_every_case, measure, [CASES[name] for name in names], title="cost", jobs=len(names))
    found = {name: [rank[index] for rank in found] for index, name in enumerate(names)}
    configs = {name: resolved(CASES[name]) for name in names}
    print_bytes(found, configs)
    print_memory(found, configs)
    pipelines = [name for name in names if configs[name].pp > 1 and not configs[name].model_config.experts]
    waits = on_ranks(RANKS, on_every_case, idle_share, [CASES[name] for name in pipelines], title="bubble")
    rows = []
    for index, name in enumerate(pipelines):
        rows.append((name, bubble(configs[name]), statistics.mean(rank[index] for rank in waits)))
    print_comparison(f"idle share of a rank in the pipeline, 1F1B, a layer takes {DELAY:g} ms", "", rows, ".3f")
    if not quick:
        draw(found, {name: bubble(config) for name, config in configs.items()})


def bubble(config: TrainConfig) -> float:
    """Predicted share of a step in which a rank of the pipeline waits (lesson 5)."""
    return (config.pp - 1) / (config.accumulation_steps + config.pp - 1)


def resolved(flags: dict) -> TrainConfig:
    """The configuration as it is on `RANKS` ranks."""
    config = TrainConfig(**flags)
    config.resolve_and_check(RANKS)
    return config


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def measure(mesh: Mesh, flags: dict) -> dict:
    """On a rank: of one step the bytes and calls by group, of the next one the memory."""
    with choosing(Router):
        run = Run(mesh, **flags)
        with collectives.record() as calls:
            gradients = run.gradients()
        sizes = [live_bytes(each for _, each in run.weights()), live_bytes(gradients)]
        run.update(gradients)
        sizes.append(live_bytes(each for _, each in run.states()))
        del gradients
        gc.collect()
        with MemoryMeter("cpu").measure([each for _, each in run.weights() + run.states()]) as meter:
            run.update(run.gradients())
    sent, number = Counter(), Counter()
    for call in calls:
        sent[call.group] += call.bytes
        number[call.group] += call.op != "receive"
    return {"sent": sent, "number": number, "held": dict(zip(KINDS, sizes)), "peak": meter.peak_bytes}


class ActionClock:
    """In the place of the pipeline's tracer: adds up the time of its actions."""

    def __init__(self):
        self.seconds = 0.0

    @contextmanager
    def phase(self, name: str, action: str | None = None):
        start = time.perf_counter()
        yield
        if action:
            self.seconds += time.perf_counter() - start


def idle_share(mesh: Mesh, flags: dict) -> float:
    """On a rank: the share of the pipeline's time in which it works on nothing; the quietest of three steps."""
    run, shares = Run(mesh, **flags, layer_delay=DELAY), []
    for _ in range(4):
        collectives.barrier(mesh.world)
        clock, start = ActionClock(), time.perf_counter()
        run.accumulate(clock)
        collectives.barrier(mesh.world)
        shares.append((time.perf_counter() - start, clock.seconds))
        run.finish()
    whole, busy = min(shares[1:])
    return 1 - busy / whole


# ---- tables and picture ----------------------------------------------------------------------------------------------


def by_dimension(ranks: list[dict], kind: str) -> dict[str, float]:
    """The mean over ranks of what was counted by group, by dimension."""
    result = dict.fromkeys(DIMENSIONS, 0.0)
    for group, value in sum((rank[kind] for rank in ranks), Counter()).items():
        if group != "world":  # the norm of the gradient: 8 bytes
            result[DIMENSION_OF[group]] += value / len(ranks)
    return result


def print_bytes(found: dict[str, list[dict]], configs: dict[str, TrainConfig]) -> None:
    """What a rank sends for each dimension, by formula and by the log of calls."""
    rows = []
    for name, ranks in found.items():
        measured, number = (by_dimension(ranks, kind) for kind in ("sent", "number"))
        for dimension, predicted in formulas.sent(configs[name]).items():
            if predicted or measured[dimension]:
                cells = compared(predicted, measured[dimension])
                rows.append((f"{name}: for {dimension}", *cells, f"{number[dimension]:,.1f}"))
        rows.append((f"{name}: all", "", f"{sum(measured.values()):,.0f}", "", f"{sum(number.values()):,.1f}"))
    header = ("", "predicted", "measured", "ratio", "calls")
    print_table(
        f"bytes that a rank sends in a step, mean over {RANKS} ranks, and collectives and messages", header, rows
    )


def print_memory(found: dict[str, list[dict]], configs: dict[str, TrainConfig]) -> None:
    """What a rank holds between steps, and at the peak of one."""
    rows = []
    for name, ranks in found.items():
        held = [sum(rank["held"].values()) for rank in ranks]
        fullest = max(ranks, key=lambda rank: rank["peak"])
        others = fullest["peak"] - sum(fullest["held"].values())
        config = configs[name]
        kept = "-" if config.model_config.experts else f"{formulas.kept_by_layers(config):,.0f}"
        cells = compared(sum(formulas.held(config).values()), statistics.mean(held))
        rows.append((name, *cells, f"{fullest['peak']:,}", f"{others:,}", kept))
    header = ("", "states: predicted", "measured", "ratio", "peak, fullest rank", "minus its states", "kept by layers")
    title = "bytes of a rank: parameters, gradients and optimizer state, mean; peak of the allocator in a step"
    print_table(title, header, rows)


def draw(found: dict[str, list[dict]], bubbles: dict[str, float]) -> None:
    """Three panels: what a rank sends, by dimension, what the fullest rank holds, and the bubble."""
    from matplotlib.patches import Patch

    figure, (left, right, last) = new_figure(1, 3, width=11.5, height=4.4, sharey=True, width_ratios=(1, 1, 0.4))
    names = list(found)
    for place, name in enumerate(names):
        ranks, start = found[name], 0.0
        for dimension, size in by_dimension(ranks, "sent").items():
            left.barh(place, size / 1e6, 0.7, start, color=DIMENSIONS[dimension], edgecolor="white", linewidth=0.5)
            start += size / 1e6
        left.text(start, place, f" {start:.1f}", va="center", fontsize=9)
        fullest, start = max(ranks, key=lambda rank: rank["peak"]), 0.0
        rest = fullest["peak"] - sum(fullest["held"].values())
        for kind, size in (fullest["held"] | {"activations": rest}).items():
            right.barh(place, size / 1e6, 0.7, start, color=COLOURS[kind], edgecolor="white", linewidth=0.5)
            start += size / 1e6
        right.text(start, place, f" {start:.1f}", va="center", fontsize=9)
        last.barh(place, bubbles[name], 0.7, color=COLOURS["idle"], edgecolor="#999999", linewidth=0.5)
        last.text(bubbles[name], place, f" {bubbles[name]:.0%}", va="center", fontsize=9)
    left.set_yticks(range(len(names)), [name.replace("experts: ", "experts, ") for name in names], fontsize=9)
    left.set(title="MB that a rank sends in a step", ylim=(len(names) - 0.4, -0.6))
    right.set(title="MB on the fullest rank, at the peak of a step")
    last.set(title="bubble (share of a step)", xticks=[])
    for axis in (left, right, last):
        axis.set_xlim(0, 1.13 * axis.dataLim.x1)
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False, axis="y")
        axis.spines[["top", "right"]].set_visible(False)
        axis.axhline(list(CASES).index("experts: dp 8") - 0.5, color="#999999", linewidth=0.8)
    words = {name: f"for {name}" for name in DIMENSIONS} | {"dp": "gradients and weights (dp, cp, ZeRO)"}
    handles = [Patch(facecolor=colour, label=words[name]) for name, colour in DIMENSIONS.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=5, fontsize=9, frameon=False)
    kinds = {kind: kind for kind in KINDS} | {"activations": "activations and all else"}
    handles = [Patch(facecolor=COLOURS[kind], label=label) for kind, label in kinds.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=2, fontsize=9, frameon=False)
    save_figure(figure, "cost")
