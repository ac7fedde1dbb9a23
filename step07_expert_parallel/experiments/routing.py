"""How the router divides tokens among experts while it learns: with no balancing, an auxiliary loss, and a bias."""

import numpy as np

from common.drawing.figures import SERIES, save_figure
from common.drawing.tables import print_table
from step07_expert_parallel.experiments.tools import BALANCES, MOE, STEPS, Training, trainings

LAST = 50  # steps at the end of a training, over which loads and losses are averaged
STARVING = 0.2  # of an equal share
COLOURS = dict(zip(BALANCES, (SERIES[5], SERIES[0], SERIES[2])))
TITLES = {"none": "--balance none", "aux": "--balance aux", "bias": "--balance bias"}


def routing(quick: bool) -> None:
    """The load of every expert over a training with each kind of balancing: the same model, seed and data."""
    steps = STEPS // 20 if quick else STEPS
    slow = {"bias, default rate": {"balance": "bias"}}
    cases = BALANCES if quick else BALANCES | slow
    found = dict(zip(cases, trainings([MOE | flags | {"steps": steps} for flags in cases.values()])))
    last = min(LAST, steps)
    rows = []
    for name, training in found.items():
        loads = multiples(training)  # (steps, layers, experts)
        late = loads[-last:].mean(0)
        cells = [f"{each:.2f}" for each in (training.mean("imbalance", last), late.max(1).mean(), late.min(1).mean())]
        starving = f"{(late < STARVING).sum()} of {late.size}"
        rows.append((name, *cells, starving, f"{training.mean('loss', last):.3f}"))
    header = ("", "busiest of a step", "busiest", "least busy", f"experts below {STARVING}", "loss")
    title = f"load / equal share in the last {last} of {steps} steps: of single steps, and of all of them together"
    print_table(title, header, rows)
    draw_load({name: found[name] for name in BALANCES}, last)


def multiples(training: Training) -> np.ndarray:
    """Loads as multiples of an equal share: (steps, layers, experts)."""
    loads = np.array(training.loads, float)
    return loads / loads.mean(-1, keepdims=True)


def draw_load(found: dict[str, Training], last: int, layer: int = -1) -> None:
    """Above, the load of each expert of one layer in every step; below, of the busiest, and of all at the end."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    most = MOE["experts"] / MOE["top_k"]  # if every token chooses the expert
    loads = {name: multiples(training)[:, layer] for name, training in found.items()}  # (steps, experts)
    steps, experts = next(iter(loads.values())).shape
    window = max(1, steps // 60)
    figure = Figure(figsize=(10.5, 5.6), dpi=120, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.1))
    maps = above.subplots(1, len(loads), sharey=True)
    for panel, (name, load) in zip(maps, loads.items()):
        order = load[-last:].mean(0).argsort()[::-1]  # the busiest on top
        colours = {"cmap": colormaps["magma_r"].resampled(14), "vmin": 0, "vmax": most, "interpolation": "nearest"}
        image = panel.imshow(smooth(load, window)[:, order].T, aspect="auto", **colours)
        panel.set_title(TITLES[name], loc="left", fontsize=11, fontweight="bold", color=COLOURS[name])
        panel.set(xlabel="step", yticks=range(experts), yticklabels=["busiest", *[""] * (experts - 2), "least busy"])
    above.colorbar(image, ax=maps, ticks=range(5), pad=0.01).set_label("load / equal share", fontsize=9)
    curves, bars = below.subplots(1, 2, width_ratios=(1.5, 1))
    for place, (name, load) in enumerate(loads.items()):
        curves.plot(smooth(load, window).max(1), color=COLOURS[name], label=TITLES[name], linewidth=1.8)
        final = np.sort(load[-last:].mean(0))[::-1]
        bars.bar(np.arange(experts) + 0.27 * (place - 1), final, width=0.25, color=COLOURS[name])
    for panel in (curves, bars):
        panel.axhline(1, color="black", linewidth=1, linestyle="--")
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
        panel.set_ylim(0, 1.12 * most)
        panel.spines[["top", "right"]].set_visible(False)
    curves.set(xlabel="step", xlim=(0, steps))
    curves.set_title("load of the busiest expert / equal share", loc="left", fontsize=10, fontweight="bold")
    curves.text(steps, 0.97, "equal share", ha="right", va="top", fontsize=9)
    curves.text(steps, 1.02 * most, "every token chooses it", ha="right", va="bottom", fontsize=9)
    curves.axhline(most, color="black", linewidth=1, linestyle=":")
    curves.legend(frameon=False, fontsize=9, loc="center right")
    bars.set(xlabel="experts, the busiest first", xticks=[])
    bars.set_title(f"each expert's mean, the last {last} steps", loc="left", fontsize=10, fontweight="bold")
    save_figure(figure, "load")


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean over `window` steps at a time, along the first axis; as many steps as before."""
    padded = np.concatenate([values[:1].repeat(window - 1, 0), values])
    return np.lib.stride_tricks.sliding_window_view(padded, window, axis=0).mean(-1)
