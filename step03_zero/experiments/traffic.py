"""How many collectives, how many bytes, and whether the result is the same."""

import tempfile
from collections import Counter
from pathlib import Path

from common.costs.alpha_beta import fill_buckets
from common.drawing.tables import print_comparison, print_table
from common.experiments.gradients import compare_gradients, worst_difference
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import BUCKET_MB, overlay, reference_gradients, run_jobs, tensor_sizes
from common.tracing.chrome_trace import Trace, read_trace
from step03_zero.experiments import predictions
from step03_zero.experiments.tools import SHAPE, STAGES, Run, on_every_case, units_of
from step03_zero.train import train

# name, flags, micro-batches
PLAIN = [(str(stage), {"zero": stage}, 1) for stage in STAGES]
ACCUMULATING = [
    ("1, 4 micro-batches", {"zero": 1}, 4),
    ("2, 2 micro-batches", {"zero": 2}, 2),
    ("2, 4 micro-batches", {"zero": 2}, 4),
    ("2, 4, --zero-reduce step", {"zero": 2, "zero_reduce": "step"}, 4),
    ("3, 4 micro-batches", {"zero": 3}, 4),
    ("3, 4, --zero-reduce step", {"zero": 3, "zero_reduce": "step"}, 4),
]
OTHERS = [
    ("3, tied", {"zero": 3, "tie_embeddings": True}, 1),
    ("3, full recomputation", {"zero": 3, "recompute": "full"}, 1),
    *((f"{stage}, bfloat16", {"zero": stage, "dtype": "bfloat16"}, 1) for stage in (0, 1, 3)),
]
HYBRID = [(f"{stage}, 2 replicas", {"zero": stage, "zero_replicas": 2}, 1) for stage in (1, 3)]


def traffic(quick: bool) -> None:
    """Collectives and bytes of a step: by formula, by the log of calls, by what the TCP sockets sent."""
    for ranks in (2,) if quick else (2, 4):
        cases = PLAIN if quick else PLAIN + ACCUMULATING + OTHERS + (HYBRID if ranks == 4 else [])
        steps = 2
        shape = SHAPE | {"steps": steps, "trace": f"0:{steps - 1}"}
        jobs = [
            (str(number), shape | flags | {"global_batch": ranks * micro_batches})
            for number, (_, flags, micro_batches) in enumerate(cases)
        ]
        with tempfile.TemporaryDirectory() as folder:
            counted = on_ranks(ranks, run_jobs, jobs, folder, train, title="traffic", jobs=len(jobs))[0]
            logs = [gradients_and_weights(read_trace(Path(folder, name))) for name, _ in jobs]
        numbers, sizes, split = [], [], []
        for (name, flags, micro_batches), (calls, sent), kernel in zip(cases, logs, counted):
            for op, expected in expected_calls(flags, micro_batches).items():
                numbers.append((f"{name}: {op}", expected, calls[op] / steps))
            inside, across = expected_bytes(flags, ranks, micro_batches)
            total, log, sockets = inside + across, sum(sent.values()) / steps, kernel["sockets"] / steps
            cells = (f"{total:,.0f}", f"{log:,.0f}", f"{log / total:.4f}", f"{sockets:,.0f}", f"{sockets / total:.4f}")
            sizes.append((name, *cells))
            if flags.get("zero_replicas"):
                split += [(f"{name}: shard group", inside, sent["shard"] / steps)]
                split += [(f"{name}: replica group", across, sent["replica"] / steps)]
        print_comparison(f"{ranks} ranks: collectives of gradients and weights in a step", "stage", numbers)
        title = f"{ranks} ranks: bytes that a rank sends in a step, {units_of(SHAPE).parameters:,} parameters"
        print_table(title, ("stage", "predicted", "log of calls", "ratio", "TCP sockets", "ratio"), sizes)
        if split:
            print_comparison(f"{ranks} ranks: the same by group", "stage", split)
    print("  The log holds model bytes. Sockets: payload alone, the few bytes of loss and norm included; the")
    print("  surplus is gloo's own.")


