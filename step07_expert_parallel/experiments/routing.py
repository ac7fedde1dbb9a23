"""What balancing does to the loads of experts, and whether experts learn more from the same computation."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from common.config import TrainConfig
from common.counts import count_flops, count_parameters
from common.drawing.charts import bars, lines
from common.drawing.figures import SERIES, new_figure, save_figure
from common.drawing.tables import print_table
from common.experiments import training_step
from common.experiments.local_ranks import on_ranks
from common.group import Group
from common.process_groups import Mesh
from step01_single_gpu.mixed_precision import LossScaler
from step07_expert_parallel import train
from step07_expert_parallel.balancing import Balancing
from step07_expert_parallel.capacity import SequenceParts
from step07_expert_parallel.router import Router, Routing

# Its MLPs are so narrow that a few hundred steps show whether more parameters help
SMALL = {"step_name": "step07_expert_parallel", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "seq_len": 64}
SMALL |= {"lr": 1e-2, "global_batch": 16, "micro_batch": 16}
STEPS, LAST, SEEDS = 600, 50, 3  # LAST: steps at the end of a training, over which loads and losses are averaged
DENSE = SMALL | {"ffn": 32}
MOE = SMALL | {"experts": 8, "top_k": 2, "expert_ffn": 16}  # two experts are as wide as the dense MLP
# The default rate suits runs of many thousand steps; this one crosses the range of scores within a hundred
BALANCES = {"none": {"balance": "none"}, "aux": {"balance": "aux"}, "bias": {"balance": "bias", "bias_rate": 0.01}}
COLOURS = {"--balance none": SERIES[5], "--balance aux": SERIES[0], "--balance bias": SERIES[2]}


class Trained(NamedTuple):
    """What is known of a training, step by step."""

    numbers: list[dict]  # loss, imbalance and so on
    loads: list[list[list[int]]]  # [step][layer][expert]: how many tokens have chosen the expert

    def mean(self, key: str, steps: int) -> float:
        """The mean of a number over the last steps."""
        return sum(step[key] for step in self.numbers[-steps:]) / steps

    def losses(self) -> list[float]:
        return [step["loss"] for step in self.numbers]


class Watched:
    """Keeps the loads that balancing finds at the end of every step."""

    def __init__(self, balancing: Balancing):
        self.balancing, self.buffers, self.loads = balancing, balancing.buffers, []

    def finish(self, skip: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.loads.append([router.load.tolist() for _, router in self.balancing.routers])
        return self.balancing.finish(skip)


def trainings(cases: list[dict]) -> list[Trained]:
    """Train with each of these flags, each in a process of its own, two of them at a time."""
    with ThreadPoolExecutor(2) as pool:
        return [ranks[0] for ranks in pool.map(lambda flags: on_ranks(1, watch, flags), cases)]


def watch(mesh: Mesh, done: Callable, flags: dict) -> Trained:
    """On the only rank: a training, with the loads of every step."""
    training = training_step.Training(train, *training_step.checked(mesh, **flags))
    pipeline, optimizer, (balancing,) = training.parts
    watched = Watched(balancing)
    training.parts = pipeline, optimizer, [watched]
    return Trained([training.take(step) for step in range(training.config.steps)], watched.loads)


# ---- balancing -------------------------------------------------------------------------------------------------------


# Probabilities of four experts: the first two tokens are those of Switch's figure, 0.65 and 0.8 for their best expert
PROBABILITIES = {"a": (0.05, 0.65, 0.2, 0.1), "b": (0.8, 0.1, 0.06, 0.04), "c": (0.1, 0.3, 0.35, 0.25)}


def routed(top_k: int, normalize: bool) -> list[tuple[list[int], list[float]]]:
    """What our router makes of `PROBABILITIES`: the experts of each token, and their gates."""
    alone, scaler = Group("alone", (0,), 0), LossScaler(torch.float64)
    how, parts = Routing(experts=4, top_k=top_k, normalize=normalize), SequenceParts(cp=alone, tp=alone)
    router = Router(len(PROBABILITIES), how, parts, 1, scaler, torch.float64)
    logits = torch.tensor([list(each) for each in PROBABILITIES.values()], dtype=torch.float64).log()
    router.weight = torch.nn.Parameter(logits.T)  # token i is row i of the identity
    chosen, gates = router(torch.eye(len(PROBABILITIES), dtype=torch.float64)[None])
    return list(zip(chosen.tolist(), gates.tolist()))


def gates(quick: bool) -> None:
    """From a router's probabilities to gates: the tokens of Switch's figure with one expert each, and with two."""
    ways = {"k 1": (1, False), "k 2": (2, True), "k 2, gates not normalized": (2, False)}
    found, rows = {name: routed(*way) for name, way in ways.items()}, []
    for index, (token, probabilities) in enumerate(PROBABILITIES.items()):
        cells = []
        for of_tokens in found.values():
            pairs = zip(*of_tokens[index])
            cells.append(" + ".join(f"{gate:.3g} E{expert}" for expert, gate in pairs))
        rows.append((token, " ".join(f"{each:g}" for each in probabilities), *cells))
    print_table("y of a token; Ei stands for the output of expert i", ("", "probabilities", *found), rows)


def routing(quick: bool) -> None:
    """The load of every expert over a training with each kind of balancing: the same model, seed and data."""
    steps = STEPS // 20 if quick else STEPS
    cases = BALANCES if quick else BALANCES | {"bias, default rate": {"balance": "bias"}}
    found = dict(zip(cases, trainings([MOE | flags | {"steps": steps} for flags in cases.values()])))
    rows, last = [], min(LAST, steps)
    for name, training in found.items():
        late = multiples(training)[-last:].mean(0)  # (layers, experts)
        cells = [f"{each:.2f}" for each in (training.mean("imbalance", last), late.max(1).mean(), late.min(1).mean())]
        rows.append((name, *cells, f"{(late < 0.2).sum()} of {late.size}", f"{training.mean('loss', last):.3f}"))
    header = ("", "busiest of a step", "busiest", "least busy", "experts below 0.2", "loss")
    title = f"load / equal share in the last {last} of {steps} steps: of single steps, and of all of them together"
    print_table(title, header, rows)
    draw_load({f"--balance {name}": multiples(found[name])[:, -1] for name in BALANCES}, last)


def multiples(training: Trained) -> np.ndarray:
    """Loads as multiples of an equal share: (steps, layers, experts)."""
    loads = np.array(training.loads, float)
    return loads / loads.mean(-1, keepdims=True)


def draw_load(loads: dict[str, np.ndarray], last: int) -> None:
    """Above, the load (steps, experts) of each expert in every step; below, of the busiest, and of all at the end."""
    from matplotlib.figure import Figure

    window, most = max(1, len(loads["--balance none"]) // 60), MOE["experts"] / MOE["top_k"]
    figure = Figure(figsize=(10.5, 5.6), dpi=120, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.1))
    maps = above.subplots(1, len(loads), sharey=True)
    for panel, (name, load) in zip(maps, loads.items()):
        order = load[-last:].mean(0).argsort()[::-1]  # the busiest on top
        look = {"cmap": "magma_r", "vmin": 0, "vmax": most, "interpolation": "nearest"}
        image = panel.imshow(smooth(load, window)[:, order].T, aspect="auto", **look)
        panel.set_title(name, loc="left", fontsize=11, fontweight="bold", color=COLOURS[name])
        panel.set(xlabel="step", yticks=[0, len(order) - 1], yticklabels=["busiest", "least busy"])
    above.colorbar(image, ax=maps, pad=0.01).set_label("load / equal share", fontsize=9)
    curves, ends = below.subplots(1, 2, width_ratios=(1.5, 1))
    busiest = {name: dict(enumerate(smooth(load, window).max(1))) for name, load in loads.items()}
    lines(curves, busiest, colours=COLOURS, ends=False)
    final = {name: np.sort(load[-last:].mean(0))[::-1] for name, load in loads.items()}
    experts = {str(place): [{name: each[place]} for name, each in final.items()] for place in range(MOE["experts"])}
    bars(ends, experts, colours=COLOURS)
    for panel in (curves, ends):
        panel.axhline(1, color="black", linewidth=1, linestyle="--")
        panel.set_ylim(0, 1.12 * most)
    curves.set_title("load of the busiest expert / equal share", loc="left", fontsize=10, fontweight="bold")
    curves.axhline(most, color="black", linewidth=1, linestyle=":")
    curves.text(len(load) - 1, 1.02 * most, "every token chooses it", ha="right", va="bottom", fontsize=9)
    curves.text(len(load) - 1, 0.95, "equal share", ha="right", va="top", fontsize=9)
    curves.legend(frameon=False, fontsize=9)
    curves.set(xlabel="step", xlim=(0, len(load) - 1))
    ends.set_title(f"each expert's mean, the last {last} steps", loc="left", fontsize=10, fontweight="bold")
    ends.set(xlabel="experts, the busiest first", xticks=[])
    save_figure(figure, "load")


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean over `window` steps at a time, along the first axis; as many steps as before."""
    padded = np.concatenate([values[:1].repeat(window - 1, 0), values])
    return np.lib.stride_tricks.sliding_window_view(padded, window, axis=0).mean(-1)


