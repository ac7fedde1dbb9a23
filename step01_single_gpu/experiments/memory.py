"""Experiments on memory: saved activations, what a step holds and when it peaks, gradient accumulation."""

import itertools

import torch

from common.config import TrainConfig
from common.experiments.figures import COLOURS, new_figure, save_figure
from common.experiments.tables import compared, print_table
from common.measure.allocator import MemoryMeter
from common.model import cross_entropy_sum
from common.presets import PRESETS
from step01_single_gpu.experiments import step_timeline as timeline
from step01_single_gpu.experiments.gpt_block import GptBlock
from step01_single_gpu.experiments.tools import HEADER, MIB, MODES, Run
from step01_single_gpu.memory_model import gpt as gpt_memory
from step01_single_gpu.memory_model.gpt import GptShape
from step01_single_gpu.memory_model.peak import predict_peak
from step01_single_gpu.memory_model.prediction import SavedTensors, saved_activations, total_bytes

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
    draw_scaling(points, gpt_block_bytes(quick))


def gpt_block_bytes(quick: bool) -> list[tuple[int, int, int]]:
    """The playbook's layer, built: its bytes against 34 s b h + 5 a s^2 b. Returns (seq, formula, measured)."""
    hidden, heads, batch = 256, 8, 2
    shape = GptShape(vocab=0, hidden=hidden, layers=1, heads=heads)
    block = GptBlock(hidden, heads).to(torch.bfloat16)
    points, rows = [], []

    def measure(function, seq: int) -> int:
        x = torch.randn(batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True)
        with SavedTensors(block) as saved:
            result = function(x)
        del result
        return saved.bytes

    for seq in (128, 256) if quick else (64, 128, 256, 512):
        predicted = gpt_memory.text_activations(shape, batch, seq)
        points.append((seq, predicted, measure(block, seq)))
        rows.append((f"whole layer, s {seq}", *compared(predicted, points[-1][2])))
    parts = gpt_memory.layer_activations(shape, batch, 256)
    parts["attention"] += parts.pop("scores")
    for name, function in block.parts().items():
        formula = {"attention": "11 sbh + 5 a s^2 b", "mlp": "19 sbh", "norms": "4 sbh"}[name]
        rows.append((f"{name} ({formula}), s 256", *compared(parts[name], measure(function, 256))))
    print_table("The playbook's GPT layer in bytes (h 256, 8 heads, batch 2, bfloat16, dropout)", HEADER, rows)
    return points


