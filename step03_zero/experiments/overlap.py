"""How much communication hides behind computation: measured over a simulated link, and predicted for real hardware."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from common.config import TrainConfig
from common.costs.alpha_beta import Player, fill_buckets
from common.costs.hardware import BUS_GB_PER_S, H100_TFLOPS, NODE, NVLINK
from common.counts import count_parameters
from common.drawing.figures import COLOURS, figure_path, new_figure, save_figure
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import BUCKET_MB, MODEL, run_jobs, tensor_sizes
from common.experiments.traces import computation, quietest
from common.model import Decoder
from common.presets import PRESETS
from common.process_groups import Mesh
from common.tracing.chrome_trace import Trace, read_trace
from common.tracing.timelines import draw_timelines
from step02_data_parallel.cost import tokens_to_hide
from step03_zero.experiments import predictions
from step03_zero.experiments.tools import prefetching, regions_of
from step03_zero.train import train
from step03_zero.zero import Zero

LINK = "2000,0.2"  # as in step 2: 2 ms a message, 0.2 GB/s
VARIANTS = {  # name: flags, title in the figure, if it is drawn
    "0": ({"zero": 0}, ""),
    "1": ({"zero": 1}, "stage 1: gathers before the forward needs them"),
    "1, weights at once": ({"zero": 1}, ""),  # as if the optimizer step ended with the gather
    "2": ({"zero": 2}, ""),
    "3": ({"zero": 3}, "stage 3: a unit is gathered while its neighbor computes"),
    "3, no prefetch": ({"zero": 3}, "stage 3 without prefetch: a unit waits for its own gather"),
}


def overlap(quick: bool) -> None:
    """Stages 1, 2 and 3 over a slow link: exposed communication, with and without prefetch, and their timelines."""
    traces = traced_runs(quick)
    rows = {name: quietest(trace) for name, trace in traces.items()}
    times = {name: (computation(trace, "forward"), computation(trace, "backward")) for name, trace in traces.items()}
    players = {name: play(name, times[name]) for name in traces}
    shown = "; ".join(f"{name}: {1e3 * each[0]:.0f} + {1e3 * each[1]:.0f}" for name, each in times.items())
    print(f"\n2 ranks, --link {LINK}. The predictions start from the forwards and backwards measured, ms:\n  {shown}")
    communication = [(name, 1e3 * players[name].communication, 1e3 * rows[name].communication_s) for name in traces]
    print_comparison("communication, ms a step", "stage", communication, ".1f")
    exposed = [(name, 1e3 * players[name].blocked, 1e3 * rows[name].exposed_s) for name in traces]
    print_comparison("exposed communication, ms a step", "stage", exposed, ".1f")
    values = []
    for name in traces:
        predicted = rows[name].step_time_s - rows[name].exposed_s + players[name].blocked
        values.append((name, 1e3 * predicted, 1e3 * rows[name].step_time_s))
    print_comparison("step time, ms: its own computation and the predicted exposed communication", "stage", values)
    shares = [(name, f"{row.overlap_share:.0%}") for name, row in rows.items()]
    print_table("overlap share", ("stage", "measured"), shares)

    panels = [
        (f"{VARIANTS[name][1]}; blocked for {1e3 * rows[name].exposed_s:.0f} ms", by_operation(trace))
        for name, trace in traces.items()
        if VARIANTS[name][1]
    ]
    print(f"  figure: {draw_timelines(panels, figure_path('timelines'), step=0)}")


def play(name: str, times: tuple[float, float]) -> Player:
    """Play a step of a variant on two ranks over `LINK`. `times`: seconds of its forward and of its backward."""
    (sizes, costs), player = tensor_sizes(), Player(2, TrainConfig(link=LINK).link_model)
    regions, buckets = regions_of(Decoder(TrainConfig(**MODEL).model_config)), fill_buckets(sizes, BUCKET_MB * 1e6)
    if name == "0":
        predictions.play_all_reduces(player, buckets, sizes, costs, times)
    elif name[0] in "12":
        regions = [sum(regions, [])] if "at once" in name else regions
        predictions.play_buckets(player, buckets, regions, sizes, costs, times)
    else:
        units = [[sum(values[index] for index in region) for region in regions] for values in (sizes, costs)]
        predictions.play_units(player, *units, times, prefetch=name == "3")
    for size in (4, 8):  # bytes of the gradient norm and of the loss, which nothing can hide
        player.wait(player.all_reduce(size))
    return player


def traced_runs(quick: bool) -> dict[str, Trace]:
    """One short traced run on two ranks over the slow link for each variant."""
    steps = 5 if quick else 10
    shape = MODEL | {"seq_len": 256, "micro_batch": 2, "global_batch": 4, "steps": steps, "trace": f"1:{steps - 1}"}
    jobs = [(name, shape | {"link": LINK, "bucket_mb": BUCKET_MB} | flags) for name, (flags, _) in VARIANTS.items()]
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(2, run_variants, jobs, folder, title="overlap", jobs=len(jobs))
        return {name: read_trace(Path(folder, name)) for name, _ in jobs}


def run_variants(mesh: Mesh, done: Callable, jobs: list[tuple[str, dict]], folder: str) -> None:
    """On a rank: run one training after another, each into folder/name."""
    for name, flags in jobs:
        gather = gather_at_once if "at once" in name else Zero.gather
        with prefetching("no prefetch" not in name), mock.patch.object(Zero, "gather", gather):
            run_jobs(mesh, done, [(name, flags)], folder, train)


def gather_at_once(zero: Zero) -> None:
    """In place of `Zero.gather`: the forward begins when all weights have arrived."""
    for work in [unit.fetch() for unit in reversed(zero.units)]:
        work.wait()


def by_operation(trace: Trace) -> Trace:
    """Return the shortest step of rank 0 alone, as step 0, with a lane per kind of collective instead of per group."""
    names = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
    spans, step = [], quietest(trace).step
    for span in trace.spans[0]:
        arguments = span["args"] | {"step": 0}
        if span["args"]["step"] != step:
            continue
        if span["cat"] == "communication":
            arguments["group"] = names.get(arguments["op"], "scalars")
        spans.append(span | {"args": arguments})
    return Trace({0: spans}, [0], trace.degrees)


def condition(quick: bool) -> None:
    """PREDICTED: how many tokens per GPU hide stage 3's gathers, at the bandwidths that the playbook published."""
    peak, rows, lines = H100_TFLOPS * 1e12, [], {}
    for gpus, gather in BUS_GB_PER_S["all_gather"].items():
        scatter, reduce = (1e9 * BUS_GB_PER_S[op][gpus] for op in ("reduce_scatter", "all_reduce"))
        both = (gpus, gather * 1e9, scatter, peak)
        values = {
            "step 2: 2": tokens_to_hide(gpus, reduce, peak, 2),
            "step 2: 4": tokens_to_hide(gpus, reduce, peak, 4),
            "forward: 2": predictions.tokens_to_hide_gather(gpus, gather * 1e9, peak),
            "backward: 2 + 2": predictions.tokens_to_hide_backward(*both, (2, 2)),
            "backward: 2 + 4": predictions.tokens_to_hide_backward(*both),
        }
        for name, value in values.items():
            lines.setdefault(name, []).append(value)
        rows.append((gpus, f"{gather:g}", f"{scatter / 1e9:g}", *(f"{value:,.0f}" for value in values.values())))
    header = ("GPUs", "all-gather GB/s", "reduce-scatter", *lines)
    title = "tokens per GPU and micro-batch that hide communication of so many bytes per parameter; 989 TFLOP/s"
    print_table(title, header, rows)
    print("  The bandwidths are published (playbook, pp_comm_bandwidth). Step 2: one all-reduce of gradients in the")
    print("  backward. Stage 3: an all-gather in the forward; in the backward another one and a reduce-scatter.")
    nominal = tokens_to_hide(NODE, NVLINK, peak, 4), predictions.tokens_to_hide_gather(NODE, NVLINK, peak)
    nominal += (predictions.tokens_to_hide_backward(NODE, NVLINK, NVLINK, peak),)
    shown = "step 2: 4 {:,.0f}, forward: 2 {:,.0f}, backward: 2 + 4 {:,.0f}".format(*nominal)
    print(f"  {NODE} GPUs at NVLink's nominal {NVLINK / 1e9:g} GB/s: {shown}")

    figure, axes = new_figure(width=7.5, height=4)
    gpus = list(BUS_GB_PER_S["all_gather"])
    labels = {
        "backward: 2 + 4": ("stage 3, backward: all-gather of 2, reduce-scatter of 4 bytes", COLOURS["backward"], "-"),
        "forward: 2": ("stage 3, forward (and backward with 2 + 2 bytes)", COLOURS["forward"], "-"),
        "step 2: 4": ("step 2: all-reduce of 4 bytes", COLOURS["all_reduce"], "-"),
        "step 2: 2": ("step 2: all-reduce of 2 bytes", COLOURS["all_reduce"], "--"),
    }
    for name, (label, colour, style) in labels.items():
        axes.plot(gpus, lines[name], style, color=colour, marker="o", markersize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens per GPU and micro-batch")
    axes.set_xticks(gpus, gpus)
    axes.minorticks_off()
    axes.set_yticks([2e3, 5e3, 1e4, 2e4, 5e4, 1e5], ["2k", "5k", "10k", "20k", "50k", "100k"])
    axes.set_title("predicted for H100s at their peak, from published bandwidths", fontsize=11.5, loc="left")
    axes.legend(frameon=False, fontsize=11)
    save_figure(figure, "condition")


def formulas(quick: bool) -> None:
    """PREDICTED: the playbook's conditions for ZeRO-2 and 3, as printed and as they should be."""
    peak, parameters, tokens, rows = H100_TFLOPS * 1e12, count_parameters(PRESETS["llama3-8b"]).total, 4096, []
    for gpus, gather in BUS_GB_PER_S["all_gather"].items():
        scatter = BUS_GB_PER_S["reduce_scatter"][gpus] * 1e9
        printed = (
            predictions.appendix_a3(gpus, gather * 1e9, peak, tokens),
            predictions.cheatsheet_zero3(gpus, gather * 1e9, peak, tokens),
            predictions.cheatsheet_zero2(gpus, scatter, peak, tokens, parameters),
        )
        ours = (
            predictions.tokens_to_hide_gather(gpus, gather * 1e9, peak) / tokens,
            predictions.tokens_to_hide_scatter(gpus, scatter, peak) / tokens,
        )
        cells = (*(f"{each:.3g}" for each in (*printed[:2], ours[0], printed[2], ours[1])),)
        rows.append((gpus, *cells))
    header = ("GPUs", "A3, ZeRO-3", "cheatsheet, ZeRO-3", "ours: gather, 2 bytes")
    header += ("cheatsheet, ZeRO-2", "ours: reduce-scatter, 4 bytes")
    title = f"communication / computation that hides it, {tokens:,} tokens per GPU; it hides up to 1"
    print_table(title, header, rows)
