"""How many all-reduces, how many bytes, and whether the result is the same."""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.config import TrainConfig
from common.costs.alpha_beta import all_reduce_bytes, fill_buckets
from common.data.batches import load_batches
from common.drawing.tables import print_comparison
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import BUCKET_MB, MODEL, overlay, reference_gradients, run_jobs, tensor_sizes
from common.model import cross_entropy_sum
from common.process_groups import Mesh
from common.tracing.report import Trace, read_trace
from step02_data_parallel.train import build, train

MODES = ("naive", "overlap", "bucket")


def traffic(quick: bool) -> None:
    """How many all-reduces and how many bytes: by formula, by the log of calls, by the kernel's counters."""
    steps = 2 if quick else 4
    shape = MODEL | {"seq_len": 64, "steps": steps, "trace": f"0:{steps - 1}", "bucket_mb": BUCKET_MB}
    sizes, _ = tensor_sizes()
    for ranks in (2, 4):
        jobs = [(mode, shape | {"dp_mode": mode, "micro_batch": 1, "global_batch": ranks}) for mode in MODES]
        for accumulation in (2, 4):
            flags = {"dp_mode": "bucket", "micro_batch": 1, "global_batch": ranks * accumulation}
            jobs.append((f"bucket, {accumulation} micro-batches", shape | flags))
        with tempfile.TemporaryDirectory() as folder:
            counted = on_ranks(ranks, run_jobs, jobs, folder, train, title="traffic", jobs=len(jobs))[0]
            logged = {name: gradient_calls(read_trace(Path(folder, name))) for name, _ in jobs}
        predicted = all_reduce_bytes(sum(sizes), ranks)

        rows = []
        for name, _ in jobs:
            limit = BUCKET_MB * 1e6 if name.startswith("bucket") else 0
            rows.append((name, len(fill_buckets(sizes, limit)), logged[name][0] / steps))
        print_comparison(f"{ranks} ranks: all-reduces of gradients in a step", "mode", rows)
        rows = []
        for index, name in enumerate(MODES):
            rows.append((f"{name}: log of calls", predicted, logged[name][1] / steps))
            rows.append((f"{name}: its TCP sockets", predicted, counted[index]["sockets"] / steps))
            rows.append((f"{name}: loopback / ranks", predicted, counted[index]["loopback"] / steps / ranks))
        title = f"{ranks} ranks: bytes that a rank sends in a step, 2(N-1)/N x {sum(sizes):,}"
        print_comparison(title, "mode, counted by", rows)
        rows = []
        for index, accumulation in ((2, 1), (3, 2), (4, 4)):
            measured = counted[index]["sockets"] / steps / accumulation
            rows.append((str(accumulation), predicted / accumulation, measured))
        title = f"{ranks} ranks: bytes that a rank's sockets send for each of its sequences"
        print_comparison(title, "micro-batches a step", rows)
    print("  The log holds model bytes. Sockets: payload alone, the few bytes of loss and norm included; the")
    print("  surplus is gloo's own. Loopback: headers, acknowledgements and everybody else's traffic as well.")


def gradient_calls(trace: Trace) -> tuple[int, int]:
    """Number and bytes of rank 0's gradient all-reduces in the trace (the other ones carry a single number)."""
    calls = [call for call in trace.calls(0) if call["elements"] > 1]
    return len(calls), sum(call["bytes"] for call in calls)


def gradients(quick: bool) -> None:
    """Gradients of every mode against one process that takes the whole global batch at once, in float64."""
    rows = []
    for ranks in (2,) if quick else (2, 4):
        for name, worst in on_ranks(ranks, gradient_differences, title="gradients")[0].items():
            rows.append((f"{ranks} ranks, {name}", 0.0, worst))
    title = "largest ||a - b|| / ||b|| of any parameter's gradient, float64"
    print_comparison(title, "ranks, mode, micro-batches", rows, ".1e")


def gradient_differences(mesh: Mesh, done: Callable) -> dict[str, float]:
    """On a rank: the largest relative difference for each mode and number of micro-batches."""
    result, samples = {}, 8
    config = TrainConfig(**MODEL | {"hidden": 64, "ffn": 192}, seq_len=64, global_batch=samples, dtype="float64")
    config.resolve_and_check(mesh.world.size)
    batches = load_batches(config, mesh)
    reference = reference_gradients(config, batches)
    for mode in MODES:
        for accumulation in (1, 2):
            model, parallel, _ = build(dataclasses.replace(config, dp_mode=mode, bucket_mb=0.1), mesh)
            for index in range(accumulation):
                size = samples // (accumulation * mesh.dp.size)
                tokens, targets = batches.micro_batch(0, index, size, mesh.dp.rank, mesh.dp.size)
                with parallel.no_sync(index < accumulation - 1):
                    (cross_entropy_sum(model(tokens), targets) / batches.target_tokens).backward()
            pairs = [(mine, reference[p.spec.name]) for p, mine in zip(parallel.parameters, parallel.finish())]
            differences = [((mine - whole).norm() / whole.norm()).item() for mine, whole in pairs]
            result[f"{mode}, {accumulation}"] = max(differences)
    done()
    return result


def curves(quick: bool) -> None:
    """The default run on 1, 2 and 4 ranks: the same loss and gradient norm, up to the rounding of sums."""
    overlay(train, {f"dp {ranks}": (ranks, {}) for ranks in (1, 2, 4)}, quick)
