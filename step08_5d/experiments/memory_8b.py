"""The playbook's figure of an 8 B model under each kind of parallelism, with its formulas corrected."""

from dataclasses import dataclass

import torch

from common.counts import count_parameters
from common.drawing.figures import COLOURS, new_figure, save_figure
from common.drawing.tables import print_table
from common.presets import PRESETS
from step01_single_gpu.cost import saved_activations, total_bytes
from step01_single_gpu.memory_model import gpt

MODEL, N = PRESETS["llama3-8b"], 8  # ranks
LENGTHS, MODES = (1024, 4096, 16384), ("selective", "full")
PLOTTED = {"parameters": 2, "gradients": 2, "optimizer state": 8}  # bytes per parameter in the playbook's bars
OURS = {"parameters": 2, "gradients": 4, "optimizer state": 12}  # float32 sums of gradients, and master weights
GIB = 2**30


@dataclass(frozen=True)
class Way:
    """One of the playbook's columns.

    parameters: of a rank, which has gradients and optimizer state of as many.
    divisor: of the activations.
    published: GiB of activations in the playbook's bars by mode, where they differ from the corrected ones.
    """

    name: str
    parameters: float
    divisor: int
    published: dict[str, tuple[float, ...]]


def ways() -> list[Way]:
    """The six columns. Of a pipeline, the first stage counts: it holds the embedding, and most micro-batches."""
    count = count_parameters(MODEL)
    mlps, layer = MODEL.layers * count.dense_mlp, count.attention + count.dense_mlp + 2 * MODEL.hidden
    first_stage = MODEL.layers // N * layer + count.embedding
    return [
        Way("one GPU", count.total, 1, {}),
        Way("DP 8, ZeRO-3", count.total / N, 1, {}),
        Way("TP 8 with SP", count.total / N, N, {"selective": (1.625, 6.5, 26.0), "full": (0.25, 1.0, 4.0)}),
        Way("PP 8", first_stage, 1, {}),  # in 1F1B it keeps 8 micro-batches of an eighth of the layers
        Way("CP 8", count.total, N, {"selective": (0.066, 0.265, 1.06), "full": (0.004, 0.015, 0.062)}),
        Way("EP 8", count.total - mlps + mlps / N, 1, {}),
    ]


def held(way: Way, widths: dict[str, int]) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state of a rank."""
    return {kind: way.parameters * width for kind, width in widths.items()}


def activations(way: Way, mode: str, seq: int) -> float:
    """Bytes by the formula of the playbook's text, for one sequence: 34 s h L or 2 s h L, divided as `way` does."""
    return gpt.text_activations(gpt.from_model(MODEL), 1, seq, mode) / way.divisor


def our_activations(way: Way, mode: str, seq: int) -> float:
    """Bytes that our Llama keeps: every tensor of step 1's list, with head and loss if the rank has them."""
    saved = saved_activations(MODEL, 1, seq, torch.bfloat16, "fused", mode)
    ends = total_bytes(saved, "head", "log-probabilities") if way.name.startswith("PP") else 0
    return (total_bytes(saved) - ends) / way.divisor


def memory_8b(quick: bool) -> None:
    """PREDICTED: GiB of an 8 B model on a rank, in the playbook's six columns, two rows and three lengths."""
    rows = []
    for mode in MODES:
        for way in ways():
            cells = [f"{sum(held(way, PLOTTED).values()) / GIB:.2f}"]
            for place, seq in enumerate(LENGTHS):
                published = way.published.get(mode)
                cells.append(f"{activations(way, mode, seq) / GIB:.3g}")
                cells.append(f"{published[place]:.3g}" if published else "same")
            whole = [sum(held(way, OURS).values()) + our_activations(way, mode, seq) for seq in LENGTHS]
            rows.append((f"{mode}: {way.name}", *cells, *(f"{each / GIB:.1f}" for each in whole)))
    header = ["", "states"]
    for seq in LENGTHS:
        header += [f"{seq // 1024}k", "published"]
    header += [f"ours, {seq // 1024}k" for seq in LENGTHS]
    title = "predicted: GiB of states (2 + 2 + 8 bytes per parameter) and of activations, and in all for our model"
    print_table(f"{title} (2 + 4 + 12)", header, rows)
    draw_memory()


def draw_memory() -> None:
    """Two rows of six panels with a bar per length; an outline where the playbook draws another bar."""
    from matplotlib.patches import Patch

    figure, axes = new_figure(2, 6, width=12.5, height=6.6, sharey=True, sharex=True)
    for line, mode in zip(axes, MODES):
        for axis, way in zip(line, ways()):
            states, kept = held(way, PLOTTED), [activations(way, mode, seq) / GIB for seq in LENGTHS]
            below = sum(states.values()) / GIB
            for place, size in enumerate(kept):
                top = 0.0
                for kind, height in [(kind, each / GIB) for kind, each in states.items()] + [("activations", size)]:
                    axis.bar(place, height, 0.7, top, color=COLOURS[kind], edgecolor="white", linewidth=0.4)
                    top += height
                drawn = way.published[mode][place] if way.published else size
                if drawn != size:
                    look = {"facecolor": "none", "edgecolor": "black", "linestyle": ":", "linewidth": 1.3}
                    axis.bar(place, drawn, 0.7, below, **look)
                axis.text(place, max(top, below + drawn) + 2, f"{top:.0f}", ha="center", fontsize=9)
            shown = [kept, *([way.published[mode]] if way.published else [])]
            text = ["activations", *(" / ".join(f"{each:.3g}" for each in values) for values in shown)]
            axis.text(1, 203, text[0], ha="center", va="top", fontsize=8.5)
            axis.text(1, 193, text[1], ha="center", va="top", fontsize=9, color=COLOURS["activations"])
            if way.published:
                axis.text(1, 183, f"playbook: {text[2]}", ha="center", va="top", fontsize=8)
            axis.grid(visible=False, axis="x")
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set(ylabel=f"GiB, {mode} recomputation", ylim=(0, 207), yticks=range(0, 161, 40))
    for axis, way in zip(axes[0], ways()):
        axis.set_title(way.name, fontsize=10.5, fontweight="bold")
    for axis in axes[1]:
        axis.set_xticks(range(len(LENGTHS)), [f"{seq // 1024}k" for seq in LENGTHS])
        axis.tick_params(axis="x", length=0)
    handles = [Patch(facecolor=COLOURS[kind], label=kind) for kind in (*PLOTTED, "activations")]
    handles.append(
        Patch(facecolor="none", edgecolor="black", linestyle=":", label="the playbook's bar, where it differs")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9.5)
    figure.suptitle(
        "predicted: an 8 B model, one sequence of 1k, 4k and 16k tokens, bfloat16, GiB on a rank",
        fontsize=10.5,
    )
    save_figure(figure, "memory_8b")
