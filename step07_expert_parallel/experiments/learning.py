"""Do experts learn more from the same computation? A dense model and models with experts at equal active FLOPs."""

import numpy as np

from common.config import TrainConfig
from common.counts import count_flops, count_parameters
from common.drawing.figures import SERIES, new_figure, save_figure
from common.drawing.tables import print_table
from step07_expert_parallel.experiments.routing import LAST, smooth
from step07_expert_parallel.experiments.tools import BALANCES, DENSE, MOE, STEPS, Training, trainings

SEEDS = 3
MODELS = {
    "dense": DENSE,
    "dense, 1.5 times the FLOPs": DENSE | {"ffn": 4 * DENSE["ffn"]},
    "8 experts, no balancing": MOE | BALANCES["none"],
    "8 experts, aux": MOE | BALANCES["aux"],
    "8 experts, bias": MOE | BALANCES["bias"],
    "16 experts, aux": MOE | BALANCES["aux"] | {"experts": 16},
}
CURVES = ("dense", "8 experts, no balancing", "8 experts, aux", "16 experts, aux")  # of which the picture has a curve
COLOURS = {"dense": "#333333", "dense, 1.5 times the FLOPs": "#8C8C8C", "8 experts, no balancing": SERIES[5]}
COLOURS |= {"8 experts, aux": SERIES[0], "8 experts, bias": SERIES[2], "16 experts, aux": SERIES[3]}


def learning(quick: bool) -> None:
    """The loss of dense models and of models with experts, on the same tokens; several seeds."""
    steps, seeds = (STEPS // 20, 1) if quick else (STEPS, SEEDS)
    keys = [(name, seed) for name in MODELS for seed in range(seeds)]
    flat = dict(zip(keys, trainings([MODELS[name] | {"steps": steps, "seed": seed} for name, seed in keys])))
    found = {name: [flat[name, seed] for seed in range(seeds)] for name in MODELS}
    last, rows = min(LAST, steps), []
    losses = {name: np.array([each.mean("loss", last) for each in runs]) for name, runs in found.items()}
    for name, flags in MODELS.items():
        shape, gaps = TrainConfig(**flags).model_config, losses[name] - losses["dense"]
        parameters, flops = count_parameters(shape), count_flops(shape, flags["seq_len"]).forward / flags["seq_len"]
        cells = (f"{parameters.total:,}", f"{parameters.active:,}", f"{flops / 1e3:.1f}", f"{losses[name].mean():.3f}")
        cells += ("/".join(f"{gap:+.3f}" for gap in gaps), f"{gaps.mean():+.3f}")
        rows.append((name, *cells))
    header = ("", "parameters", "active", "kFLOP per token", "loss", "minus dense, by seed", "mean")
    print_table(f"loss in the last {last} of {steps} steps, which see new tokens only", header, rows)
    draw_learning(found, losses, last)


def draw_learning(found: dict[str, list[Training]], losses: dict[str, np.ndarray], last: int) -> None:
    """Left the smoothed curves, the mean over the seeds; right by how much each model ends below the dense one."""
    figure, (curves, gaps) = new_figure(1, 2, width=10.5, height=3.9, width_ratios=(1.25, 1))
    for name in CURVES:
        values = smooth(np.mean([[line["loss"] for line in run.record] for run in found[name]], axis=0), last)
        steps = np.arange(last, len(values) + 1)
        curves.plot(steps, values[last - 1 :], color=COLOURS[name], label=name, linewidth=1.8)
    final = losses["dense"].mean()
    curves.set(xlabel="step", ylabel="loss", ylim=(min(each.mean() for each in losses.values()) - 0.03, final + 0.6))
    curves.set_xlim(len(values) / 4, len(values))
    curves.set_title(f"loss, mean of {last} steps and of all seeds", loc="left", fontsize=10, fontweight="bold")
    curves.legend(frameon=False, fontsize=9)
    others = list(MODELS)[1:]
    for line, name in enumerate(others):
        below = losses["dense"] - losses[name]
        gaps.barh(line, below.mean(), height=0.6, color=COLOURS[name])
        places = line + np.linspace(-0.15, 0.15, len(below))  # side by side, where two seeds agree
        gaps.plot(below, places, "o", color="black", markeredgecolor="white", markersize=6)
    gaps.axvline(0, color="black", linewidth=1)
    gaps.set_yticks(range(len(others)), others, fontsize=9)
    gaps.invert_yaxis()
    gaps.set(xlabel="dots: single seeds")
    gaps.set_title("loss below the dense model's, at the end", loc="left", fontsize=10, fontweight="bold")
    gaps.grid(visible=False, axis="y")
    for axis in (curves, gaps):
        axis.spines[["top", "right"]].set_visible(False)
    save_figure(figure, "learning")
