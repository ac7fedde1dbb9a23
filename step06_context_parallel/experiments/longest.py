"""How long a sequence fits: measured under a small limit, predicted for a real GPU, and the playbook's own figure."""

import gc
from dataclasses import replace

import torch

from common.counts import count_parameters
from common.drawing.charts import lines
from common.drawing.figures import new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import Training, checked, on_every_case
from common.presets import PRESETS
from common.process_groups import Mesh
from step01_single_gpu.memory_model.gpt import from_model, text_activations
from step01_single_gpu.running.memory_meter import MemoryMeter
from step06_context_parallel import cost, train

SMALL = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": 256}
SMALL |= {"data": "synthetic", "warmup": 1, "micro_batch": 1, "global_batch": 1}
LIMIT = 64 * 2**20  # bytes for what forward and backward of one sequence allocate
GPU, TP = 80 * 2**30, 8  # bytes of an H100; tensor parallelism with sequence parallelism within its node
DEGREES = (1, 2, 4, 8, 16, 32, 64)


def longest(quick: bool) -> None:
    """The longest sequence under a memory limit is cp times that of one rank: measured, and PREDICTED for 80 GiB.

    How many tokens of a rank fit is found on two ranks, since a rank alone holds no other's keys and values.
    """
    trials = 512, 1024
    cases = [SMALL | {"seq_len": 2 * each, "cp": 2} for each in trials]
    low, high = map(max, zip(*on_ranks(2, on_every_case, peak, cases, jobs=len(cases))))
    a_token = (high - low) / (trials[1] - trials[0])
    fitting = int((LIMIT - low) / a_token + trials[0]) // 16 * 16  # tokens of a rank
    rows, measured = [], {}
    for ranks in (1, 2) if quick else (1, 2, 4):
        modes = ("ring", "allgather") if ranks > 1 else ("ring",)
        cases = [SMALL | {"seq_len": ranks * fitting, "cp": ranks, "cp_mode": mode} for mode in modes]
        found = on_ranks(ranks, on_every_case, peak, cases, title="longest", jobs=len(cases))
        for index, mode in enumerate(modes):
            worst = max(each[index] for each in found)
            name = f"cp {ranks}, {mode}" if ranks > 1 else "one rank"
            rows.append((name, f"{ranks * fitting:,}", *compared(LIMIT, worst)))
            if worst > LIMIT:
                raise AssertionError(f"{name}: {worst} bytes")
        measured[ranks] = ranks * fitting
    print_table(
        f"{LIMIT / 2**20:g} MiB for forward and backward; peaks of two ranks with {trials[0]} and {trials[1]}"
        f" tokens each predict that {fitting:,} of a rank fit",
        ("", "longest sequence", "limit, bytes", "measured peak", "ratio"),
        rows,
    )
    predict_longest(measured)


def peak(mesh: Mesh, flags: dict) -> int:
    """On a rank: bytes that forward and backward allocate at most."""
    run = Training(train, *checked(mesh, **flags))
    run.gradients()  # the first step starts what the process needs once
    gc.collect()
    with MemoryMeter("cpu").measure() as measured:
        run.gradients()
    return measured.peak_bytes


def predict_longest(measured: dict[int, int]) -> None:
    """The same for llama3-8b on GPUs of 80 GiB: a table and a plot over cp."""
    name, rows, found = "llama3-8b", [], {}
    model = PRESETS[name]
    states = 18 * count_parameters(model).total / TP  # bfloat16, AdamW; ZeRO-3 divides them by cp
    many = replace(model, kv_heads=model.heads)  # without grouped queries
    variants = [(model, "none", ""), (model, "full", ", full"), (many, "full", f", full, {model.heads} K/V heads")]
    for ranks in DEGREES:
        cells = []
        for shape, recompute, label in variants:
            for mode in ("ring", "allgather"):
                token = cost.bytes_per_token(shape, ranks, mode, TP, recompute)
                tokens = ranks * (GPU - states / ranks) / token
                found.setdefault(mode + label, []).append(tokens)
                cells.append(f"{tokens / 1e3:,.0f}")
        rows.append((f"cp {ranks}", f"{states / ranks / 2**30:.1f}", *cells))
    title = f"{name}, bfloat16, tp {TP} with SP, ZeRO-3 over cp, 80 GiB; full: full recomputation"
    print_table(f"predicted: longest sequence, thousands of tokens: {title}", ("", "GiB of states", *found), rows)
    draw_longest(measured, found)


