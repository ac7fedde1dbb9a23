"""Bytes over time: the parameters and gradients in memory at each moment of a step, and the peak of a whole step."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from common.config import TrainConfig
from common.drawing.figures import SERIES, new_figure, save_figure
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import BUCKET_MB, run_jobs
from common.process_groups import Mesh
from common.record.run_record import read_metrics
from step01_single_gpu.cost import saved_activations, total_bytes
from step03_zero.experiments import predictions
from step03_zero.experiments.tools import MIB, SHAPE, STAGES, Run, prefetching, units_of
from step03_zero.train import train
from step03_zero.unit import Unit

# As many parameters in four times as many layers: a unit is a small part of the model, as it is in a large one
DEEP = SHAPE | {"layers": 24, "hidden": 128, "ffn": 384, "seq_len": 32, "bucket_mb": 1.0}

CASES = [  # name, flags, with prefetch
    ("stage 1", {"zero": 1}, True),
    ("stage 2", {"zero": 2}, True),
    ("stage 3", {"zero": 3}, True),
    ("stage 3, no prefetch", {"zero": 3}, False),
    ("stage 3, tied", {"zero": 3, "tie_embeddings": True}, True),
    ("stage 3, full recomputation", {"zero": 3, "recompute": "full"}, True),
]


def residency(quick: bool) -> None:
    """Parameters and gradients in memory, event by event, over one step of stages 1, 2 and 3."""
    found = on_ranks(2, watch_steps, CASES, title="residency", jobs=len(CASES))[0]
    logs = {name: log for (name, *_), log in zip(CASES, found)}
    rows = []
    for name, flags, prefetch in CASES:
        model = units_of(SHAPE | {key: value for key, value in flags.items() if key == "tie_embeddings"})
        stage = flags["zero"]
        expected = predictions.resident(model, 2, 4, prefetch) if stage == 3 else 4 * model.parameters
        rows.append((f"{name}: parameters", expected, max(held for _, held, _ in logs[name]["points"])))
        expected = 4 * model.parameters
        if stage > 1:  # one reduce-scatter is in flight while the next bucket fills
            expected = predictions.resident(model, 2, 4) if stage == 3 else 2 * model.parameters + 2e6 * BUCKET_MB
        rows.append((f"{name}: gradients", expected, max(held for *_, held in logs[name]["points"])))
        expected = 4 * model.parameters / (2 if stage > 1 else 1)
        rows.append((f"{name}: gradients at the end", expected, logs[name]["end"]))
    print_comparison("2 ranks, float32: most MiB in memory at any moment of a step", "", rows, ",.3f", MIB)
    print(
        "  Not counted: what a collective itself needs. On gloo a reduce-scatter receives as much as its bucket holds."
    )
    draw_residency({name: logs[name] for name in ("stage 1", "stage 2", "stage 3")}, units_of(SHAPE))


def watch_steps(mesh: Mesh, done: Callable, cases: list[tuple[str, dict, bool]]) -> list[dict]:
    """On a rank: for each case, the second step's points (seconds, bytes of parameters, of gradients) and phases."""
    result = []
    for _, flags, prefetch in cases:
        run = Run(mesh, **SHAPE | {"seq_len": 256, "micro_batch": 2}, global_batch=2 * mesh.world.size, **flags)
        with prefetching(prefetch):
            run.step(0)
        points, phases = [], []

        def note(points=points, run=run) -> None:
            points.append((time.perf_counter(), run.parameter_bytes(), run.gradient_bytes()))

        def observe(phase: str, phases=phases, note=note) -> None:
            phases.append((phase, time.perf_counter()))
            note()

        with prefetching(prefetch), watched_units(note):
            held = run.step(1, observe)
        start = phases[0][1]
        result.append(
            {
                "points": [(seconds - start, *sizes) for seconds, *sizes in points],
                "phases": [(phase, seconds - start) for phase, seconds in phases],
                "end": held["gradients"],
            }
        )
        done()
    return result


