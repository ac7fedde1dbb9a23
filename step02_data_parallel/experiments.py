"""The claims of step 2, predicted and measured.

    python -m step02_data_parallel.experiments                   # all of them, 3 to 4 minutes on 2 cores
    python -m step02_data_parallel.experiments --only overlap    # one: see EXPERIMENTS below
    python -m step02_data_parallel.experiments --quick           # fewer steps

Each prints a table *predicted, measured, ratio*; figures go into step02_data_parallel/figures/. Ranks are
gloo processes on this machine. "Measured" is a clock, the trace, or a counter of the kernel; what only a
cluster can show is called predicted.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from common import compare
from common.config import TrainConfig
from common.counts import count_parameters
from common.data import load_batches
from common.model import Decoder, cross_entropy_sum
from common.parameter import materialise
from common.presets import PRESETS
from common.process_groups import Mesh
from common.trace_report import StepRow, Trace, difference, length, mean, read_trace, report
from common.trace_timeline import draw_timelines
from step01_single_gpu import memory
from step02_data_parallel import batch_recipe, predictions, wire
from step02_data_parallel.data_parallel import DataParallel
from step02_data_parallel.local_ranks import on_ranks, train_quietly
from step02_data_parallel.train import train

FIGURES = Path(__file__).parent / "figures"
MODES = ("naive", "overlap", "bucket")

# 5.3 million parameters in 57 tensors: 21 MB of gradients
MODEL = {"layers": 6, "hidden": 256, "ffn": 768, "heads": 4, "kv_heads": 4, "data": "synthetic", "warmup": 1}
LINK = "2000,0.2"  # 2 ms a message, 0.2 GB/s: to a backward of 0.2 s what a real network is to that of a large model
BUCKET_MB = 2.5  # for this model what 25 MB are for one ten times its size


def row(name: str, predicted: float, measured: float, form: str = ",.0f") -> None:
    """One line of a table."""
    ratio = f"{measured / predicted:8.4f}" if abs(predicted) > 1e-9 else f"{'-':>8}"
    print(f"  {name:<44} {predicted:>14{form}} {measured:>14{form}} {ratio}")


def heading(title: str, unit: str) -> None:
    print(f"\n{title}\n  {unit:<44} {'predicted':>14} {'measured':>14} {'ratio':>8}")


def tensor_sizes(**flags) -> tuple[list[int], list[float]]:
    """Bytes of each parameter's gradient, in forward order, and what its backward costs."""
    model = Decoder(TrainConfig(**flags).model_config)
    names, parameters = zip(*model.named_parameters())
    costs = [0.0 if name == "embedding.weight" else float(p.numel()) for name, p in zip(names, parameters)]
    return [4 * parameter.numel() for parameter in parameters], costs


def run_jobs(mesh: Mesh, done: Callable, jobs: list[tuple[str, dict]], folder: str) -> list[dict]:
    """On a rank: one training run after another; what the kernel counted meanwhile."""
    counted = []
    for name, flags in jobs:
        before = {}
        for target in (before, counted.append):
            if mesh.world.size > 1:
                dist.barrier()
            numbers = {"sockets": wire.sent_by_me(), "loopback": wire.loopback()}
            if target is before:
                before.update(numbers)
                if mesh.world.size > 1:
                    dist.barrier()  # everybody has read, before anybody sends
                train_quietly(train, mesh, **flags, run_dir=f"{folder}/{name}")
            else:
                target({key: (value or 0) - (before[key] or 0) for key, value in numbers.items()})
        done()
    return counted


# ---- numbers of all-reduces, bytes -----------------------------------------------------------------------------------


