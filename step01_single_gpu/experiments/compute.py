"""Experiments on computation: what recomputation costs and leaves alone, FLOPs, utilisation, a step's profile."""

import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from common.config import TrainConfig
from common.counts import count_flops, count_parameters
from common.experiments.figures import figure_path, new_figure, save_figure
from common.experiments.tables import compared, print_table
from common.experiments.timelines import draw_timelines
from common.presets import PRESETS
from common.tracing.report import print_report, read_trace
from step01_single_gpu.experiments.tools import MODES, Run, train_in
from step01_single_gpu.memory_model import gpt as gpt_memory
from step01_single_gpu.memory_model.gpt import GptShape
from step01_single_gpu.memory_model.prediction import saved_activations, total_bytes

# ---- recomputation ------------------------------------------------------------------------------------------


def recomputation(quick: bool) -> None:
    """Same loss and gradients; extra FLOPs as counted; time beside them."""
    from torch.utils.flop_counter import FlopCounterMode

    rows, reference = [], {}
    for attention, mode in itertools.product(("naive", "fused"), MODES):
        config = TrainConfig(dtype="float64", attention=attention, recompute=mode, seq_len=64, global_batch=2)
        run = Run(config)
        loss = run.accumulate()
        gradients = run.gradients.finish()
        if mode == "none":
            reference = {"loss": loss, "gradients": gradients}
        worst = max(((new - old).norm() / old.norm()).item() for new, old in zip(gradients, reference["gradients"]))
        rows.append((f"{attention} {mode}", f"{abs(loss / reference['loss'] - 1):.1e}", f"{worst:.1e}"))
    print_table("Against no recomputation (float64): relative differences", ("", "loss", "worst gradient"), rows)

    # FlopCounterMode does not know the CPU's flash kernel, so FLOPs are counted with the naive core
    config = TrainConfig(attention="naive", seq_len=256, micro_batch=2, global_batch=2)
    flops, times = count_flops(config.model_config, config.seq_len), {mode: [] for mode in MODES}
    runs = {mode: Run(dataclasses.replace(config, recompute=mode)) for mode in MODES}
    counted = {}
    for mode, run in runs.items():
        with FlopCounterMode(display=False) as counter:
            run.accumulate()
        counted[mode] = counter.get_total_flops()
    for _ in range(3 if quick else 12):
        for mode, run in runs.items():
            start = time.perf_counter()
            run.accumulate()
            times[mode].append(time.perf_counter() - start)
            run.gradients.finish()
    seconds = {mode: statistics.median(values) for mode, values in times.items()}
    saved = {
        mode: total_bytes(saved_activations(config.model_config, 2, 256, torch.float32, "naive", mode))
        for mode in MODES
    }
    rows = []
    for mode in MODES:
        predicted = flops.hardware(mode) * config.global_batch
        ratios = (values[mode] / values["none"] for values in (counted, seconds, saved))
        rows.append((mode, *compared(predicted, counted[mode], ".3f", 1e9), *(f"{ratio:.3f}" for ratio in ratios)))
    header = ("", "GFLOP predicted", "measured", "ratio", "FLOPs / none", "time / none", "saved bytes / none")
    print_table("Forward and backward of 2 x 256 tokens, debug model, naive attention", header, rows)
    draw_recomputation(
        {mode: [values[mode] / values["none"] for values in (saved, counted, seconds)] for mode in MODES}
    )

    gpt3 = GptShape(50257, 12288, 96, 96)
    overhead = gpt_memory.selective_overhead(gpt3, 2048)
    share = flops.attention_core / flops.model
    rows = [
        ("GPT-3: saving (5as/h) / (34 + 5as/h)", f"{gpt_memory.selective_saving(gpt3, 2048):.1%}", "playbook: 70%"),
        ("GPT-3: core once more / step (used here)", f"{overhead['core']:.2%}", ""),
        ("GPT-3: s / 6h (matches the published 2.7 %)", f"{overhead['paper']:.2%}", "playbook cites 2.7%"),
        (
            "debug, s 256: core once more / step",
            f"{share:.2%}",
            f"measured {counted['selective'] / counted['none'] - 1:.2%}",
        ),
    ]
    print_table("What selective recomputation saves and costs in FLOPs, by definition", ("", "formula", ""), rows)


