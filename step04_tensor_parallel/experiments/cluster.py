"""What one machine cannot measure: predicted for real hardware, or published by others, and labelled so."""

from common.costs.alpha_beta import gather_ratio
from common.costs.hardware import BUS_GB_PER_S, H100_TFLOPS, NETWORK, NODE, NVLINK
from common.counts import count_flops
from common.drawing.figures import new_figure, save_figure
from common.drawing.tables import print_table
from common.presets import PRESETS
from step04_tensor_parallel.experiments import predictions
from step04_tensor_parallel.experiments.tools import COLOURS

DEGREES = (2, 4, 8, 16, 32)

# Tokens a second and GPU of a model of 3 B parameters, and the largest batch that fits, by tp. Measured by the authors
# of the playbook on nodes of 8 H100, read off its figures "tp_scaling" and "tp_sp_scaling" (sequences of 4,096).
PUBLISHED = {
    "tp": {2: (13923, 3), 4: (12421, 8), 8: (10903, 12), 16: (6246, 16), 32: (2146, 20)},
    "tp + SP": {2: (14167, 4), 4: (13460, 10), 8: (10889, 20), 16: (6159, 40), 32: (3610, 100)},
}


def bandwidth(tp: int) -> float:
    """Nominal bytes/s of a GPU in an all-gather over `tp` GPUs: rings over several nodes share the nodes' cards."""
    return NVLINK if tp <= NODE else NODE * NETWORK


def condition(quick: bool) -> None:
    """PREDICTED: an all-gather's time over that of the product behind it, for H100-like numbers."""
    peak = H100_TFLOPS * 1e12
    print(
        f"\npeak {H100_TFLOPS:g} TFLOP/s, NVLink {NVLINK / 1e9:g} GB/s, {NODE} cards of {NETWORK / 1e9:g} GB/s; 2 bytes"
    )
    rows = []
    for name in ("llama3-1b", "llama3-8b", "llama3-70b", "llama3-405b"):
        model = PRESETS[name]
        queries, keys = model.heads * model.head_width, 2 * model.kv_heads * model.head_width
        h, shared = model.hidden, (queries + keys, 2 * model.ffn)
        ratios = [gather_ratio(8, h, peak, bandwidth(8), beta) for beta in (1, 2)]
        ratios += [gather_ratio(8, width, peak, bandwidth(8)) for width in shared]
        ratios += [gather_ratio(8, 12 * h, peak, bandwidth(8), beta) for beta in (1, 2)]
        rows.append((name, f"{h:,}", *(f"{ratio:.2f}" for ratio in ratios)))
    header = ("tp 8", "h", "A3 as printed", "times beta", "q, k, v share", "gate, up share", "cheatsheet", "times beta")
    print_table("predicted: all-gather / the products that share it; up to 1 it hides", header, rows)
    rows = []
    for tp in DEGREES:
        cells = [f"tp {tp}"]
        for each in (bandwidth(tp), 1e9 * BUS_GB_PER_S["all_gather"].get(tp, 0)):
            cells += [f"{each / 1e9:g}", f"{gather_ratio(tp, 1, peak, each):,.0f}"] if each else ["-", "-"]
        rows.append(cells)
    header = ("", "GB/s, nominal", "columns", "GB/s, published", "columns")
    print_table("predicted: columns that share a gather from which on it can hide", header, rows)
    model, tokens, rows = PRESETS["llama3-8b"], 8192, []
    flops = count_flops(model, tokens).model
    for tp in DEGREES:
        stream = 2 * tokens * model.hidden
        sent = model.layers * sum(predictions.block_bytes(predictions.Way(), tp, stream).values())
        times = sent / bandwidth(tp), flops / tp / peak
        cells = (f"{sent / 1e9:.1f}", f"{1e3 * times[0]:.0f}", f"{1e3 * times[1]:.0f}", f"{times[0] / times[1]:.2f}")
        rows.append((f"tp {tp}", *cells))
    header = ("", "GB sent by the blocks", "ms at that bandwidth", "ms of computation at peak", "ratio")
    print_table(
        f"predicted: llama3-8b, a micro-batch of {tokens:,} tokens, SP, overlap, bfloat16, a rank", header, rows
    )


def scaling(quick: bool) -> None:
    """PUBLISHED: tokens a second and GPU against tp, measured by the playbook's authors on nodes of 8 H100."""
    rows, changes = [], {}
    for name, values in PUBLISHED.items():
        before = None
        for tp, (speed, batch) in values.items():
            change = f"{speed / before - 1:+.1%}" if before else ""
            changes[name, tp], before = change, speed
            rows.append((f"{name} {tp}", f"{speed:,}", change, batch))
    print_table("published: 3 B parameters", ("", "tokens/s/GPU", "against half the tp", "largest batch"), rows)

    figure, axes = new_figure(columns=2, width=9.6)
    places = range(len(DEGREES))
    for number, (name, colour) in enumerate(zip(PUBLISHED, (COLOURS["no SP"], COLOURS["SP, overlap"]))):
        offset = (number - 0.5) * 0.38
        speeds, batches = zip(*PUBLISHED[name].values())
        axes[0].bar([place + offset for place in places], speeds, width=0.36, color=colour, label=name)
        axes[1].bar([place + offset for place in places], batches, width=0.36, color=colour, label=name)
        for place, tp, speed, batch in zip(places, DEGREES, speeds, batches):
            label = f"{float(changes[name, tp][:-1]):.0f}%" if changes[name, tp] else ""
            axes[0].text(place + offset, speed + 150, label, ha="center", fontsize=9)
            axes[1].text(place + offset, batch + 1, batch, ha="center", fontsize=9.5)
    for axis, title in zip(axes, ("tokens/s per GPU", "largest batch that fits, sequences")):
        axis.axvline(2.5, color="black", linewidth=1, linestyle="--")
        axis.set_xticks(places, [f"tp {tp}" for tp in DEGREES])
        axis.set_title(f"published: {title}", fontsize=11.5, loc="left")
        axis.grid(visible=False, axis="x")
    axes[0].text(2.54, 14000, "more than one node", fontsize=10)
    axes[0].yaxis.set_major_formatter("{x:,.0f}")
    axes[1].legend(frameon=False, loc="upper left")
    save_figure(figure, "scaling")