def draw_scaling(points: dict, gpt: list) -> None:
    """Linear in the batch, quadratic in the sequence where scores are kept."""
    figure, axes = new_figure(columns=3, width=12)
    for mode, measured in points.items():
        for axis, index, fixed in ((axes[0], 0, (1, 128)), (axes[1], 1, (0, 1))):
            some = [point for point in measured if point[fixed[0]] == fixed[1]]
            xs = [point[index] for point in some]
            axis.plot(xs, [point[2] / MIB for point in some], "o", color=MODES[mode])
            grid = sorted({*range(1, max(xs), max(1, max(xs) // 32)), max(xs)})
            shapes = [(x, 128) if index == 0 else (1, x) for x in grid]
            line = [total_bytes(saved_activations(SMALL, *s, torch.float32, "naive", mode)) for s in shapes]
            axis.plot(grid, [size / MIB for size in line], color=MODES[mode], label=mode)
    axes[0].set(xlabel="sequences of 128 tokens", ylabel="MiB kept for the backward")
    axes[1].set(xlabel="tokens (one sequence)")
    for axis in axes[:2]:
        axis.set_title("ours, naive attention: lines predicted, dots measured", fontsize=8)
    axes[0].legend(title="recompute")
    shape, grid = GptShape(0, 256, 1, 8), [*range(1, gpt[-1][0], 8), gpt[-1][0]]
    formula = [gpt_memory.text_activations(shape, 2, seq) / MIB for seq in grid]
    axes[2].plot(grid, formula, color=COLOURS["predicted"], label="34 sbh + 5 as²b")
    axes[2].plot([p[0] for p in gpt], [p[2] / MIB for p in gpt], "o", color=COLOURS["measured"], label="measured")
    axes[2].set(xlabel="tokens (two sequences)")
    axes[2].set_title("the playbook's GPT layer, built", fontsize=9)
    axes[2].legend()
    save_figure(figure, "saved_activations")


# ---- Llama 3 by formula -------------------------------------------------------------------------------------


def llama_bars(quick: bool) -> None:
    """The playbook's two bar plots as a function: Llama 3 by its own formula, float32 states; and ours, exact."""
    names, lengths = ("llama3-1b", "llama3-8b", "llama3-70b"), (1024, 2048, 4096, 8192)
    gib = 2**30
    rows = []
    figure, axes = new_figure(columns=4, width=15, height=3.8)
    for axis, name in zip(axes, names):
        model, shape = PRESETS[name], gpt_memory.from_model(PRESETS[name])
        held = gpt_memory.states(shape.parameters, mixed=False)
        for offset, mode in zip((-0.27, 0, 0.27), MODES):
            xs, bottom = [index + offset for index in range(len(lengths))], [0.0] * len(lengths)
            for part in ("parameters", "gradients", "moments"):
                size = held[part] / gib
                axis.bar(xs, size, 0.25, bottom, color=COLOURS[part], label=part if offset < 0 else None)
                bottom = [low + size for low in bottom]
            kept = [gpt_memory.text_activations(shape, 1, seq, mode) / gib for seq in lengths]
            axis.bar(xs, kept, 0.25, bottom, color=MODES[mode], label=f"activations, {mode}")
            ours = [saved_activations(model, 1, seq, torch.bfloat16, "naive", mode) for seq in lengths]
            ours = [total_bytes(saved) / gib for saved in ours]
            axis.plot(
                xs,
                [low + size for low, size in zip(bottom, ours)],
                "k_",
                ms=7,
                label=None if offset else "real architecture, exact count",
            )
            rows.append((f"{name} {mode}", *(f"{a:.3g} | {b:.3g}" for a, b in zip(kept, ours))))
        axis.axhline(80e9 / gib, color="black", lw=0.8, ls=":")
        axis.set(title=f"{name} (predicted)", xticks=range(len(lengths)))
        axis.set_xticklabels([f"{seq // 1024}k" for seq in lengths])
        axis.set(xlabel="tokens")
    axes[0].set(ylabel="GiB, one sequence (dotted: a GPU of 80 GB)")
    figure.legend(*axes[0].get_legend_handles_labels(), ncol=7, fontsize=8, loc="outside lower center")
    _draw_overlay(axes[3])
    save_figure(figure, "llama_memory")
    title = "Activations of one sequence in GiB, predicted: playbook's form | our model exactly (bfloat16, naive)"
    print_table(title, ("", *(f"{seq // 1024}k" for seq in lengths)), rows)


def _draw_overlay(axis) -> None:
    """The same bars for our small model, with what was measured on top."""
    lengths = (128, 256, 512)
    for offset, mode in zip((-0.27, 0, 0.27), MODES):
        xs = [index + offset for index in range(len(lengths))]
        saved = [saved_activations(SMALL, 1, seq, torch.bfloat16, "naive", mode) for seq in lengths]
        axis.bar(xs, [total_bytes(each) / MIB for each in saved], 0.25, color=MODES[mode])
        flags = {"dtype": "bfloat16", "attention": "naive", "recompute": mode}
        axis.plot(xs, [measure_saved(1, seq, **flags) / MIB for seq in lengths], "kx", ms=5)
    axis.set(
        title="our small model: bars predicted,\ncrosses measured (activations, MiB)", xticks=range(3), xlabel="tokens"
    )
    axis.set_xticklabels(lengths)


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


# ---- the first four steps -----------------------------------------------------------------------------------


def first_steps(quick: bool) -> None:
    """Memory over time in the first four steps: Adam's moments come with the first update and stay."""
    shape = {"vocab": 4096, "hidden": 256, "layers": 6, "ffn": 768, "tie_embeddings": True}
    config = TrainConfig(**shape, seq_len=128 if quick else 256, micro_batch=4, global_batch=4)
    run = Run(config)
    result = timeline.record(run, 4)
    predicted, rows = [], []
    for step in range(4):
        peak = predict_peak(
            *(config.model_config, 4, config.seq_len, torch.float32, "fused", "none"), first_step=step == 0
        ).peak
        seconds, sizes = result.peak(step)
        where = next((name for name, start, end in result.phases if start <= seconds <= end), "between")
        parts = (f"{size / MIB:.1f}" for size in sizes)
        rows.append((f"step {step + 1}", *compared(peak, sum(sizes), ",.1f", MIB), where, *parts))
        predicted.append(peak)
    header = (*HEADER, "in", *timeline.CATEGORIES)
    print_table(
        f"Peak of each step in MiB and what it consists of ({sum(p.numel() for p in run.parameters):,} parameters)",
        header,
        rows,
    )
    figure, axis = new_figure(width=9, height=3.4)
    timeline.draw(result, predicted, axis)
    axis.set_title("allocator events of the first four steps", fontsize=10, pad=14)
    save_figure(figure, "first_steps")
