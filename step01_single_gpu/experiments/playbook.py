"""What the playbook says about memory, beside what follows from its formulas, and from our model's exact count."""

import torch

from common.counts import count_flops, count_parameters
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.measure.saved_tensors import SavedTensors
from common.presets import PRESETS
from step01_single_gpu.cost import saved_activations, states, total_bytes
from step01_single_gpu.experiments.gpt_block import GptBlock
from step01_single_gpu.experiments.tools import HEADER, MIB, MODES
from step01_single_gpu.memory_model import gpt as gpt_memory
from step01_single_gpu.memory_model.gpt import GptShape

GIB = 2**30
NAMES, LENGTHS = ("llama3-1b", "llama3-8b", "llama3-70b"), (1024, 2048, 4096, 8192)


def gpt_layer(quick: bool) -> None:
    """The playbook's layer, built: its bytes against 34 s b h + 5 a s^2 b."""
    hidden, heads, batch = 256, 8, 2
    shape = GptShape(vocab=0, hidden=hidden, layers=1, heads=heads)
    block = GptBlock(hidden, heads).to(torch.bfloat16)
    rows = []

    def measure(function, seq: int) -> int:
        x = torch.randn(batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True)
        with SavedTensors(block) as saved:
            result = function(x)
        del result
        return saved.bytes

    for seq in (128, 256) if quick else (64, 128, 256, 512):
        predicted = gpt_memory.text_activations(shape, batch, seq)
        rows.append((f"whole layer, s {seq}", *compared(predicted, measure(block, seq))))
    parts = gpt_memory.layer_activations(shape, batch, 256)
    parts["attention"] += parts.pop("scores")
    for name, function in block.parts().items():
        formula = {"attention": "11 sbh + 5 a s^2 b", "mlp": "19 sbh", "norms": "4 sbh"}[name]
        rows.append((f"{name} ({formula}), s 256", *compared(parts[name], measure(function, 256))))
    print_table("The playbook's GPT layer in bytes (h 256, 8 heads, batch 2, bfloat16, dropout)", HEADER, rows)


# ---- Llama 3 by formula -------------------------------------------------------------------------------------


def llama_bars(quick: bool) -> None:
    """The playbook's two bar plots as a function: Llama 3 by its own formula, float32 states; and ours, exact."""
    rows = []
    figure, axes = new_figure(columns=3, width=9.6, height=4.2)
    for axis, name in zip(axes, NAMES):
        model, shape = PRESETS[name], gpt_memory.from_model(PRESETS[name])
        held = gpt_memory.states(shape.parameters, mixed=False)
        for offset, mode in zip((-0.27, 0, 0.27), MODES):
            xs, bottom = [index + offset for index in range(len(LENGTHS))], [0.0] * len(LENGTHS)
            for part in ("parameters", "gradients", "moments"):
                size = held[part] / GIB
                axis.bar(xs, size, 0.25, bottom, color=COLOURS[part], label=part if offset < 0 else None)
                bottom = [low + size for low in bottom]
            kept = [gpt_memory.text_activations(shape, 1, seq, mode) / GIB for seq in LENGTHS]
            axis.bar(xs, kept, 0.25, bottom, color=MODES[mode], label=f"activations, {mode}")
            ours = [saved_activations(model, 1, seq, torch.bfloat16, "naive", mode) for seq in LENGTHS]
            ours = [total_bytes(saved) / GIB for saved in ours]
            axis.plot(
                xs,
                [low + size for low, size in zip(bottom, ours)],
                "k_",
                ms=7,
                label=None if offset else "real architecture, exact count",
            )
            rows.append((f"{name} {mode}", *(f"{a:.3g} | {b:.3g}" for a, b in zip(kept, ours))))
        axis.axhline(80, color="black", lw=0.8, ls=":")
        axis.set(title=name, xticks=range(len(LENGTHS)))
        axis.set_xticklabels([f"{seq // 1024}k" for seq in LENGTHS])
        axis.set(xlabel="tokens")
    axes[0].set(ylabel="GiB, one sequence (dotted: an H100)")
    figure.legend(*axes[0].get_legend_handles_labels(), ncol=3, fontsize=10, loc="outside lower center")
    save_figure(figure, "llama_memory")
    title = "Activations of one sequence in GiB, predicted: playbook's form | our model exactly (bfloat16, naive)"
    print_table(title, ("", *(f"{seq // 1024}k" for seq in LENGTHS)), rows)


