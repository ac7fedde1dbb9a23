"""DeepSeek-V3 in numbers, and the way of one token and of one gradient through eight ranks, as a picture."""

from dataclasses import replace

from common.costs.hardware import H100_TFLOPS
from common.counts import count_flops, count_parameters
from common.drawing.figures import COLOURS, DIMENSIONS, new_figure, save_figure
from common.drawing.tables import print_table
from common.model_config import ModelConfig
from common.presets import PRESETS
from common.process_groups import Degrees

V3, SEQ = PRESETS["deepseek-v3"], 4096
# Section 1 and 4.2 of arXiv:2412.19437: pretraining on 14.8T tokens took 2,664 thousand hours of H800s
HOURS, TOKENS = 2_664_000, 14.8e12
PEAK_BF16 = H100_TFLOPS * 1e12  # an H800 computes as an H100 does; its NVLink is slower

DEGREES = Degrees(pp=2, dp=4, ep=4, experts=True)
RANKS = (0, 2, 4, 6, 1, 3, 5, 7)  # from left to right: those of stage 0, then those of stage 1
PLACE = {rank: index + 0.6 * (index > 3) for index, rank in enumerate(RANKS)}
EXPERTS = {rank: f"{4 * (rank // 2)}-{4 * (rank // 2) + 3}" for rank in RANKS}
# The token is on rank 2 of stage 0, and on rank 3 of stage 1. In each layer its experts are on two ranks
FORWARD = [
    ("box", (2,), "embedding, layer 0", None),
    ("send", 2, (3,), "pp"),
    ("wait", 2, 5.4, None),
    ("box", (3,), "layer 1: attention, router", None),
    ("send", 3, (1, 5), "ep"),
    ("beside", (3,), "shared", None),
    ("box", (1, 5), "1, 2 | 9, 11", None),
    ("back", (1, 5), 3, "ep"),
    ("box", (3,), "layer 2: the same", None),
    ("send", 3, (2,), "pp"),
    ("wait", 3, 5.4, None),
    ("box", (2,), "layer 3: attention, router", None),
    ("send", 2, (4, 6), "ep"),
    ("beside", (2,), "shared", None),
    ("box", (4, 6), "8, 10 | 13, 15", None),
    ("back", (4, 6), 2, "ep"),
    ("box", (2,), "second block: the same; losses", None),
]
BACKWARD = [
    ("box", (2,), "losses, second block", None),
    ("send", 2, (4, 6), "ep"),
    ("box", (4, 6), "8, 10 | 13, 15", None),
    ("back", (4, 6), 2, "ep"),
    ("beside", (2,), "shared", None),
    ("box", (2,), "layer 3: router, attention", None),
    ("send", 2, (3,), "pp"),
    ("wait", 2, 5.4, None),
    ("box", (3,), "layer 2: the same", None),
    ("send", 3, (1, 5), "ep"),
    ("box", (1, 5), "1, 2 | 9, 11", None),
    ("back", (1, 5), 3, "ep"),
    ("beside", (3,), "shared", None),
    ("box", (3,), "layer 1: router, attention", None),
    ("send", 3, (2,), "pp"),
    ("box", (2,), "layer 0, embedding", None),
    ("sum", (0, 2, 4, 6), (1, 3, 5, 7), "dp"),
]
SUMS = "sums over dp_cp, once per step; then each of these\nranks adds the gradients of its two embeddings"


def kv_numbers(shape: ModelConfig) -> tuple[int, int]:
    """What a token's keys and values are, in all heads: numbers expanded, and as a latent with the rotated key."""
    latent = shape.latent
    return shape.heads * (latent.key_width + latent.value_dim), latent.shared_width


def published_mfu(shape: ModelConfig = V3) -> tuple[float, float, float]:
    """Shares of a BF16 peak that the published hours imply: as MFU counts, and without masked pairs; and tokens/s."""
    count, per_gpu = count_flops(shape, SEQ), TOKENS / (HOURS * 3600)
    masked = 3 * count.attention_core * (SEQ - 1) / (2 * SEQ)  # queries do not see later tokens
    shares = (flops / SEQ * per_gpu / PEAK_BF16 for flops in (count.model, count.model - masked))
    return *shares, per_gpu


