"""A small model trained in BF16 and in every recipe of FP8: curves, and which numbers become 0."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from common.drawing.charts import lines
from common.drawing.figures import SERIES, new_figure, save_figure
from common.drawing.tables import print_table
from common.experiments.local_ranks import on_ranks
from common.process_groups import Mesh
from step08_5d.experiments.tools import STEP, Training
from step08_5d.narrow_numbers.experts import products_of

SHAPE = STEP | {"layers": 2, "hidden": 128, "ffn": 256, "heads": 4, "kv_heads": 4, "seq_len": 128}
SHAPE |= {"micro_batch": 4, "global_batch": 4, "lr": 3e-3, "dtype": "bfloat16"}
BASELINE = "bfloat16"
RUNS = {BASELINE: {}}
RUNS |= {name: {"fp8": name} for name in ("naive", "tensor", "delayed", "row", "tile", "mx")}
RUNS["tile, moments in BF16"] = {"fp8": "tile", "moments": "bfloat16"}
RUNS |= {f"{name}, e5m2": {"fp8": name, "fp8_gradients": "e5m2"} for name in ("naive", "tile")}
STEPS, SHORT = 200, 20
DRAWN = (BASELINE, "naive", "naive, e5m2", "tensor", "tile", "mx")
SEEDS, REPEATED = (0, 1, 2), (BASELINE, "naive", "tensor", "tile", "mx")  # the others train once


def losses(mesh: Mesh, done: Callable, flags: dict, steps: int) -> list[float]:
    """The loss of every step."""
    training = Training(mesh, **SHAPE | {"steps": steps} | flags)
    return [training.take(step)["loss"] for step in range(steps)]


def divergence(quick: bool) -> None:
    """Curves of a small model in BF16 and in FP8 by what shares a scale: the naive one leaves, the others stay."""
    steps = SHORT if quick else STEPS
    runs = [(name, seed) for seed in SEEDS[: 1 if quick else None] for name in (REPEATED if seed else RUNS)]
    with ThreadPoolExecutor(2) as pool:  # of processes with one thread each
        found = pool.map(lambda run: on_ranks(1, losses, RUNS[run[0]] | {"seed": run[1]}, steps)[0], runs)
        curves = {run: torch.tensor(each) for run, each in zip(runs, found)}
    rows, off = [], {}  # by name: how far the curve is above BF16's, at every step, in the mean over the seeds
    for name in RUNS:
        pairs = [(curves[name, seed], curves[BASELINE, seed]) for seed in SEEDS if (name, seed) in curves]
        off[name] = torch.stack([curve / base - 1 for curve, base in pairs]).mean(0) * 100
        halves = [curve[steps // 2 :].mean() / base[steps // 2 :].mean() - 1 for curve, base in pairs]
        each = ", ".join(f"{half:+.2%}" for half in halves)
        rows.append((name, f"{pairs[0][0][-1]:.4f}", f"{torch.stack(halves).mean():+.2%}", each))
    seeds = [curves[BASELINE, seed][steps // 2 :].mean() for seed in SEEDS if (BASELINE, seed) in curves]
    header = ("", "last loss", "second half above BF16", "by seed")
    print_table(f"{steps} steps, {SHAPE['layers']} layers", header, rows)
    print(f"  (BF16 alone, from seed to seed: {max(seeds) / min(seeds) - 1:.2%})")
    figure, (whole, apart) = new_figure(1, 2, width=10, height=3.8)
    colours = dict(zip(DRAWN, ("#333333", *SERIES[1:])))
    lines(whole, {name: dict(enumerate(curves[name, 0].tolist())) for name in DRAWN}, colours=colours, ends=False)
    whole.set(xlabel="step", ylabel="loss")
    whole.legend(frameon=False, fontsize=9)
    width = max(1, steps // 20)
    for name in DRAWN[1:]:
        smooth = off[name].unfold(0, width, 1).mean(1)
        apart.plot(range(width - 1, steps), smooth.tolist(), linewidth=2, color=colours[name])
    apart.axhspan(-0.25, 0.25, color="#DDDDDD")
    apart.set_yscale("symlog", linthresh=0.25)
    apart.set(xlabel="step", ylabel=f"above BF16 in % (mean of {width} steps)")
    save_figure(figure, "divergence")


def zeros_of_a_step(mesh: Mesh, done: Callable, flags: dict) -> dict[str, tuple[float, float]]:
    """By operand of the linear layers, in one step: the share of numbers that become 0, and their median size."""
    counts = defaultdict(lambda: [0, 0, []])

    def watched(real, x, what, rows, columns):
        narrow = real(x, what, rows, columns)
        there = x != 0
        counts[what][0] += int((there & (narrow.numbers.float() == 0)).sum())
        counts[what][1] += int(there.sum())
        counts[what][2].append(float(x[there].abs().float().median()))
        return narrow

    training = Training(mesh, **SHAPE | {"steps": 4} | flags)
    for step in range(3):
        training.take(step)
    for stage in training.parts[0].stages:
        for products in [each for weight in stage.parameters() for each in products_of(weight)]:
            products._narrow = partial(watched, products._narrow)
    training.take(3)
    return {what: (lost / all_, sum(sizes) / len(sizes)) for what, (lost, all_, sizes) in counts.items()}


def underflow(quick: bool) -> None:
    """Which share of the numbers of a step become 0, by recipe and operand."""
    names, operands = (
        [name for name in RUNS if "fp8" in RUNS[name] and "moments" not in name],
        ("x", "weight", "gradient"),
    )
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: on_ranks(1, zeros_of_a_step, RUNS[name])[0], names))
    rows = [(name, *(f"{each[what][0]:.2%}" for what in operands)) for name, each in zip(names, found)]
    print_table("Numbers of the fourth step that become 0", ("", *operands), rows)
    sizes = found[names.index("tensor")]
    print("  (median sizes: " + ", ".join(f"{what} {sizes[what][1]:.2g}" for what in operands) + ")")
