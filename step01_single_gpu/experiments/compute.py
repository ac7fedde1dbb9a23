"""Experiments on computation: what recomputation leaves alone and what it costs, FLOPs, MFU and HFU, a profile."""

import ctypes
import dataclasses
import itertools
import statistics
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from common.config import TrainConfig
from common.counts import count_flops, count_parameters
from common.drawing.figures import new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.presets import PRESETS
from step01_single_gpu.cost import saved_activations, total_bytes
from step01_single_gpu.experiments.tools import MODES, Run

SHAPE = {"seq_len": 256, "micro_batch": 4, "global_batch": 4}


def same_gradients(quick: bool) -> None:
    """Loss and gradients with recomputation, against those without, in float64."""
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
    print_table("Relative differences from no recomputation (float64)", ("", "loss", "worst gradient"), rows)


def recomputation(quick: bool) -> None:
    """Bytes, FLOPs, time, MFU and HFU of a step in every mode. Modes take turns, so that all see the same machine."""
    config = TrainConfig(**SHAPE)
    flops, model = count_flops(config.model_config, config.seq_len), config.model_config
    cases = {(kind, mode): {"attention": kind, "recompute": mode} for kind in ("naive", "fused") for mode in MODES}
    runs = {case: Run(dataclasses.replace(config, **flags)) for case, flags in cases.items()}
    factor = torch.randn(1024, 1024)
    keep_freed_memory()
    calls = {"product": lambda: factor @ factor} | {case: run.step for case, run in runs.items()}
    seconds = {call: statistics.median(times) for call, times in cpu_times(calls, 4 if quick else 40).items()}
    peak = 2 * 1024**3 / seconds["product"]
    rows, figures = [], {}
    for (kind, mode), run in runs.items():
        shape = (model, 4, config.seq_len, torch.float32, kind)
        kept, before = (total_bytes(saved_activations(*shape, each)) for each in (mode, "none"))
        useful, executed = (each * config.global_batch for each in (flops.model, flops.hardware(mode)))
        counted = ("-", "-")  # FlopCounterMode does not know the CPU's kernel of fused attention
        if kind == "naive":
            with FlopCounterMode(display=False) as counter:
                run.accumulate()
            counted = compared(executed, counter.get_total_flops(), ".3f", 1e9)[1:]
        figures[kind, mode] = kept / before, executed / useful, seconds[kind, mode] / seconds[kind, "none"]
        cells = [f"{executed / 1e9:.3f}", *counted, f"{1000 * seconds[kind, mode]:.0f}"]
        rates = [f"{each / seconds[kind, mode] / peak:.1%}" for each in (useful, executed)]
        rows.append((f"{kind} {mode}", *cells, *(f"{each:.3f}" for each in figures[kind, mode]), *rates))
    header = ["", "GFLOP predicted", "counted", "ratio", "step ms", "bytes / none", "FLOPs / none", "time / none"]
    print_table(f"A step of 4 x 256 tokens, debug model; peak {peak / 1e9:.0f} GFLOP/s", (*header, "MFU", "HFU"), rows)
    draw_recomputation(figures)


def cpu_times(cases: dict, rounds: int) -> dict[object, list[float]]:
    """Return the CPU times of each call, in seconds. All take turns, and the one that begins a round changes."""
    times, names = {name: [] for name in cases}, list(cases)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.process_time()
            cases[name]()
            times[name].append(time.process_time() - start)
    return times


def keep_freed_memory() -> None:
    """Let glibc keep what it frees, as the caching allocator of a GPU does. Elsewhere do nothing.

    By default it returns large blocks to the operating system. The next step pays for every page again, and a mode that
    keeps more pays more.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


def draw_recomputation(ratios: dict[tuple[str, str], tuple[float, float, float]]) -> None:
    """Bytes, FLOPs and time of each mode, relative to none: a panel per kind of attention."""
    figure, axes = new_figure(columns=2, width=8.6, height=3.5, sharey=True)
    for axis, attention in zip(axes, ("naive", "fused")):
        for offset, mode in zip((-0.27, 0, 0.27), MODES):
            values = ratios[attention, mode]
            places, name = [x + offset for x in range(3)], f"--recompute {mode}"
            bars = axis.bar(places, values, 0.25, color=MODES[mode], label=name)
            axis.bar_label(bars, fmt="1" if mode == "none" else "%.2f", fontsize=10.5)
        axis.set(xticks=range(3), ylim=(0, 1.55))
        axis.set_xticklabels(("bytes kept", "FLOPs", "time"), fontsize=11)
        axis.set_title(f"{attention} attention", fontsize=12, loc="left")
    axes[0].set_ylabel("relative to none", fontsize=11)
    figure.legend(*axes[1].get_legend_handles_labels(), fontsize=11, ncol=3, loc="outside lower center", frameon=False)
    save_figure(figure, "recomputation")


def flops(quick: bool) -> None:
    """FLOPs of forward and backward: exact, and by the two usual approximations."""
    rows = []
    for name, seq in (("debug", 256), ("smollm-135m", 2048), ("llama3-8b", 8192), ("llama3-70b", 8192)):
        model = PRESETS[name]
        counted, parameters = count_flops(model, seq), count_parameters(model).total
        exact, simple = counted.model, 6 * seq * parameters
        refined = simple + 12 * model.layers * model.hidden * seq * seq
        parts = (counted.linear, counted.attention_core, counted.head)
        shares = (f"{part / counted.forward:.1%}" for part in parts)
        rows.append((f"{name}, s {seq}", f"{exact:.3e}", *shares, f"{simple / exact:.3f}", f"{refined / exact:.3f}"))
    header = ("", "FLOPs a sequence", "linear", "attention core", "head", "6ND / exact", "(6ND + 12Lhs²) / exact")
    print_table("Predicted FLOPs of forward and backward", header, rows)


def profile(quick: bool) -> None:
    """Which operators take the time of three steps, by torch.profiler."""
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
