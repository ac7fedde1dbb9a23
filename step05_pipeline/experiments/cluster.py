"""What one machine cannot measure: predicted for real hardware, or published by others, and labelled so."""

from common.costs.hardware import H100_TFLOPS
from common.costs.networks import NETWORK, NVLINK
from common.drawing.tables import print_table
from common.presets import PRESETS
from step05_pipeline import cost
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Costs, simulate

MODELS = ("llama3-1b", "llama3-8b", "llama3-70b", "llama3-405b")
STAGES = (4, 8, 16)

# Tokens a second and GPU under 1F1B by pp, with m = p - 1 and with m = 32 micro-batches. Measured by the authors of the
# playbook on nodes of 8 H100 and read off its figure "pp_1f1b_scaling", which does not say which model it was.
PUBLISHED_1F1B = {
    "m = p - 1": {2: 7400, 4: 8000, 8: 7900, 16: 6700, 32: 3700},
    "m = 32": {2: 15300, 4: 13900, 8: 11600, 16: 7900, 32: 3700},
}
# Changes from one pp to the next that the same figure prints, from unrounded numbers
PUBLISHED_CHANGES = {"m = p - 1": {16: -14.9, 32: -44.3}, "m = 32": {4: -9.5, 8: -16.1, 16: -32.4, 32: -52.4}}
# GiB of parameters of Llama 3 8B on a GPU, from its figure "pp_memoryusage" (bfloat16): one GPU, and the worst of pp 8
PUBLISHED_8B = {1: 14.96, 8: 2.60}


def condition(quick: bool) -> None:
    """PREDICTED: a message's time over that of the forward it could hide behind, for H100-like numbers."""
    peak, seq = H100_TFLOPS * 1e12, 8192
    print(f"\npeak {H100_TFLOPS:g} TFLOP/s, {NETWORK / 1e9:g} GB/s between nodes, bfloat16, {seq:,} tokens")
    rows = []
    for name in MODELS:
        model = PRESETS[name]
        for p in STAGES:
            layers = model.layers / p
            without = cost.hide_ratio(model.hidden, layers, peak, NETWORK, beta=1)
            corrected = cost.hide_ratio(model.hidden, layers, peak, NETWORK)
            exact = cost.hide_ratio_of(model, seq, layers, peak, NETWORK)
            parameters = layers * cost.stage_parameters(model, 1, 2)  # two operations for each and for each token
            own = cost.message_bytes(1, 1, model.hidden, 2) / NETWORK * peak / (2 * parameters)
            cells = (f"{each:.4f}" for each in (without, corrected, own, exact))
            rows.append((f"{name}, pp {p}", f"{model.hidden:,}", f"{layers:g}", f"{parameters / 1e6:,.0f}", *cells))
    header = ("", "h", "layers a stage", "parameters, 1e6", "A3: elements", "times beta = 2")
    header += ("with its own parameters", "with its own FLOPs")
    print_table("predicted: message / forward of the next stage; at most 1 to hide completely", header, rows)
    rows = []
    for name in MODELS:
        model = PRESETS[name]
        message = cost.message_bytes(1, seq, model.hidden, 2)
        tensor = 2 * 7 * peak / (2 * 2 * model.ffn * NVLINK)  # beta (t - 1) peak / (2 columns bandwidth)
        pipeline = cost.hide_ratio_of(model, seq, model.layers / 8, peak, NETWORK)
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
    rows = []
    for name, values in PUBLISHED_1F1B.items():
        before = None
        for p, speed in values.items():
            m = p - 1 if name == "m = p - 1" else 32
            share = cost.efficiency(cost.bubble_ratio(p, m))
            change = PUBLISHED_CHANGES[name].get(p)
            printed = f"{change:+.1f}%" if change is not None else ""
            alone = f"{share / before - 1:+.1%}" if before else ""
            rows.append((f"{name}: pp {p}", f"{speed:,}", printed, f"{share:.3f}", alone, f"{speed / share:,.0f}"))
            before = share
    header = ("", "tokens/s/GPU", "change", "predicted: 1/(1 + (p-1)/m)", "its change", "tokens/s without the bubble")
    print_table("published (read off a figure, rounded), and the bubble alone", header, rows)