# ---- its claims, its profile, its widget --------------------------------------------------------------------


def claims(quick: bool) -> None:
    """ "Negligible for short sequences, significant from 2-4k tokens", "more effect on small models": in numbers."""
    rows = []
    for name in (*NAMES, "llama3-405b"):
        shape = gpt_memory.from_model(PRESETS[name])
        held = sum(gpt_memory.states(shape.parameters, mixed=False).values())
        none, full = ([gpt_memory.text_activations(shape, 1, s, mode) for s in LENGTHS] for mode in ("none", "full"))
        shares = (f"{each / (held + each):.0%}" for each in none)
        rows.append((name, *shares, f"{(held + none[2]) / (held + full[2]):.2f}"))
    header = ("", *(f"{seq // 1024}k" for seq in LENGTHS), "memory at 4k, none / full")
    print_table("Share of activations, one sequence, float32 states, the playbook's formulas", header, rows)

    model = PRESETS["llama3-8b"]
    exact = count_parameters(model)
    layer, h = exact.attention + exact.dense_mlp, model.hidden
    rows = [("parameters of a layer / h²", "16", f"{layer / h**2:.2f}")]
    for seq in (2048, 8192, 131072):
        core = count_flops(model, seq).attention_core / model.layers
        rows.append(
            (f"attention core / linear layers, s {seq}", f"{seq / (8 * h):.3f}", f"{core / (2 * seq * layer):.3f}")
        )
    print_table("Appendix A2 on Llama 3 8B", ("", "with 16 h² (s / 8h)", "exact"), rows)


def llama_profile(quick: bool) -> None:
    """The playbook's memory profile of Llama 1B: which precision, and how many tokens."""
    model, published = PRESETS["llama3-1b"], {"parameters": 4.60, "gradients": 4.60, "moments": 9.21}
    held = states(model, torch.float32)
    rows = [(name, f"{held[name] / GIB:.2f}", f"{size:.2f}") for name, size in published.items()]
    for tokens in (2048, 4096, 6144, 8192):
        for attention in ("naive", "fused"):
            batch = tokens // 1024
            saved = total_bytes(saved_activations(model, batch, 1024, torch.float32, attention)) / GIB
            rows.append((f"activations, {batch} x 1024 tokens, {attention}", f"{saved:.2f}", "45.62"))
        rows.append((f"a tensor of logits, {tokens} tokens", f"{tokens * model.vocab * 4 / GIB:.2f}", "8.81"))
    print_table("Llama 3.2 1B in float32, GiB", ("", "predicted", "published"), rows)


def widget(quick: bool) -> None:
    """The six mistakes of the playbook's memory widget, each computed as it does and as it should be."""
    t, seq, gpt8 = 8, 1024, gpt_memory.from_model(PRESETS["llama3-8b"])
    scores = 5 * gpt8.heads * seq / gpt8.hidden
    preset = GptShape(30522, 8192, 80, 64)
    weights = 2 * (preset.parameters + preset.hidden * 256) / GIB  # with learned positions, of 256 tokens
    h, f, n = 4096, 14336, PRESETS["llama3-8b"].layers
    sbh, logits = seq * h, 4 * seq * 128256 / MIB
    rows = [
        (
            "1  scores with sequence parallelism, a layer's sbh, t 8, s 1k",
            f"{34 / t + scores:g}",
            f"{(34 + scores) / t:g}",
        ),
        ("2  weights of its 70B preset with t 8, GiB", f"{weights:.1f}", f"{weights / t:.1f}"),
        (
            "3  full recomputation with SP, t 8, 8B, s 1k, MiB",
            f"{2 * sbh * n / MIB:.0f}",
            f"{2 * sbh * n / t / MIB:.0f}",
        ),
        ("4  log-probabilities with plain TP, t 8, s 1k, MiB", f"{logits:.0f}", f"{logits / t:.0f}"),
        ("5  bytes per parameter, mixed precision, float32 sums", "16", "20"),
        ("6  MLP parameters of a layer of 8B (SwiGLU), millions", f"{8 * h * h / 1e6:.0f}", f"{3 * h * f / 1e6:.0f}"),
    ]
    print_table("The memory widget", ("", "widget", "right"), rows)
