"""Experiments on memory: saved activations, what a step holds and when, gradient accumulation, running out of it."""

import contextlib
import itertools
import resource
from pathlib import Path

import torch

from common.config import TrainConfig
from common.drawing.figures import new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.experiments.local_ranks import on_ranks
from common.measure.allocator import MemoryMeter
from common.measure.saved_tensors import SavedTensors
from common.model import cross_entropy_sum
from step01_single_gpu.cost import saved_activations, states, total_bytes
from step01_single_gpu.experiments import memory_timeline as timeline
from step01_single_gpu.experiments.tools import HEADER, MIB, MODES, Run
from step01_single_gpu.memory_model.peak import predict_peak

SHAPE = {"vocab": 384, "hidden": 128, "layers": 2, "heads": 8, "kv_heads": 4, "ffn": 384, "tie_embeddings": False}
SMALL = TrainConfig(**SHAPE).model_config


def measure_saved(batch: int, seq: int, **flags) -> int:
    """Return the bytes that autograd keeps in one forward of `SMALL`."""
    model = Run(TrainConfig(**SHAPE, **flags)).model
    ids = torch.randint(SMALL.vocab, (2, batch, seq))
    with SavedTensors(model) as saved:
        loss = cross_entropy_sum(model(ids[0]), ids[1])
    del loss
    return saved.bytes


def saved_activation_bytes(quick: bool) -> None:
    """Our model: every tensor that autograd keeps, predicted from the configuration, against what it keeps."""
    rows = []
    for dtype, attention, mode in itertools.product(("float32", "bfloat16"), ("naive", "fused"), MODES):
        predicted = total_bytes(saved_activations(SMALL, 2, 256, getattr(torch, dtype), attention, mode))
        measured = measure_saved(2, 256, dtype=dtype, attention=attention, recompute=mode)
        rows.append((f"{dtype} {attention} {mode}", *compared(predicted, measured)))
    print_table("Saved activations of our model in bytes (2 layers, h 128, 2 x 256 tokens)", HEADER, rows)

    batches, lengths = ((1, 4), (64, 256)) if quick else ((1, 2, 4, 8), (64, 128, 256, 512))
    points = {
        mode: [
            (batch, seq, measure_saved(batch, seq, attention="naive", recompute=mode))
            for batch, seq in [(batch, 128) for batch in batches] + [(1, seq) for seq in lengths]
        ]
        for mode in MODES
    }
    draw_scaling(points)


