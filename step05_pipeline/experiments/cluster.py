"""What one machine cannot measure: predicted for real hardware, or published by others, and labelled so."""

from common.costs.hardware import H100_TFLOPS, NETWORK, NVLINK
from common.drawing.figures import SERIES, new_figure, save_figure
from common.drawing.tables import print_table
from common.presets import PRESETS
from step05_pipeline.experiments import predictions
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Costs, simulate

MODELS = ("llama3-1b", "llama3-8b", "llama3-70b", "llama3-405b")
STAGES = (4, 8, 16)


def condition(quick: bool) -> None:
    """PREDICTED: a message's time over that of the forward it could hide behind, for H100-like numbers."""
    peak, seq = H100_TFLOPS * 1e12, 8192
    print(f"\npeak {H100_TFLOPS:g} TFLOP/s, {NETWORK / 1e9:g} GB/s between nodes, bfloat16, {seq:,} tokens")
    rows = []
    for name in MODELS:
        model = PRESETS[name]
        for p in STAGES:
            layers = model.layers / p
            without = predictions.hide_ratio(model.hidden, layers, peak, NETWORK, beta=1)
            corrected = predictions.hide_ratio(model.hidden, layers, peak, NETWORK)
            exact = predictions.hide_ratio_of(model, seq, layers, peak, NETWORK)
            cells = (f"{model.hidden:,}", f"{layers:g}", f"{without:.4f}", f"{corrected:.4f}", f"{exact:.4f}")
            rows.append((f"{name}, pp {p}", *cells))
    header = ("", "h", "layers a stage", "A3: elements", "times beta = 2", "and with its own FLOPs")
    print_table("predicted: message / forward of the next stage; at most 1 to hide completely", header, rows)
    rows = []
    for name in MODELS:
        model = PRESETS[name]
        message = predictions.message_bytes(1, seq, model.hidden, 2)
        tensor = 2 * 7 * peak / (2 * 2 * model.ffn * NVLINK)  # beta (t - 1) peak / (2 columns bandwidth)
        pipeline = predictions.hide_ratio_of(model, seq, model.layers / 8, peak, NETWORK)
        cells = (f"{message / 1e6:.1f}", f"{1e3 * message / NETWORK:.2f}", f"{pipeline:.4f}", f"{tensor:.2f}")
        rows.append((name, *cells))
    header = ("", "a message, MB", "ms between nodes", "pp 8: message / forward", "tp 8: gather / MLP's product")
    print_table("predicted: beside step 4's best case, the gather before gate and up within a node", header, rows)
    rows = []
    for c in (0, 0.05, 0.25, 0.5, 1):
        cells = []
        for name, v in (("afab", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
            schedule = build_schedule(name, 8, 32, v)
            line = simulate(schedule, Costs(F=1 / v, I=1 / v, W=1 / v, communication=c))
            cells.append(f"{line.makespan:g}")
        rows.append((f"{c:g} F", *cells))
    header = ("a message takes", "afab", "1f1b", "interleaved, v 2", "zb-h1")
    print_table(
        "simulated: makespan of 8 ranks, 32 micro-batches, when messages take time (F = I = W = 1)", header, rows
    )


def scaling(quick: bool) -> None:
    """PUBLISHED: tokens a second and GPU under 1F1B by pp, beside what the bubble alone would do (predicted)."""
    rows, theory, rest = [], {}, {}
    for name, values in predictions.PUBLISHED_1F1B.items():
        before = None
        for p, speed in values.items():
            m = p - 1 if name == "m = p - 1" else 32
            share = predictions.efficiency(predictions.bubble_ratio(p, m))
            theory[name, p], rest[name, p] = share, speed / share
            change = predictions.PUBLISHED_CHANGES[name].get(p)
            printed = f"{change:+.1f}%" if change is not None else ""
            alone = f"{share / before - 1:+.1%}" if before else ""
            rows.append((f"{name}: pp {p}", f"{speed:,}", printed, f"{share:.3f}", alone, f"{speed / share:,.0f}"))
            before = share
    header = ("", "tokens/s/GPU", "change", "predicted: 1/(1 + (p-1)/m)", "its change", "tokens/s without the bubble")
    print_table("published (read off a figure, rounded), and the bubble alone", header, rows)

    figure, axes = new_figure(columns=2, width=9.5)
    for (name, values), colour in zip(predictions.PUBLISHED_1F1B.items(), SERIES):
        places = range(len(values))
        first = next(iter(values.values())) / theory[name, 2]
        axes[0].plot(places, values.values(), "o-", color=colour, label=f"published, {name}")
        bubble = [first * theory[name, p] for p in values]
        axes[0].plot(places, bubble, "--", color=colour, label="predicted: the bubble alone")
        axes[1].plot(places, [rest[name, p] for p in values], "o-", color=colour, label=name)
    titles = ("published: tokens per second and GPU", "published / (1/(1 + r)): what is left without the bubble")
    for axis, title in zip(axes, titles):
        axis.set_xticks(range(5), [f"pp {p}" for p in (2, 4, 8, 16, 32)])
        axis.set_ylim(0, 17500)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.axvline(2.5, color="black", linewidth=1, linestyle=":")
        axis.set_title(title, fontsize=9.5, loc="left")
        axis.legend(frameon=False, fontsize=8, loc="lower left")
    axes[0].text(2.54, 16600, "more than one node", fontsize=8)
    save_figure(figure, "scaling")