def draw_recomputation(ratios: dict[str, list[float]]) -> None:
    """Bytes, FLOPs and time of each mode, relative to none."""
    figure, axis = new_figure(height=3)
    for offset, (mode, values) in zip((-0.27, 0, 0.27), ratios.items()):
        bars = axis.bar([x + offset for x in range(3)], values, 0.25, color=MODES[mode], label=mode)
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
    axis.axhline(4 / 3, color="black", lw=0.8, ls=":")
    axis.text(-0.4, 4 / 3 + 0.02, "8ND / 6ND", fontsize=7)
    axis.set(xticks=range(3), ylabel="relative to none", ylim=(0, 1.5))
    axis.set_xticklabels(("saved bytes", "FLOPs (counted)", "time"))
    axis.legend(fontsize=8, title="recompute", title_fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, "recomputation")


# ---- FLOPs and utilisation ----------------------------------------------------------------------------------


def utilisation(quick: bool) -> None:
    """FLOPs of a step, exact and by the usual approximations; MFU and HFU of real steps."""
    rows = []
    for name, seq in (("debug", 256), ("smollm-135m", 2048), ("llama3-8b", 8192), ("llama3-70b", 8192)):
        model = PRESETS[name]
        flops, count = count_flops(model, seq), count_parameters(model).total
        exact, simple = flops.model, 6 * seq * count
        refined = simple + 12 * model.layers * model.hidden * seq * seq
        shares = (f"{part / flops.forward:.1%}" for part in (flops.linear, flops.attention_core, flops.head))
        rows.append((f"{name}, s {seq}", f"{exact:.3e}", *shares, f"{simple / exact:.3f}", f"{refined / exact:.3f}"))
    header = ("", "FLOPs a sequence", "linear", "attention core", "head", "6ND / exact", "(6ND + 12Lhs²) / exact")
    print_table("Predicted FLOPs of forward and backward", header, rows)

    rows = []
    for attention, mode in itertools.product(("naive", "fused"), MODES):
        flags = {"data": "synthetic", "steps": 4 if quick else 10, "micro_batch": 4, "global_batch": 4}
        with tempfile.TemporaryDirectory() as folder:
            lines = train_in(folder, **flags, attention=attention, recompute=mode)[2:]
            peak = json.loads(Path(folder, "config.json").read_text())["peak_flops"]
        middle = {key: statistics.median(line[key] for line in lines) for key in ("step_time_s", "mfu", "hfu")}
        flops = count_flops(PRESETS["debug"], 256)
        predicted = flops.hardware(mode) / flops.model
        cells = (f"{middle['step_time_s'] * 1000:.0f} ms", f"{middle['mfu']:.1%}", f"{middle['hfu']:.1%}")
        rows.append((f"{attention} {mode}", *cells, *compared(predicted, middle["hfu"] / middle["mfu"], ".3f")))
    header = ("", "step", "MFU", "HFU", "HFU/MFU predicted", "measured", "ratio")
    print_table(
        f"Utilisation of this CPU (debug model, 4 x 256 tokens; peak {peak / 1e9:.0f} GFLOP/s, measured)", header, rows
    )


# ---- profile ------------------------------------------------------------------------------------------------


def profile(quick: bool) -> None:
    """Three steps through the tracer, and through torch.profiler."""
    with tempfile.TemporaryDirectory() as folder:
        train_in(folder, data="synthetic", steps=5, micro_batch=2, global_batch=4, trace="2:4")
        trace = read_trace(folder)
        print("\nThe tracer's report of three steps (python -m common.tracer RUN_DIR)")
        print_report(trace)
        print(f"  figure: {draw_timelines([('', trace)], figure_path('step_timeline'))}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(TrainConfig(micro_batch=2, global_batch=2), device)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3)
    with torch.profiler.profile(schedule=schedule) as profiler:
        for _ in range(5):
            run.step()
            profiler.step()
    sort_by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print("\ntorch.profiler over three steps, by operator (wait 1, warm-up 1, active 3)")
    columns = {"max_name_column_width": 44, "top_level_events_only": False}
    print(profiler.key_averages().table(sort_by=sort_by, row_limit=8, **columns))
    if device.type == "cuda":
        _launch_against_execution(run)
    else:
        print("Launch time against execution time needs CUDA: on the CPU an operator has run when its call returns.")


def _launch_against_execution(run: Run) -> None:
    """What a wall clock without synchronisation measures, beside CUDA events."""
    for _ in range(10):
        run.accumulate()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    start.record()
    loss = run.model(run.tokens).sum()
    end.record()
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    del loss
    rows = [
        ("wall clock, not synchronised", f"{launched * 1000:.2f}"),
        ("CUDA events", f"{start.elapsed_time(end):.2f}"),
    ]
    print_table("One forward in ms", ("", "ms"), rows)