def traffic(quick: bool) -> None:
    """How many all-reduces and how many bytes: by formula, by the log of calls, by the kernel's counters."""
    steps = 2 if quick else 4
    shape = MODEL | {"seq_len": 64, "steps": steps, "trace": f"0:{steps - 1}", "bucket_mb": BUCKET_MB}
    sizes, _ = tensor_sizes(**MODEL)
    for ranks in (2, 4):
        jobs = [(mode, shape | {"dp_mode": mode, "micro_batch": 1, "global_batch": ranks}) for mode in MODES]
        for steps_of_micro_batches in (2, 4):
            flags = {"micro_batch": 1, "global_batch": ranks * steps_of_micro_batches}
            jobs.append((f"bucket, {steps_of_micro_batches} micro-batches", shape | flags))
        with tempfile.TemporaryDirectory() as folder:
            counted = on_ranks(ranks, run_jobs, jobs, folder, title="traffic", jobs=len(jobs))
            logged = {name: gradient_calls(read_trace(Path(folder, name))) for name, _ in jobs}
        predicted = predictions.all_reduce_bytes(sum(sizes), ranks)

        heading(f"{ranks} ranks: all-reduces of gradients in a step", "mode")
        for name, _ in jobs:
            limit = BUCKET_MB * 1e6 if name.startswith("bucket") else 0
            row(name, len(predictions.fill(sizes, limit)), logged[name][0] / steps)
        heading(f"{ranks} ranks: bytes that a rank sends in a step, 2(N-1)/N x {sum(sizes):,}", "mode, counted by")
        for index, name in enumerate(MODES):
            row(f"{name}: log of calls", predicted, logged[name][1] / steps)
            row(f"{name}: its TCP sockets", predicted, counted[0][index]["sockets"] / steps)
            row(f"{name}: loopback / ranks", predicted, counted[0][index]["loopback"] / steps / ranks)
        heading(f"{ranks} ranks: bytes that a rank sends for each of its sequences", "micro-batches a step")
        for index, accumulation in ((2, 1), (3, 2), (4, 4)):
            row(str(accumulation), predicted / accumulation, counted[0][index]["sockets"] / steps / accumulation)
    print("  The log holds model bytes. Sockets: payload alone, the few bytes of loss and norm included; the")
    print("  surplus is gloo's own. Loopback: headers, acknowledgements and everybody else's traffic as well.")


def gradient_calls(trace: Trace) -> tuple[int, int]:
    """Number and bytes of rank 0's gradient all-reduces in the trace (the other ones carry a single number)."""
    calls = [span["args"] for span in trace.spans[0] if span["cat"] == "communication"]
    calls = [arguments for arguments in calls if arguments["elements"] > 1]
    return len(calls), sum(arguments["bytes"] for arguments in calls)


# ---- overlap ---------------------------------------------------------------------------------------------------------