def draw_longest(measured: dict[int, int], predicted: dict[str, list[float]]) -> None:
    """Left what was measured under the small limit, right what is predicted for a GPU."""
    figure, (left, right) = new_figure(columns=2, width=9.8, height=4.0, width_ratios=(1, 1.8))
    degrees = list(measured)
    fits = {"cp times one rank's": {ranks: measured[1] * ranks for ranks in degrees}, "measured: it fits": measured}
    lines(left, fits, dots=("measured: it fits",), dashed=("cp times one rank's",), log="xy", ticks=degrees, ends=False)
    left.set(xlabel="cp", ylabel="tokens of one sequence")
    left.set_yticks(list(measured.values()), [f"{each:,}" for each in measured.values()])
    left.minorticks_off()
    left.set_title(f"our model, {LIMIT / 2**20:g} MiB per rank", fontsize=10, loc="left")
    names = {"full recomputation": "ring, full", "no recomputation": "ring"}  # and the same with an all-gather
    series = {name: dict(zip(DEGREES, predicted[key])) for name, key in names.items()}
    lines(right, series, log="xy", ticks=list(DEGREES), ends=False)
    right.set_yticks([1e5, 1e6, 1e7], ["100,000", "1 million", "10 million"])
    for tokens, label in ((131072, "128k tokens"), (2**20, "1M tokens")):
        right.axhline(tokens, color="#777777", linewidth=1, linestyle=":")
        right.text(DEGREES[-1], tokens * 0.96, label, fontsize=8.5, va="top", ha="right")
    right.set_title(f"predicted: llama3-8b, tp {TP}, 80 GiB per GPU", fontsize=10, loc="left")
    for axis in (left, right):
        axis.set(xlabel="cp")
        axis.legend(frameon=False, fontsize=9, loc="upper left")
    save_figure(figure, "longest")


# ---- the playbook's figure -------------------------------------------------------------------------------------------

SEQUENCES = (1024, 4096, 16384, 65536, 131072)
# GiB of activations by (tp, cp), one sequence; published: read off the playbook's figure "cp_8Bmemoryusage"
PUBLISHED = {
    (1, 1): (4.25, 17, 68, 272, 544),
    (2, 1): (2.75, 11, 44, 176, 352),
    (2, 4): (0.69, 2.75, 11, 44, 88),
}


def published(quick: bool) -> None:
    """PREDICTED: activations of llama3-8b, beside what the playbook's figure shows."""
    model, rows = PRESETS["llama3-8b"], []
    for (tp, cp), values in PUBLISHED.items():
        for seq, shown in zip(SEQUENCES, values):
            gpt = text_activations(from_model(model), 1, seq // cp, "selective") * (10 + 24 / tp) / 34 / 2**30
            ours = model.layers * cost.kept(model, 1, seq // cp, torch.bfloat16) / tp / 2**30
            full = model.layers * 2 * seq * model.hidden / cp / tp / 2**30
            cells = (f"{shown:g}", f"{gpt:.2f}", f"{shown / gpt:.3f}", f"{ours:.2f}", f"{full:.2f}")
            rows.append((f"tp {tp}, cp {cp}: {seq // 1024}k tokens", *cells))
    header = ("", "published", "GPT formula", "ratio", "ours, SP", "ours, SP, full recomputation")
    print_table("predicted: GiB of activations per rank, one sequence, without scores", header, rows)
    count = count_parameters(model).total
    states = {name: size * count / 2**30 for name, size in (("weights", 2), ("gradients", 2), ("optimizer", 8))}
    cells = [(f"tp {tp}, cp {cp}", *(f"{size / tp:.2f}" for size in states.values())) for tp, cp in PUBLISHED]
    print_table("predicted: GiB of what cp does not divide, as the figure counts it", ("", *states), cells)
