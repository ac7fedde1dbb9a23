"""What the playbook says about memory, beside what follows from its formulas, and from our model's exact count."""

import torch

from common.counts import count_flops, count_parameters
from common.drawing.tables import print_table
from common.model_config import ModelConfig
from common.presets import PRESETS
from step01_single_gpu.cost import saved_activations, states, total_bytes
from step01_single_gpu.experiments.tools import MIB
from step01_single_gpu.memory_model import gpt as gpt_memory
from step01_single_gpu.memory_model.gpt import GptShape

GIB = 2**30


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


# MiB at the corners of the timeline that the playbook shows of its tool predict_memory
TIMELINE = {
    "model": 12_746,
    "and sums of gradients, master weights": 63_730,
    "peak of the first forward and backward": 75_142,
    "first update": 114_714,
    "peak of the second forward and backward": 126_126,
    "second update": 114_714,
}


def predict_memory(quick: bool) -> None:
    """The levels of the tool predict_memory, from the bytes of its model and of its activations alone."""
    model, _, first_peak, *_ = TIMELINE.values()
    held = gpt_memory.states(1)  # bytes per parameter
    before = held["parameters"] + held["float32 gradient sums"] + held["master weights"]
    after = before + held["moments"]  # narrow gradients come and go within a backward
    count = model / held["parameters"]
    activations = first_peak - before * count
    levels = [held["parameters"], before, before, after, after, after]
    with_activations = [False, False, True, False, True, False]
    rows = []
    for (name, published), level, more in zip(TIMELINE.items(), levels, with_activations, strict=True):
        predicted = level * count + more * activations
        words = f"{level}{' + activations' if more else ''}"
        rows.append((name, words, f"{predicted:,.0f}", f"{published:,}"))
    print_table("predict_memory, MiB", ("", "bytes per parameter", "predicted", "published"), rows)
    print(f"  {count * MIB / 1e9:.2f} billion parameters; activations {activations:,.0f} MiB, from the first peak")


def widget(quick: bool) -> None:
    """The six mistakes of the playbook's memory widget, each computed as it does and as it should be."""
    t, seq, gpt8 = 8, 1024, gpt_memory.from_model(PRESETS["llama3-8b"])
    scores = 5 * gpt8.heads * seq / gpt8.hidden
    preset = GptShape(30522, 8192, 80, 64)
    weights = 2 * (preset.parameters + preset.hidden * 256) / GIB  # with learned positions, of 256 tokens
    h, f, n = 4096, 14336, PRESETS["llama3-8b"].layers
    sbh, logits = seq * h, 4 * seq * 128256 / MIB
    rows = [
        ("1  scores with SP, a layer's sbh, t 8, s 1k", f"{34 / t + scores:g}", f"{(34 + scores) / t:g}"),
        ("2  weights of its 70B preset with t 8, GiB", f"{weights:.1f}", f"{weights / t:.1f}"),
        ("3  full recomputation with SP, t 8, 8B, s 1k, MiB", *(f"{2 * sbh * n / each / MIB:.0f}" for each in (1, t))),
        ("4  log-probabilities with plain TP, t 8, s 1k, MiB", f"{logits:.0f}", f"{logits / t:.0f}"),
        ("5  bytes per parameter, mixed precision, float32 sums", "16", "20"),
        ("6  MLP parameters of a layer of 8B (SwiGLU), millions", f"{8 * h * h / 1e6:.0f}", f"{3 * h * f / 1e6:.0f}"),
    ]
    print_table("The memory widget", ("", "widget", "right"), rows)


def scales(quick: bool) -> None:
    """The tip on units, and appendix A2: 16 h² parameters per layer, and when attention's 12 L h s² may be dropped."""
    real, seq = PRESETS["llama3-8b"], 8192
    h = real.hidden
    a2 = ModelConfig(real.vocab, h, real.layers, real.heads, real.heads, 4 * h, False)  # f = 4h, as many K/V heads
    rows = [
        ("140 GB (70 B parameters in bfloat16), GiB", "133", f"{gpt_memory.states(70 * 10**9)['parameters'] / GIB:.1f}")
    ]
    for name, model in (("16 h²", a2), ("Llama 3 8B", real)):
        count, flops = count_parameters(model), count_flops(model, seq)
        rows.append((f"{name}: parameters of a layer, h²", "16", f"{(count.attention + count.dense_mlp) / h**2:.1f}"))
        core = flops.attention_core / flops.linear
        rows.append((f"{name}: scores / linear layers, {seq:,} tokens", f"s/8h = {seq / (8 * h):g}", f"{core:.4g}"))
    print_table("Units and scales", ("", "playbook", "counted"), rows)