def deepseek(quick: bool) -> None:
    """What latent attention and the second block hold and send, what the published hours imply, and the picture."""
    whole, shared = kv_numbers(V3)
    lite = 16 * (192 + 128)
    rows = [("DeepSeek-V3", f"{whole:,}", shared, f"{whole / shared:.1f}")]
    rows += [("DeepSeek-V2-Lite", f"{lite:,}", shared, f"{lite / shared:.1f}")]
    print_table("Keys and values of a token, in numbers", ("", "expanded", "shared", "times"), rows)
    block = count_parameters(replace(V3, mtp=1)).total - count_parameters(V3).total
    latent = V3.latent
    absorbed, usual = 2 * latent.kv_rank + latent.rope_dim, latent.key_width + latent.value_dim
    share, unmasked, per_gpu = published_mfu(replace(V3, mtp=1))
    rows = [("parameters, billion", f"{count_parameters(V3).total / 1e9:.1f}")]
    rows += [("of the second block", f"{block / 1e9:.1f}")]
    rows += [("multiplications of a head per pair of tokens", usual), ("the same, absorbed", f"{absorbed:,}")]
    rows += [("published tokens/s of a GPU", f"{per_gpu:,.0f}")]
    rows += [("share of the BF16 peak, second block counted", f"{share:.1%}")]
    rows += [("the same, without masked pairs", f"{unmasked:.1%}")]
    print_table("The model, and its published run", ("", ""), rows)
    _draw()


def _draw() -> None:
    figure, axes = new_figure(1, 2, width=13.5, height=7.6, sharey=True)
    names = "a token, forward", "its gradient, backward"
    for axis, events, name, colour in zip(axes, (FORWARD, BACKWARD), names, ("forward", "backward")):
        axis.set_title(name, loc="left", fontsize=12, fontweight="bold")
        axis.set(xlim=(-0.7, 8.3), ylim=(14.1, -1.6))
        axis.axis("off")
        for rank, x in PLACE.items():
            axis.plot((x, x), (-0.1, 14), color="#DDDDDD", linewidth=6, zorder=0)
            words = f"rank {rank}\nexperts\n{EXPERTS[rank]}"
            axis.text(x, -0.25, words, ha="center", va="bottom", fontsize=8, color="#333333")
        row = 0
        for event in events:
            _draw_event(axis, row + 0.35, event, COLOURS[colour])
            row += event[0] not in ("wait", "beside")
    save_figure(figure, "deepseek")


def _draw_event(axis, y: float, event: tuple, colour: str) -> None:
    """What ranks compute (boxes), send (arrows) or sum (lines); whoever has no box there has other tokens, or waits.

    What is computed `beside` a message is in the row of its arrows, the one above.
    """
    kind, one, other, group = event
    if kind == "beside":
        axis.broken_barh([(PLACE[one[0]] - 0.16, 0.32)], (y - 1.5, 1), facecolor=colour, zorder=2)
        words = {"ha": "center", "va": "center", "fontsize": 7.5, "rotation": 90, "color": "white"}
        axis.text(PLACE[one[0]], y - 1, other, fontweight="bold", **words)
        return
    if kind == "box":
        for rank in one:
            axis.broken_barh([(PLACE[rank] - 0.34, 0.68)], (y - 0.3, 0.6), facecolor=colour, zorder=2)
        words = {"fontsize": 8.5, "va": "center", "fontweight": "bold", "color": "#222222", "zorder": 4}
        if len(one) > 1:
            for rank, text in zip(one, other.split(" | ")):
                axis.text(PLACE[rank], y, text, ha="center", **{**words, "color": "white", "fontsize": 8})
        else:
            axis.text(PLACE[one[0]] + 0.42, y, other, **words)
        return
    if kind == "wait":  # `other` rows long
        axis.broken_barh([(PLACE[one] - 0.2, 0.4)], (y - 0.2, other), facecolor=COLOURS["idle"], edgecolor="#AAAAAA")
        words = {"ha": "center", "va": "center", "fontsize": 8, "rotation": 90, "color": "#333333"}
        axis.text(PLACE[one], y - 0.2 + other / 2, "other micro-batches, or waits", **words)
        return
    ink = DIMENSIONS[group] if group != "ep" else "#B8A100"
    if kind == "sum":
        for ranks in (one, other):
            axis.plot([PLACE[rank] for rank in ranks], [y] * 4, color=ink, linewidth=2.5, marker="o", zorder=3)
        axis.text(PLACE[0], y + 0.25, SUMS, color=ink, fontsize=8.5, va="top")
        return
    pairs = [(one, each) for each in other] if kind == "send" else [(each, other) for each in one]
    for start, end in pairs:
        arrow = {"arrowstyle": "-|>", "color": ink, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
        aside = 0.19 if PLACE[end] > PLACE[start] else -0.19  # of what a rank computes beside
        places = (PLACE[end] - aside, y + 0.35), (PLACE[start] + aside, y - 0.35)
        axis.annotate("", *places, arrowprops=arrow, zorder=3)
    axis.text(8.25, y, group, color=ink, fontsize=9, ha="right", va="center", fontweight="bold")
