"""How many all-reduces, how many bytes, and whether the result is the same."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from common.config import TrainConfig
from common.data.batches import load_batches
from common.experiments.local_ranks import on_ranks
from common.initialisation import materialise, random_values
from common.model import Decoder, cross_entropy_sum
from common.process_groups import Mesh
from common.tracing.report import Trace, read_trace
from step02_data_parallel.data_parallel import DataParallel
from step02_data_parallel.experiments import predictions
from step02_data_parallel.experiments.tools import (
    BUCKET_MB,
    MODEL,
    MODES,
    against,
    overlay,
    reference_gradients,
    run_jobs,
    tensor_sizes,
)
from step02_data_parallel.train import train


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
            counted = on_ranks(ranks, run_jobs, jobs, folder, title="traffic", jobs=len(jobs))[0]
            logged = {name: gradient_calls(read_trace(Path(folder, name))) for name, _ in jobs}
        predicted = predictions.all_reduce_bytes(sum(sizes), ranks)

        rows = []
        for name, _ in jobs:
            limit = BUCKET_MB * 1e6 if name.startswith("bucket") else 0
            rows.append((name, len(predictions.fill(sizes, limit)), logged[name][0] / steps))
        against(f"{ranks} ranks: all-reduces of gradients in a step", "mode", rows)
        rows = []
        for index, name in enumerate(MODES):
            rows.append((f"{name}: log of calls", predicted, logged[name][1] / steps))
            rows.append((f"{name}: its TCP sockets", predicted, counted[index]["sockets"] / steps))
            rows.append((f"{name}: loopback / ranks", predicted, counted[index]["loopback"] / steps / ranks))
        title = f"{ranks} ranks: bytes that a rank sends in a step, 2(N-1)/N x {sum(sizes):,}"
        against(title, "mode, counted by", rows)
        rows = []
        for index, accumulation in ((2, 1), (3, 2), (4, 4)):
            measured = counted[index]["sockets"] / steps / accumulation
            rows.append((str(accumulation), predicted / accumulation, measured))
        title = f"{ranks} ranks: bytes that a rank's sockets send for each of its sequences"
        against(title, "micro-batches a step", rows)
    print("  The log holds model bytes. Sockets: payload alone, the few bytes of loss and norm included; the")
    print("  surplus is gloo's own. Loopback: headers, acknowledgements and everybody else's traffic as well.")


def gradient_calls(trace: Trace) -> tuple[int, int]:
    """Number and bytes of rank 0's gradient all-reduces in the trace (the other ones carry a single number)."""
    calls = [span["args"] for span in trace.spans[0] if span["cat"] == "communication"]
    calls = [arguments for arguments in calls if arguments["elements"] > 1]
    return len(calls), sum(arguments["bytes"] for arguments in calls)


def gradients(quick: bool) -> None:
    """Gradients of every mode against one process that takes the whole global batch at once, in float64."""
    rows = []
    for ranks in (2,) if quick else (2, 4):
        for name, worst in on_ranks(ranks, gradient_differences, title="gradients")[0].items():
            rows.append((f"{ranks} ranks, {name}", 0.0, worst))
    title = "largest ||a - b|| / ||b|| of any parameter's gradient, float64"
    against(title, "ranks, mode, micro-batches", rows, ".1e")


def gradient_differences(mesh: Mesh, done: Callable) -> dict[str, float]:
    """On a rank: the largest relative difference for each mode and number of micro-batches."""
    result, samples = {}, 8
    config = TrainConfig(**MODEL | {"hidden": 64, "ffn": 192}, seq_len=64, global_batch=samples, dtype="float64")
    batches = load_batches(config, mesh)

    def fresh() -> Decoder:
        model = Decoder(config.model_config)
        materialise(model, torch.float64, mesh.device, random_values(config.seed))
        return model

    reference = reference_gradients(config, batches)
    for mode in MODES:
        for accumulation in (1, 2):
            model = fresh()
            parallel = DataParallel(list(model.parameters()), mesh.dp_cp, mode, 0.1)
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