def expected_calls(flags: dict, micro_batches: int) -> dict[str, int]:
    """Return the predicted number of each collective in a step."""
    buckets = len(fill_buckets(tensor_sizes()[0], BUCKET_MB * 1e6))
    stage, every = flags["zero"], micro_batches if flags.get("zero_reduce") != "step" else 1
    if stage == 0:
        return {"all_reduce": buckets}
    if stage < 3:
        result = {"all_gather": buckets, "reduce_scatter": buckets * (every if stage == 2 else 1)}
    else:
        model = units_of(SHAPE | {"tie_embeddings": flags.get("tie_embeddings", False)})
        scattered = len(model.units) * every
        result = {"all_gather": predictions.all_gathers(model, micro_batches), "reduce_scatter": scattered}
    if flags.get("zero_replicas"):
        result["all_reduce"] = result["reduce_scatter"]
    return result


def expected_bytes(flags: dict, ranks: int, micro_batches: int) -> tuple[float, float]:
    """Return the predicted bytes within the shard group and within the replica group."""
    replicas = flags.get("zero_replicas", 1) if flags["zero"] else ranks
    widths = predictions.OURS[flags.get("dtype", "float32")]
    return predictions.sent(
        units_of(SHAPE | {"tie_embeddings": flags.get("tie_embeddings", False)}),
        *(flags["zero"], ranks // replicas, micro_batches, replicas),
        each_micro_batch=flags.get("zero_reduce") != "step",
        widths=widths[:2],
    )


def gradients_and_weights(trace: Trace) -> tuple[Counter, Counter]:
    """Count rank 0's collectives by op and their model bytes by group, without those that carry a single number."""
    calls, sent = Counter(), Counter()
    for call in trace.calls(0):
        if call["elements"] > 1:
            calls[call["op"]] += 1
            sent[call["group"]] += call["bytes"]
    return calls, sent


# ---- the same result -------------------------------------------------------------------------------------------------

SMALL = SHAPE | {"hidden": 64, "ffn": 192, "bucket_mb": 0.1, "dtype": "float64", "global_batch": 24}


def gradients(quick: bool) -> None:
    """Gradients of every stage against one process that takes the whole global batch at once, in float64."""
    cases = []
    for ranks in (2,) if quick else (2, 3, 4):
        once, twice = {"micro_batch": 24 // ranks}, {"micro_batch": 12 // ranks}
        cases += [(ranks, f"stage {stage}", {"zero": stage} | once) for stage in (1, 2, 3)]
        cases += [(ranks, f"stage {stage}, 2 micro-batches", {"zero": stage} | twice) for stage in (1, 2, 3)]
        cases.append((ranks, "stage 3, full recomputation", {"zero": 3, "recompute": "full"} | once))
        if ranks == 4:
            hybrid = {"zero_replicas": 2} | twice
            cases += [(ranks, f"stage {stage}, 2 replicas", {"zero": stage} | hybrid) for stage in (1, 2, 3)]
    compare_gradients(on_every_case, gradient_difference, [(size, name, SMALL | flags) for size, name, flags in cases])


def gradient_difference(run: Run) -> float:
    """Return the largest relative difference between a gradient of this rank and its part of one process's."""
    run.accumulate()
    return worst_difference(run.zero.shards, run.zero.finish(), reference_gradients(run.config, run.batches))


def curves(quick: bool) -> None:
    """The default run in stages 1, 2, 3 beside step 1's: the same loss and gradient norm, up to rounding."""
    variants = {"step 1": (1, {}), **{f"stage {stage}": (2, {"zero": stage, "bucket_mb": 0.5}) for stage in (1, 2, 3)}}
    overlay(train, variants | {"stage 3, 4 ranks": (4, {"zero": 3, "micro_batch": 1})}, quick)