# ---- learning --------------------------------------------------------------------------------------------------------

MODELS = {  # colour, flags
    "dense": ("#333333", DENSE),
    "dense, 1.5 times the FLOPs": ("#8C8C8C", DENSE | {"ffn": 4 * DENSE["ffn"]}),
    "8 experts, no balancing": (SERIES[5], MOE | BALANCES["none"]),
    "8 experts, aux": (SERIES[0], MOE | BALANCES["aux"]),
    "8 experts, bias": (SERIES[2], MOE | BALANCES["bias"]),
    "16 experts, aux": (SERIES[3], MOE | BALANCES["aux"] | {"experts": 16}),
}
CURVES = ("dense", "8 experts, no balancing", "8 experts, aux", "16 experts, aux")  # of which the picture has a line


def learning(quick: bool) -> None:
    """Do experts learn more from the same computation? Dense models and models with experts, on the same tokens."""
    steps, seeds = (STEPS // 20, 1) if quick else (STEPS, SEEDS)
    keys = [(name, seed) for name in MODELS for seed in range(seeds)]
    found = dict(zip(keys, trainings([MODELS[name][1] | {"steps": steps, "seed": seed} for name, seed in keys])))
    rows, last = [], min(LAST, steps)
    losses = {name: np.array([found[name, seed].mean("loss", last) for seed in range(seeds)]) for name in MODELS}
    for name, (_, flags) in MODELS.items():
        shape, gaps = TrainConfig(**flags).model_config, losses[name] - losses["dense"]
        parameters, flops = count_parameters(shape), count_flops(shape, flags["seq_len"]).forward / flags["seq_len"]
        cells = (f"{parameters.total:,}", f"{parameters.active:,}", f"{flops / 1e3:.1f}", f"{losses[name].mean():.3f}")
        rows.append((name, *cells, "/".join(f"{gap:+.3f}" for gap in gaps), f"{gaps.mean():+.3f}"))
    header = ("", "parameters", "active", "kFLOP per token", "loss", "minus dense, by seed", "mean")
    print_table(f"loss in the last {last} of {steps} steps, which see new tokens only", header, rows)

    curves = {name: np.array([found[name, seed].losses() for seed in range(seeds)]).mean(0) for name in CURVES}
    draw_learning(curves, losses, last)


def draw_learning(curves: dict[str, np.ndarray], losses: dict[str, np.ndarray], last: int) -> None:
    """Left the smoothed loss, the mean of all seeds; right by how much each model ends below the dense one."""
    figure, (falling, ends) = new_figure(1, 2, width=10.5, height=3.9, width_ratios=(1.25, 1))
    colours = {name: colour for name, (colour, _) in MODELS.items()}
    begin = len(curves["dense"]) // 4  # before, losses fall so steeply that the lines could not be told apart
    series = {name: dict(list(enumerate(smooth(each, last), 1))[begin:]) for name, each in curves.items()}
    lines(falling, series, colours=colours, ends=False)
    falling.set(xlabel="step", xlim=(begin, len(curves["dense"])))
    falling.set_title(f"loss from step {begin} on, mean of {last} steps", loc="left", fontsize=10, fontweight="bold")
    falling.legend(frameon=False, fontsize=9)
    below = {name: losses["dense"] - each for name, each in losses.items() if name != "dense"}
    bars(ends, {name: [{name: each.mean()}] for name, each in below.items()}, colours=colours, horizontal=True)
    for place, each in enumerate(below.values()):
        heights = place + np.linspace(-0.15, 0.15, len(each))  # apart, where two seeds agree
        ends.plot(each, heights, "o", color="black", markeredgecolor="white", markersize=6)
    ends.set_xlabel("dots: single seeds")
    ends.set_title("loss below the dense model's, at the end", loc="left", fontsize=10, fontweight="bold")
    save_figure(figure, "learning")
