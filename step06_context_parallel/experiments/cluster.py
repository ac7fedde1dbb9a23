"""What one machine cannot measure: predicted for real hardware, and labelled so."""

from common.costs.alpha_beta import Player
from common.costs.hardware import H100_TFLOPS, NETWORK, NVLINK
from common.counts import count_parameters
from common.drawing.figures import SERIES, new_figure, save_figure
from common.drawing.tables import print_table
from common.link import Link
from common.presets import PRESETS
from step06_context_parallel.experiments import predictions
from step06_context_parallel.experiments.tools import MODES

PEAK = H100_TFLOPS * 1e12
BANDWIDTHS = {"NVLink": NVLINK, "InfiniBand": NETWORK}
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b")
ALPHA = 10e-6  # seconds a message


def condition(quick: bool) -> None:
    """PREDICTED: tokens of a rank from which on the ring hides behind attention, for H100-like numbers."""
    print(
        f"\npeak {H100_TFLOPS:g} TFLOP/s; to the next rank: NVLink 450 GB/s, InfiniBand 50 GB/s; bfloat16, float32 sums"
    )
    rows = []
    for name in ("8 B without grouped queries", *MODELS):
        model = PRESETS[name if name in PRESETS else MODELS[0]]
        share = model.kv_heads / model.heads if name in PRESETS else 1.0
        for link, bandwidth in BANDWIDTHS.items():
            least = [
                predictions.tokens_to_hide(PEAK, bandwidth, share, causal, backward)
                for causal, backward in ((True, False), (True, True), (False, False))
            ]
            cells = (f"{share:.4g}", *(f"{each:,.0f}" for each in least), f"{131072 / max(least[:2]):.1f}")
            rows.append((f"{name}, {link}", *cells))
    header = ("", "h_kv / h", "forward", "backward", "forward, not causal", "cp up to which 128k tokens hide")
    print_table("predicted: tokens per rank from which on a hop hides; at half the peak, half as many", header, rows)
    for name in ("llama3-8b", "llama3-405b"):
        compare_modes(name, 131072)
    draw_condition()


def compare_modes(name: str, tokens: int) -> None:
    """Exposed communication of one layer, in ms and as a share of what the layer computes."""
    model = PRESETS[name]
    h, h_kv, linear = model.heads * model.head_width, model.kv_heads * model.head_width, count_parameters(model)
    rows = []
    for ranks in (2, 4, 8, 16, 32):
        link, n = Link(ALPHA, BANDWIDTHS["InfiniBand"]), tokens // ranks
        products = 2 * n * (linear.attention + linear.dense_mlp) / PEAK  # seconds of a forward
        cells, hops = (
            [],
            [predictions.hop_pairs("zigzag", 0, hop, tokens, ranks) * 4 * h / PEAK for hop in range(ranks)],
        )
        compute = 3 * products + 3.5 * sum(hops)
        for mode in MODES:
            blocked = 0.0
            for phase, cost in (("forward", 1.0), ("backward", 2.5)):
                player = Player(ranks, link)
                repeated = max(1, ranks // model.kv_heads) if mode == "ulysses" else 1
                sizes = n * h_kv * repeated * 2, n * h_kv * 4
                groups = model.heads / model.kv_heads / repeated
                predictions.play_layer(mode, phase, player, [cost * hop for hop in hops], *sizes, groups)
                blocked += player.blocked
            cells += [f"{1e3 * blocked:.2f}", f"{blocked / compute:.1%}"]
        rows.append((f"cp {ranks}, {n:,} tokens per rank", f"{1e3 * compute:.1f}", *cells))
    header = ("", "computes, ms", *(head for mode in MODES for head in (mode, "share")))
    title = f"exposed ms of one layer of {name}, {tokens:,} tokens, between nodes, forward and backward, without tp"
    print_table(f"predicted: {title}", header, rows)


def draw_condition() -> None:
    """Transfer over computation of a hop against the tokens of a rank."""
    figure, axis = new_figure(width=7.5, height=4.0)
    tokens = [2**power for power in range(8, 18)]
    for number, name in enumerate(MODELS[:2]):
        model = PRESETS[name]
        for (link, bandwidth), style in zip(BANDWIDTHS.items(), ("--", "-")):
            least = predictions.tokens_to_hide(PEAK, bandwidth, model.kv_heads / model.heads, backward=True)
            label = f"{name}, {link}: {least:,.0f} tokens"
            axis.plot(tokens, [least / each for each in tokens], style, color=SERIES[number], label=label)
            axis.plot([least], [1], "o", color=SERIES[number], markersize=6)
    axis.axhspan(0.01, 1, color="#009E73", alpha=0.08)
    axis.axhline(1, color="black", linewidth=1)
    axis.text(tokens[0] * 1.15, 0.027, "hidden behind the computation", fontsize=9.5)
    axis.text(tokens[-1] / 1.15, 1.15, "exposed", fontsize=9.5, ha="right")
    axis.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="transfer / computation of a hop")
    axis.set(xlim=(tokens[0], tokens[-1]), ylim=(0.02, 60))
    axis.set_xticks(tokens[::2], [f"{each // 1024}k" if each >= 1024 else each for each in tokens[::2]])
    axis.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
    axis.minorticks_off()
    axis.set_title("predicted: a hop of the causal ring, backward, H100 at its peak", fontsize=10, loc="left")
    axis.legend(frameon=False, fontsize=8.5)
    save_figure(figure, "condition")