@contextlib.contextmanager
def watched_units(note: Callable[[], None]) -> Iterator[None]:
    """Within, `note` is called before and after everything that allocates or frees memory of units."""
    with contextlib.ExitStack() as patches:
        for name in ("fetch", "free", "make_bucket", "reduce_scatter", "complete"):
            original = getattr(Unit, name)

            def noted(unit: Unit, original=original):
                note()
                result = original(unit)
                note()
                return result

            patches.enter_context(mock.patch.object(Unit, name, noted))
        yield


def draw_residency(logs: dict[str, dict], model: predictions.Model) -> None:
    """Draw parameters and gradients, with one line per stage; each phase is as wide as the others."""
    figure, axes = new_figure(columns=2, width=10, height=4)
    for name, colour, style in zip(logs, SERIES, ((0, (6, 2)), (0, (2, 1.5)), "solid")):
        points, phases = logs[name]["points"], logs[name]["phases"]
        for axis, column in zip(axes, (1, 2)):
            xs = [by_phase(point[0], phases) for point in points]
            ys = [point[column] / MIB for point in points]
            axis.step(xs, ys, where="post", color=colour, linestyle=style, linewidth=1.6, label=name)
    whole, shard = 4 * model.parameters / MIB, 2 * model.parameters / MIB
    for axis, what in zip(axes, ("parameters", "gradients")):
        axis.set(xlim=(0, 3), ylim=(0, 1.12 * whole), ylabel=f"MiB of {what} on rank 0")
        axis.set_xticks([0.5, 1.5, 2.5], ["forward", "backward", "optimizer"], fontsize=12)
        axis.tick_params(axis="x", length=0)
        axis.grid(visible=False, axis="x")
        for edge in (1, 2):
            axis.axvline(edge, color="#999999", linewidth=0.8)
    peak = predictions.resident(model, 2, 4) / MIB
    for height, text in ((whole, "all"), (peak, "shard + 2 units"), (shard, "shard")):
        axes[0].axhline(height, color="black", linewidth=0.8, linestyle=":")
        axes[0].text(2.97, height + 0.2, text, ha="right", va="bottom", fontsize=11)
    axes[0].legend(frameon=False, loc="lower left", fontsize=12)
    title = f"2 ranks, float32, {model.parameters / 1e6:.1f} M parameters in {len(model.units)} units"
    axes[0].set_title(title, fontsize=11, loc="left")
    save_figure(figure, "residency")


def by_phase(seconds: float, phases: list[tuple[str, float]]) -> float:
    """Return the time with the forward stretched to [0, 1], the backward to [1, 2] and the rest to [2, 3]."""
    when = dict(phases)
    edges = [0.0, when["backward"], when["optimizer"], when["end"]]
    for index, (low, high) in enumerate(zip(edges, edges[1:])):
        if seconds < high:
            return index + max(0.0, seconds - low) / (high - low)
    return 3.0


def peak(quick: bool) -> None:
    """Peak memory of rank 0 in a whole step, by allocator events: activations, temporaries and messages included."""
    rows, steps = [], 4 if quick else 8
    model = units_of(DEEP)
    kept = total_bytes(saved_activations(TrainConfig(**DEEP).model_config, 1, DEEP["seq_len"], torch.float32))
    for ranks in (2,) if quick else (2, 4):
        flags = DEEP | {"steps": steps, "global_batch": ranks, "measure_memory": True}
        for stage in STAGES:
            with tempfile.TemporaryDirectory() as folder:  # new ranks, because what an earlier run left would count
                jobs = [("run", flags | {"zero": stage})]
                on_ranks(ranks, run_jobs, jobs, folder, train, title=f"peak, stage {stage}")
                records, _ = read_metrics(Path(folder, "run", "metrics.jsonl"))
            peaks = [record["peak_memory_bytes"] / MIB for record in records[1:]]
            states = sum(predictions.held(model.parameters, stage, ranks, predictions.OURS["float32"])) / MIB
            cells = (f"{size:,.1f}" for size in (states, kept / MIB, min(peaks), max(peaks)))
            rows.append((f"{ranks} ranks, stage {stage}", *cells))
    header = ("MiB", "states: predicted", "activations: predicted", "peak: least", "most of the steps")
    print_table(f"float32, {model.parameters:,} parameters in {len(model.units)} units: rank 0", header, rows)
    print(
        "  On the CPU a peak may come out high (see common/measure/allocator.py), so the least is nearest to the truth."
    )
