"""What recomputation costs, in bytes, FLOPs and time; FLOPs of models, exact and by the usual approximations."""

import ctypes
import dataclasses
import statistics
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from common.config import TrainConfig
from common.counts import count_flops, count_parameters
from common.drawing.charts import bars, legend
from common.drawing.figures import new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.presets import PRESETS
from step01_single_gpu.cost import saved_activations, total_bytes
from step01_single_gpu.experiments.tools import MODES, OneProcess

SHAPE = {"seq_len": 256, "micro_batch": 4, "global_batch": 4}


def recomputation(quick: bool) -> None:
    """Bytes, FLOPs, time, MFU and HFU of a step in every mode. Modes take turns, so that all see the same machine."""
    config = TrainConfig(**SHAPE)
    flops, model = count_flops(config.model_config, config.seq_len), config.model_config
    cases = {(kind, mode): {"attention": kind, "recompute": mode} for kind in ("naive", "fused") for mode in MODES}
    runs = {case: OneProcess(dataclasses.replace(config, **flags)) for case, flags in cases.items()}
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
                run.gradients()
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
    for axis, attention in zip(axes, ("fused", "naive")):
        groups = {
            what: [{f"--recompute {mode}": ratios[attention, mode][index]} for mode in MODES]
            for index, what in enumerate(("bytes kept", "FLOPs", "time"))
        }
        bars(axis, groups, colours={f"--recompute {mode}": colour for mode, colour in MODES.items()}, value="{:.2f}")
        axis.set_title(f"{attention} attention", fontsize=12, loc="left")
    axes[0].set_ylabel("relative to none")
    legend(figure)
    save_figure(figure, "recomputation")


def flops(quick: bool) -> None:
    """FLOPs of forward and backward: exact, and by the usual approximation."""
    rows, sizes = [], {"debug": 256, "smollm-135m": 2048, "llama3-1b": 4096, "llama3-8b": 8192, "llama3-70b": 8192}
    for name, seq in sizes.items():
        model = PRESETS[name]
        counted, parameters = count_flops(model, seq), count_parameters(model).total
        exact, simple = counted.model, 6 * seq * parameters
        parts = (counted.linear, counted.attention_core, counted.head)
        shares = (f"{part / counted.forward:.1%}" for part in parts)
        again = counted.hardware("full") / exact - 1
        rows.append((f"{name}, s {seq}", f"{exact:.3e}", *shares, f"{simple / exact:.3f}", f"+{again:.1%}"))
    header = ("", "FLOPs a sequence", "linear", "attention core", "head", "6ΨD / exact", "full recomputation")
    print_table("Predicted FLOPs of forward and backward", header, rows)