def overlap(quick: bool) -> None:
    """Naive, hook and bucket over a slow link: exposed communication, overlap share, step time, three timelines."""
    traces = traced_runs({mode: {"dp_mode": mode, "bucket_mb": BUCKET_MB} for mode in MODES}, "overlap", quick)
    sizes, costs = tensor_sizes(**MODEL)
    link = TrainConfig(link=LINK).link_model
    rows = {mode: quietest(trace) for mode, trace in traces.items()}
    backward = {mode: backward_seconds(trace) for mode, trace in traces.items()}
    expected = {
        mode: predictions.overlap(sizes, costs, backward[mode], 2, link, mode, BUCKET_MB * 1e6).with_scalars(2, link)
        for mode in MODES
    }
    shown = ", ".join(f"{1e3 * seconds:.0f}" for seconds in backward.values())
    print(f"\n2 ranks, --link {LINK}; the predictions start from the backwards measured: {shown} ms")
    heading("communication, ms a step", "mode")
    for mode in MODES:
        row(mode, 1e3 * expected[mode].communication, 1e3 * rows[mode].communication_s, ".1f")
    heading("exposed communication, ms a step", "mode")
    for mode in MODES:
        row(mode, 1e3 * expected[mode].exposed, 1e3 * rows[mode].exposed_s, ".1f")
    heading("overlap share: communication covered by computation", "mode")
    for mode in MODES:
        row(mode, expected[mode].overlap_share, rows[mode].overlap_share, ".1%")
    heading("step time, ms: its computation and the predicted exposed communication", "mode")
    for mode in MODES:
        predicted = rows[mode].step_time_s - rows[mode].exposed_s + expected[mode].exposed
        row(mode, 1e3 * predicted, 1e3 * rows[mode].step_time_s, ".0f")
    titles = {
        "naive": "naive: {} all-reduces, all after the backward",
        "overlap": "overlap: {} all-reduces, each as soon as its gradient is there",
        "bucket": f"bucket: {{}} all-reduces of up to {BUCKET_MB:g} MB",
    }
    panels = [
        (titles[mode].format(gradient_calls(trace)[0] // len(trace.steps)), trace) for mode, trace in traces.items()
    ]
    draw_timelines(panels, FIGURES / "timelines.png", quiet_step(traces))
    finish_figure("timelines")


def traced_runs(variants: dict[str, dict], title: str, quick: bool) -> dict[str, Trace]:
    """One short traced run on two ranks over the slow link for each variant."""
    steps = 5 if quick else 8
    shape = MODEL | {"seq_len": 256, "micro_batch": 2, "global_batch": 4, "steps": steps, "trace": f"1:{steps - 1}"}
    jobs = [(name, shape | {"link": LINK} | flags) for name, flags in variants.items()]
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(2, run_jobs, jobs, folder, title=title, jobs=len(jobs))
        return {name: read_trace(Path(folder, name)) for name, _ in jobs}


def quiet_step(traces: dict[str, Trace]) -> int:
    """The step to draw: the one that took least time over all runs."""
    steps = next(iter(traces.values())).steps
    return min(steps, key=lambda step: sum(mean(report(trace, step)).step_time_s for trace in traces.values()))


def quietest(trace: Trace) -> StepRow:
    """The mean over ranks of the shortest step: other work on the machine adds to a step and takes nothing from it."""
    return min((mean(report(trace, step)) for step in trace.steps), key=lambda each: each.step_time_s)


def backward_seconds(trace: Trace) -> float:
    """Computation of the backward in the shortest step, mean over ranks: without what it was blocked for."""
    step, lengths = quietest(trace).step, []
    for rank in trace.ranks:
        spans = [span for span in trace.spans[rank] if span["name"] == "backward" and span["args"]["step"] == step]
        phases = [(span["ts"], span["ts"] + span["dur"]) for span in spans]
        lengths.append(1e-6 * length(difference(phases, trace.intervals(rank, "issue", "wait"))))
    return statistics.mean(lengths)


def bucket_size(quick: bool) -> None:
    """Small buckets pay latency, large ones start late: exposed communication against the size of a bucket."""
    megabytes = (0.1, 1.0, 2.5, 25.0) if quick else (0.1, 0.3, 1.0, 2.5, 5.0, 10.0, 25.0)
    traces = traced_runs({f"{size:g}": {"bucket_mb": size} for size in megabytes}, "bucket_size", quick)
    sizes, costs = tensor_sizes(**MODEL)
    backward = min(backward_seconds(trace) for trace in traces.values())
    link = TrainConfig(link=LINK).link_model

    def expected(size: float) -> predictions.Overlap:
        return predictions.overlap(sizes, costs, backward, 2, link, "bucket", size * 1e6).with_scalars(2, link)

    heading(f"exposed communication, ms a step, 2 ranks, --link {LINK}", "bucket size in MB (buckets)")
    measured = {}
    for size in megabytes:
        measured[size] = quietest(traces[f"{size:g}"])
        count = len(predictions.fill(sizes, size * 1e6))
        row(f"{size:g} ({count})", 1e3 * expected(size).exposed, 1e3 * measured[size].exposed_s, ".1f")

    figure, axes = new_figure()
    fine = [10 ** (-1 + index / 60 * 2.4) for index in range(61)]
    axes.plot(fine, [1e3 * expected(size).exposed for size in fine], color="C0", label="predicted: alpha-beta model")
    axes.plot(megabytes, [1e3 * measured[size].exposed_s for size in megabytes], "o", color="C1", label="measured")
    axes.set(xscale="log", xlabel="bucket size, MB", ylabel="exposed communication, ms a step", ylim=(0, None))
    axes.set_title(f"5.3 M parameters, 2 ranks, --link {LINK}", fontsize=10, loc="left")
    axes.legend(frameon=False)
    finish_figure("bucket_size", figure)


# ---- the same gradients, the same curves -----------------------------------------------------------------------------


def gradients(quick: bool) -> None:
    """Gradients of every mode against one process that takes the whole global batch at once, in float64."""
    heading("largest ||a - b|| / ||b|| of any parameter's gradient, float64", "ranks, mode, micro-batches")
    for ranks in (2,) if quick else (2, 4):
        for name, worst in on_ranks(ranks, gradient_differences, title="gradients")[0].items():
            row(f"{ranks} ranks, {name}", 0.0, worst, ".1e")


def gradient_differences(mesh: Mesh, done: Callable) -> dict[str, float]:
    """On a rank: the largest relative difference for each mode and number of micro-batches."""
    result, samples = {}, 8
    config = TrainConfig(**MODEL | {"hidden": 64, "ffn": 192}, seq_len=64, global_batch=samples, dtype="float64")
    batches = load_batches(config)

    def fresh() -> Decoder:
        model = Decoder(config.model_config)
        materialise(model, config.seed, torch.float64, mesh.device)
        return model

    reference = fresh()
    tokens, targets = batches.micro_batch(0, 0, samples)
    (cross_entropy_sum(reference(tokens), targets) / batches.target_tokens).backward()
    for mode in MODES:
        for accumulation in (1, 2):
            model = fresh()
            parallel = DataParallel(list(model.parameters()), mesh.dp_cp, mode, 0.1)
            for index in range(accumulation):
                size = samples // (accumulation * mesh.dp.size)
                tokens, targets = batches.micro_batch(0, index, size, mesh.dp.rank, mesh.dp.size)
                with parallel.no_sync(index < accumulation - 1):
                    (cross_entropy_sum(model(tokens), targets) / batches.target_tokens).backward()
            pairs = zip(parallel.finish(), reference.parameters())
            differences = [((mine - whole.grad).norm() / whole.grad.norm()).item() for mine, whole in pairs]
            result[f"{mode}, {accumulation}"] = max(differences)
    done()
    return result


def curves(quick: bool) -> None:
    """The default run on 1, 2 and 4 ranks: the same loss and gradient norm, up to the rounding of sums."""
    runs = {"float32": 10 if quick else 40, "float64": 10}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2, 4):
            jobs = [(f"{dtype}/dp {ranks}", {"dtype": dtype, "steps": steps}) for dtype, steps in runs.items()]
            on_ranks(ranks, run_jobs, jobs, folder, title="curves", jobs=len(jobs))
        for dtype, steps in runs.items():
            rows = compare.compare([compare.read_run(Path(folder, dtype, f"dp {ranks}")) for ranks in (1, 2, 4)])
            print(f"\nthe default run in {dtype}, {steps} steps\n{compare.table(rows)}")
            if dtype == "float32":
                compare.plot(rows, FIGURES / "curves.png")
                finish_figure("curves")


# ---- what only a cluster can show ------------------------------------------------------------------------------------

# Tokens/s and GPU of a 1.34 B model, sequences of 4,096 tokens, 256 of them a step: read off the playbook's
# figure "dp_scaling". Its points mix micro-batches of 2 (8 and 128 GPUs) and 1.
PUBLISHED = {8: (40150, 2), 16: (37610, 1), 32: (35368, 1), 64: (31112, 1), 128: (26446, 2), 256: (15700, 1)}
CLUSTER = """torchrun --nnodes 32 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint $HEAD:29500 \\
    step02_data_parallel/train.py --model llama3-1b --seq-len 4096 --micro-batch 1 --global-batch 256 \\
    --dtype bfloat16 --recompute selective --steps 20 --run-dir runs/dp256 --trace 15:17"""


def scaling(quick: bool) -> None:
    """PREDICTED strong scaling on H100 nodes beside published numbers: nothing here is measured by this project."""
    parameters, seq_len, samples = 1.34e9, 4096, 256
    alone, micro_batch = PUBLISHED[8]
    reached = 6 * parameters * alone  # FLOP/s, without attention
    print("\nstrong scaling, 1.34 B parameters, 256 x 4,096 tokens a step, tokens/s and GPU")
    print(
        f"  {'GPUs':>6} {'published':>10} {'predicted, 2 bytes':>19} {'4 bytes a gradient':>19}   hidden from (tokens)"
    )
    predicted = {2: [], 4: []}
    for gpus, (published, micro_batch) in PUBLISHED.items():
        for width, values in predicted.items():
            shape = (gpus, samples, micro_batch, seq_len)
            values.append(predictions.tokens_per_second_per_gpu(*shape, alone, reached, width))
        needed = predictions.tokens_to_hide(gpus, batch_recipe.all_reduce_bandwidth(gpus), reached, 2)
        print(f"  {gpus:>6} {published:>10,} {predicted[2][-1]:>19,.0f} {predicted[4][-1]:>19,.0f}", end="")
        print(f"   {needed:>8,.0f} of {micro_batch * seq_len:,}")
    print("  Predicted: 8 GPUs' speed, and what the last backward cannot hide of one all-reduce at the playbook's own")
    print("  bandwidths. It has no optimizer step, no waiting for the slowest rank and no kernels that share")
    print("  the GPU with NCCL's, so it is an upper bound. To measure it, on a cluster:")
    print("    " + CLUSTER.replace("\n", "\n    "))

    figure, axes = new_figure()
    axes.plot(list(PUBLISHED), [each for each, _ in PUBLISHED.values()], "o-", color="C1", label="published (playbook)")
    for width, style in ((2, "-"), (4, "--")):
        label = f"predicted bound, {width} bytes a gradient"
        axes.plot(list(PUBLISHED), predicted[width], style, color="C0", label=label)
    axes.set(xscale="log", xlabel="GPUs", ylabel="tokens/s and GPU", ylim=(0, None))
    axes.set_xticks(list(PUBLISHED), list(PUBLISHED))
    axes.minorticks_off()
    axes.set_title("1.34 B model, 256 sequences of 4,096 tokens a step", fontsize=10, loc="left")
    axes.legend(frameon=False)
    finish_figure("scaling", figure)


def journey(quick: bool) -> None:
    """PREDICTED memory of one GPU under data parallelism, whatever the number of GPUs: what sends us on to step 3."""
    lengths, models = (1024, 2048, 4096, 8192, 16384), ("llama3-1b", "llama3-8b", "llama3-70b")
    figure, axes = new_figure(columns=3, width=9)
    print("\nGB on each GPU, bfloat16, micro-batch 1, selective recomputation: states alone, and with activations")
    print(f"  {'':<12}{'states':>9}" + "".join(f"{length:>9,}" for length in lengths))
    for name, axis in zip(models, axes):
        model, dtype = PRESETS[name], torch.bfloat16
        held = {key: value / 1e9 for key, value in memory.states(model, dtype).items()}
        saved = [memory.saved_activations(model, 1, length, dtype, recompute="selective") for length in lengths]
        activations = [memory.total_bytes(each) / 1e9 for each in saved]
        total = sum(held.values())
        print(f"  {name:<12}{total:>9,.1f}" + "".join(f"{total + each:>9,.1f}" for each in activations))
        places, bottom = range(len(lengths)), [0.0] * len(lengths)
        for part, heights in [(key, [value] * len(lengths)) for key, value in held.items()] + [
            ("activations", activations)
        ]:
            axis.bar(places, heights, bottom=bottom, label=part, width=0.7)
            bottom = [low + height for low, height in zip(bottom, heights)]
        axis.axhline(80, color="black", linewidth=1, linestyle="--")
        axis.set_xticks(places, [f"{length // 1024}k" for length in lengths])
        axis.set_title(f"{name}, {count_parameters(model).total / 1e9:.2f} B", fontsize=10, loc="left")
    axes[0].set_ylabel("GB on each GPU")
    axes[1].set_xlabel("sequence length (dashed: 80 GB)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    finish_figure("journey", figure)


# ---- the command -----------------------------------------------------------------------------------------------------


def new_figure(columns: int = 1, width: float = 6.5):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots(1, columns)
    for axis in [axes] if columns == 1 else axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes


def finish_figure(name: str, figure=None) -> None:
    """Save `figure` unless that is done, and shrink the file: 64 colours are enough for lines and bars."""
    from PIL import Image

    path = FIGURES / f"{name}.png"
    if figure is not None:
        figure.savefig(path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"  figure: {path.relative_to(Path(__file__).parent.parent)}")


EXPERIMENTS = {each.__name__: each for each in (traffic, overlap, bucket_size, gradients, curves, scaling, journey)}


def main(argv: list[str] | None = None) -> int:
    """Run the experiments. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m step02_data_parallel.experiments")
    parser.add_argument("--only", choices=EXPERIMENTS, help="one of them")
    parser.add_argument("--quick", action="store_true", help="fewer steps, rougher numbers")
    options = parser.parse_args(argv)
    FIGURES.mkdir(exist_ok=True)
    for name in [options.only] if options.only else EXPERIMENTS:
        print(f"\n== {name}: {EXPERIMENTS[name].__doc__.splitlines()[0]}", flush=True)
        EXPERIMENTS[name](options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
