"""Where a difference comes from: the layout, the type, or the kernels. Curves of one process and of 8 ranks."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from common import compare
from common.drawing.charts import lines
from common.drawing.figures import SERIES, save_figure
from common.drawing.lanes import open_axis
from common.drawing.tables import print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import run_jobs
from common.process_groups import Mesh
from step08_5d import train as step08
from step08_5d.experiments.tools import FIVE_D, FOUR_D, STEP, Training

STEPS, SHORT = 40, 10  # in float64 fewer do: its only difference is rounding, from the first step on
WHOLE = {"fused": False}  # on one process, this is the run of step 1
HALF = {"dtype": "bfloat16"}
EXACT = {"dtype": "float64", "experts": 8, "expert_ffn": 128, "shared_experts": 1, "balance": "bias"}
ONE, ONE_HALF, ONE_EXACT = "float32, 1 process", "bfloat16, 1 process", "float64, experts, 1 process"
# name: (ranks, flags, what it is compared with, what the difference shows)
RUNS = {
    ONE_EXACT: (1, EXACT | WHOLE, None, ""),
    "float64, experts, 8 ranks, --no-fused": (8, EXACT | FIVE_D | WHOLE, ONE_EXACT, "layout"),
    "float64, experts, 8 ranks, --fused": (8, EXACT | FIVE_D, ONE_EXACT, "layout"),
    ONE: (1, WHOLE, None, ""),
    "float32, 8 ranks, --no-fused": (8, FOUR_D | WHOLE, ONE, "layout"),
    "float32, 8 ranks, --fused": (8, FOUR_D, ONE, "layout"),
    ONE_HALF: (1, HALF | WHOLE, ONE, "type"),
    "bfloat16, 1 process, micro-batches of 1": (1, HALF | WHOLE | {"micro_batch": 1}, ONE_HALF, "order of sums"),
    "bfloat16, 8 ranks, --no-fused": (8, HALF | FOUR_D | WHOLE, ONE_HALF, "layout"),
    "bfloat16, 8 ranks, --fused": (8, HALF | FOUR_D, ONE_HALF, "layout"),
}
CURVES = {ONE: "#CFCFCF", "float32, 8 ranks, --fused": SERIES[0], "bfloat16, 8 ranks, --fused": SERIES[1]}
COLOURS = {"layout": SERIES[0], "type": SERIES[1], "order of sums": SERIES[2]}
MARKERS = {"loss": {"marker": "o"}, "grad_norm": {"marker": "D", "markerfacecolor": "none"}}
TOLERANCES = {"tolerance in float64": 1e-10, "tolerance in float32": 1e-5, "one rounding\nto bfloat16": 2.0**-9}


def precision(quick: bool) -> None:
    """The same run on one process and on 8 ranks, in float64, float32 and bfloat16: what differs, and why."""
    steps = SHORT if quick else STEPS
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 8):
            mine = {name: flags for name, (size, flags, *_) in RUNS.items() if size == ranks}
            jobs = [(n, STEP | flags | {"steps": SHORT if "experts" in flags else steps}) for n, flags in mine.items()]
            on_ranks(ranks, run_jobs, jobs, folder, step08.train, title="precision", jobs=len(jobs))
        runs = {name: compare.read_run(Path(folder, name)) for name in RUNS}
    rows, found = [], {}
    for name, (_, _, reference, shows) in RUNS.items():
        cells = ("reference", "", "", "", "")
        if reference:
            found[name] = compare.compare([runs[reference], runs[name]])[1].worst
            (loss, at), (norm, _) = found[name].values()
            cells = (reference, shows, f"{loss:.1e}", at, f"{norm:.1e}")
        last = max(runs[name].records)
        rows.append((name, *cells, f"{runs[name].value(last, 'loss'):.5f}"))
    header = ("", "against", "what differs", "loss", "at step", "gradient norm", "last loss")
    print_table(f"largest relative difference in {steps} steps ({SHORT} with experts)", header, rows)
    if not quick:
        draw_curves(runs, found)


def draw_curves(runs: dict[str, compare.Record], found: dict[str, dict]) -> None:
    """Above the curves; below a line per run with its largest difference from its reference, from exact to narrow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.4), dpi=120, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.2))
    for axis, key in zip(above.subplots(1, 2), compare.KEYS):
        series = {name: {step: runs[name].value(step, key) for step in runs[name].records} for name in CURVES}
        lines(axis, series, dashed=tuple(CURVES)[-1:], colours=CURVES, ends=False)
        axis.lines[0].set_linewidth(7)
        axis.set_title(key.replace("_", " "), loc="left", fontsize=10, fontweight="bold")
        axis.set_xlabel("step")
    axis.legend(frameon=False, fontsize=9)
    axis = below.subplots()
    for line, (name, worst) in enumerate(found.items()):
        for key, look in MARKERS.items():
            axis.plot(worst[key][0], line, color=COLOURS[RUNS[name][3]], linestyle="none", markersize=8, **look)
    for (label, place), side in zip(TOLERANCES.items(), ("right", "right", "left")):  # the last two are close
        axis.axvline(place, color="black", linestyle="--", linewidth=1.2)
        away = 1.4 if side == "left" else 1 / 1.4
        axis.text(place * away, -0.75, label, fontsize=9, va="center", ha=side)
    axis.set(xscale="log", xlim=(1e-17, 1), ylim=(len(found) - 0.4, -1.2), xlabel="largest relative difference")
    axis.set_yticks(range(len(found)), [f"{name}\nagainst {RUNS[name][2]}" for name in found], fontsize=8.5)
    handles = [axis.plot([], [], "s", color=colour, label=f"{name} differs")[0] for name, colour in COLOURS.items()]
    look = {"color": "black", "linestyle": "none"}
    handles += [axis.plot([], [], **look, **each, label=key.replace("_", " "))[0] for key, each in MARKERS.items()]
    axis.legend(handles=handles, frameon=False, fontsize=9, loc="lower left")
    axis.grid(alpha=0.3)
    open_axis(axis)
    save_figure(figure, "curves")


# ---- master weights --------------------------------------------------------------------------------------------------


def masters(quick: bool) -> None:
    """bfloat16 with and without master weights: an update below half a digit of the weight is lost, every time."""
    steps, rows = SHORT if quick else STEPS, []
    for lr in (1e-3, 1e-4, 1e-5):
        (first, last), (_, without) = on_ranks(1, train_both, steps, lr, title="masters", jobs=2)[0]
        lost = 1 - (first - without) / (first - last)
        rows.append((f"{lr:g}", f"{first:.4f}", f"{last:.4f}", f"{without:.4f}", f"{lost:.1%}"))
    header = ("learning rate", "first loss", "last, float32 masters", "last, none", "progress lost")
    print_table(f"one process, bfloat16, {steps} steps, moments in float32", header, rows)


def train_both(mesh: Mesh, done: Callable, steps: int, lr: float) -> list[tuple[float, float]]:
    """On the only rank: the first and the last loss with master weights, and with masters that are rounded as well."""
    losses = []
    for rounded in (False, True):
        training = Training(mesh, **STEP | HALF | WHOLE | {"steps": steps, "lr": lr})
        optimizer, found = training.optimizer, []
        for step in range(steps):
            found.append(training.take(step)["loss"])
            if rounded:  # the weights are bfloat16 and nothing else; the moments stay float32
                torch._foreach_copy_(optimizer.masters, optimizer.parameters)
        losses.append((found[0], found[-1]))
        done()
    return losses
