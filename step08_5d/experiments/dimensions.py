"""What each dimension costs, alone and together: bytes sent, bytes held, and time spent waiting in the pipeline."""

import statistics

from common.config import TrainConfig
from common.costs.vocabulary import KINDS
from common.drawing.charts import bars
from common.drawing.figures import COLOURS, DIMENSIONS, new_figure, save_figure
from common.drawing.tables import print_table
from common.experiments.counting import Sent, counted, held, mean_rank, print_counted, print_held
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.process_groups import DIMENSION_OF, Mesh
from step01_single_gpu.running.memory_meter import MemoryMeter
from step08_5d import cost as formulas
from step08_5d.cost import Layout
from step08_5d.experiments.tools import DENSE, EXPERTS, FIVE_D, FOUR_D, Training, route_evenly

RANKS = 8
CASES = {
    "dp 8": DENSE,
    "ZeRO-3 over 8": DENSE | {"zero": 3},
    "pp 8": DENSE | {"pp": 8},
    "cp 8": DENSE | {"cp": 8},
    "tp 8": DENSE | {"tp": 8},
    "pp 2 x cp 2 x tp 2": DENSE | FOUR_D,
    "experts, dp 8": EXPERTS,
    "experts, ep 8": EXPERTS | {"ep": 8},
    "experts, pp 2 x cp 2 x tp 2, ep 4": EXPERTS | FIVE_D,
}
COLOURS_OF = {kind: COLOURS[kind] for kind in KINDS} | {"activations and all else": COLOURS["activations"]}


def cost(quick: bool) -> None:
    """Nine ways to use 8 ranks for the same global batch: bytes, messages and memory of a rank, and the bubble."""
    cases = {name: flags for name, flags in CASES.items() if not quick or "pp" in name}
    found = on_ranks(RANKS, on_every_case, measure, list(cases.values()), title="cost", jobs=len(cases))
    ranks = dict(zip(cases, zip(*found)))
    layouts = {name: layout_of(flags) for name, flags in cases.items()}
    sent = {name: mean_rank(each["counted"] for each in of_ranks) for name, of_ranks in ranks.items()}
    print_counted("a step", {name: formulas.messages(*each) for name, each in layouts.items()}, sent, sockets=False)
    kept = {name: mean_held(of_ranks) for name, of_ranks in ranks.items()}
    print_held("between steps", {name: formulas.held(*each) for name, each in layouts.items()}, kept)
    rows, peaks = [], {}
    for name, (model, layout) in layouts.items():
        fullest = max(ranks[name], key=lambda rank: rank["peak"])
        rest = fullest["peak"] - sum(fullest["held"].values())
        peaks[name] = fullest["held"] | {"activations and all else": rest}
        predicted = "-" if model.experts else f"{formulas.activations(model, layout):,.0f}"
        cells = (f"{fullest['peak']:,}", f"{rest:,}", predicted, f"{formulas.bubble(layout):.1%}")
        rows.append((name, *cells))
    header = ("", "peak, fullest rank", "minus its states", "kept by its layers, predicted", "bubble, predicted")
    print_table("bytes at the peak of a step", header, rows)
    if not quick:
        draw(sent, peaks, {name: formulas.bubble(layout) for name, (_, layout) in layouts.items()})


def layout_of(flags: dict) -> tuple:
    """The model and the layout of a run on `RANKS` ranks."""
    config = TrainConfig(**flags)
    config.resolve_and_check(RANKS)
    return config.model_config, Layout.of(config)


def measure(mesh: Mesh, flags: dict) -> dict:
    """On a rank: what it sends in a step, what it holds, and the peak of the next step."""
    training = Training(mesh, **flags)
    result = sent_and_held(training)
    with MemoryMeter("cpu").measure([each for _, each in training.weights() + training.states()]) as meter:
        training.take()
    return result | {"peak": meter.peak_bytes}


def sent_and_held(training: Training) -> dict:
    """On a rank: what it sends in a step, and what it holds. From now on, experts are chosen in turn."""
    route_evenly(training.pipeline.stages)
    return {"counted": counted(training.gradients, training.mesh), "held": held(training)}


def mean_held(ranks: list[dict]) -> dict[str, float]:
    return {kind: statistics.mean(rank["held"][kind] for rank in ranks) for kind in KINDS}


def by_dimension(sent: Sent) -> dict[str, float]:
    """Bytes by the dimension that a group belongs to. The norm of the gradient (`world`) is 8 bytes, and left out."""
    result = dict.fromkeys(DIMENSIONS, 0.0)
    for (group, _), (_, size) in sent.items():
        if group != "world":
            result[DIMENSION_OF[group]] += size
    return result


def draw(sent: dict, peaks: dict[str, dict], bubbles: dict[str, float]) -> None:
    """Three panels: what a rank sends, by dimension, what the fullest rank holds, and the bubble."""
    figure, (left, right, last) = new_figure(1, 3, width=11.5, height=4.4, sharey=True, width_ratios=(1, 1, 0.4))
    traffic = {name: by_dimension(each.sent) for name, each in sent.items()}
    for axis, stacks in ((left, traffic), (right, peaks)):
        groups = {name: [{part: size / 1e6 for part, size in each.items()}] for name, each in stacks.items()}
        bars(axis, groups, colours=COLOURS_OF, value="{:.1f}", horizontal=True)
    idle = {name: [{"bubble": share}] for name, share in bubbles.items()}
    bars(last, idle, colours={"bubble": COLOURS["forward"]}, value="{:.0%}", horizontal=True)
    last.set(xticks=[])
    titles = "MB that a rank sends in a step", "MB on the fullest rank, at the peak", "bubble, share of a step"
    for axis, title in zip((left, right, last), titles):
        axis.axhline(list(bubbles).index("experts, dp 8") - 0.5, color="black", linewidth=0.8)  # another model
        axis.set_title(title, loc="left", fontsize=10)
    for axis, columns in ((left, 5), (right, 2)):  # colours of messages and memory are alike
        look = {"ncols": columns, "frameon": False, "fontsize": 9, "handlelength": 1.2, "columnspacing": 1.2}
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), **look)
    save_figure(figure, "cost")