def draw_scaling(points: dict) -> None:
    """Linear in the batch, quadratic in the sequence where scores are kept."""
    figure, axes = new_figure(columns=2, width=8.6, height=3.4)
    for mode, measured in points.items():
        for axis, index, fixed in ((axes[0], 0, (1, 128)), (axes[1], 1, (0, 1))):
            some = [point for point in measured if point[fixed[0]] == fixed[1]]
            xs = [point[index] for point in some]
            axis.plot(xs, [point[2] / MIB for point in some], "o", color=MODES[mode])
            grid = sorted({*range(1, max(xs), max(1, max(xs) // 32)), max(xs)})
            shapes = [(x, 128) if index == 0 else (1, x) for x in grid]
            line = [total_bytes(saved_activations(SMALL, *s, torch.float32, "naive", mode)) for s in shapes]
            axis.plot(grid, [size / MIB for size in line], color=MODES[mode], label=mode)
    axes[0].set_xlabel("sequences of 128 tokens", fontsize=10)
    axes[0].set_ylabel("MiB kept for the backward", fontsize=10)
    axes[1].set_xlabel("tokens of one sequence", fontsize=10)
    axes[0].legend(title="--recompute", fontsize=10)
    save_figure(figure, "saved_activations")


# ---- accumulation -------------------------------------------------------------------------------------------


def accumulation(quick: bool) -> None:
    """k micro-batches give the gradient of the one big batch, in the memory of one micro-batch."""
    config = TrainConfig(dtype="float64", seq_len=64, hidden=64, heads=4, kv_heads=2, layers=2, ffn=192)
    config.global_batch, reference, rows = 16, None, []
    for micro_batch in (16, 8, 4, 2, 1):
        config.micro_batch = micro_batch
        run = Run(config)
        loss = run.accumulate()
        gradients = torch.cat([gradient.flatten() for gradient in run.gradients.finish()])
        reference = reference or (loss, gradients)
        difference = (gradients - reference[1]).norm() / reference[1].norm()
        rows.append((16 // micro_batch, f"{loss:.15f}", f"{difference:.1e}"))
    print_table("16 sequences as k micro-batches (float64)", ("k", "loss", "gradient difference"), rows)

    rows = []
    for k in (1, 2, 4) if quick else (1, 2, 4, 8):
        shape = {"hidden": 256, "layers": 4, "ffn": 768, "seq_len": 128, "global_batch": k}
        rows.append((f"k {k}, micro-batch 1", *_peaks(TrainConfig(**shape, micro_batch=1))))
        if k > 1:
            rows.append((f"k 1, micro-batch {k}", *_peaks(TrainConfig(**shape, micro_batch=k))))
    title = "Peak memory of a step in MiB (4 layers, h 256, 128 tokens a sequence, float32)"
    print_table(title, HEADER, sorted(rows, key=lambda row: row[0].endswith("micro-batch 1"), reverse=True))


def _peaks(config: TrainConfig) -> tuple[str, str, str]:
    """Predicted and measured peak of the second step."""
    run, meter = Run(config), MemoryMeter("cpu")
    run.step()
    with meter.measure(run.state()) as measured:
        run.step()
    shape = (config.model_config, config.micro_batch, config.seq_len, config.torch_dtype)
    accumulation = config.accumulation_steps
    predicted = predict_peak(*shape, config.attention, config.recompute, "adamw", accumulation)
    return compared(predicted.peak, measured.peak_bytes, ",.1f", MIB)


# ---- the first steps, over time -----------------------------------------------------------------------------


def first_steps(quick: bool) -> None:
    """Memory over time in the first two steps, of two micro-batches each, and the peaks of the first four."""
    shape = {"vocab": 4096, "hidden": 256, "layers": 6, "ffn": 768, "tie_embeddings": True}
    config = TrainConfig(**shape, seq_len=128 if quick else 256, micro_batch=4, global_batch=8)
    run = Run(config)
    result = timeline.record(run, 2 if quick else 4)
    predicted, rows = [], []
    for step in range(len(result.steps)):
        arguments = (config.model_config, 4, config.seq_len, torch.float32)
        peak = predict_peak(*arguments, accumulation=2, first_step=step == 0).peak
        seconds, sizes = result.peak(step)
        where = next((name for name, start, end in result.phases if start <= seconds <= end), "between")
        parts = (f"{size / MIB:.1f}" for size in sizes)
        rows.append((f"step {step + 1}", *compared(peak, sum(sizes), ",.1f", MIB), where, *parts))
        predicted.append(peak)
    header = (*HEADER, "in", *timeline.CATEGORIES)
    count = sum(p.numel() for p in run.parameters)
    print_table(f"Peak of each step in MiB and what it consists of ({count:,} parameters)", header, rows)
    figure, axis = new_figure(width=8.6, height=4.6)
    timeline.draw(result, predicted, 2, axis)
    save_figure(figure, "first_steps")


# ---- running out of it --------------------------------------------------------------------------------------


def out_of_memory(quick: bool) -> None:
    """A process whose memory is limited passes its first step and dies in the second."""
    config = TrainConfig(hidden=512, layers=6, ffn=1536, micro_batch=4, global_batch=4)
    arguments = (config.model_config, 4, config.seq_len, torch.float32)
    first, second = (predict_peak(*arguments, first_step=each).peak for each in (True, False))
    held = states(config.model_config, torch.float32)
    limit = first + held["moments"] // 2
    print(f"\npredicted peak in MiB: first step {first / MIB:.0f}, second {second / MIB:.0f}, limit {limit / MIB:.0f}")
    ((survived, phase, message),) = on_ranks(1, starve, config, limit - held["parameters"])
    print(f"  {survived} step survived; in the {phase} of the next one: {message}")


def starve(mesh, done, config: TrainConfig, spare: int) -> tuple[int, str, str]:
    """In a process of its own: train with `spare` bytes besides what it has now. Returns how that ends."""
    Run(TrainConfig(hidden=64, layers=1, micro_batch=4, global_batch=4)).step()  # libraries load what they need once
    run, phases = Run(config), []

    @contextlib.contextmanager
    def phase(name: str):
        phases.append(name)
        yield

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, resource.RLIM_INFINITY))
    for step in range(5):
        try:
            run.step(phase)
        except RuntimeError as error:
            return step, phases[-1], str(error).splitlines()[0]
    return 5, "", "it never ran out"
