"""How many all-reduces, how many bytes, and whether the result is the same."""

from collections.abc import Callable

from common.costs.alpha_beta import fill_buckets
from common.drawing.tables import print_comparison
from common.experiments.counting import Counted, counted, mean_rank, print_counted
from common.experiments.local_ranks import on_ranks, train_quietly
from common.experiments.runs import BUCKET_MB, MODEL, reference_gradients, tensor_sizes
from common.experiments.training_step import Training, checked
from common.process_groups import Mesh
from step02_data_parallel import cost, train

MODES = ("naive", "overlap", "bucket")
STEPS = 4


def traffic(quick: bool) -> None:
    """How many all-reduces and how many bytes: by formula, by the log of calls, by the kernel's counters."""
    sizes, _ = tensor_sizes()
    for ranks in (2,) if quick else (2, 4):
        cases = {mode: {"dp_mode": mode, "global_batch": ranks} for mode in MODES}
        cases |= {f"bucket, {m} micro-batches": {"global_batch": ranks * m} for m in (2, 4)}
        shape = MODEL | {"seq_len": 64, "steps": STEPS, "bucket_mb": BUCKET_MB, "micro_batch": 1}
        flags = [shape | each for each in cases.values()]
        found = on_ranks(ranks, count_steps, flags, title="traffic", jobs=len(flags))
        predicted = {}
        for name in cases:
            buckets = fill_buckets(sizes, BUCKET_MB * 1e6 if name.startswith("bucket") else 0)
            messages = cost.messages(sum(sizes) / 4, ranks, buckets=len(buckets))
            predicted[name] = [each._replace(count=STEPS * each.count) for each in messages]
        means = {name: mean_rank(rank[index] for rank in found) for index, name in enumerate(cases)}
        print_counted(f"{ranks} ranks, {STEPS} steps", predicted, means)


def count_steps(mesh: Mesh, done: Callable, cases: list[dict]) -> list[Counted]:
    """On a rank: what train() sends in each case."""
    results = []
    for flags in cases:
        results.append(counted(lambda flags=flags: train_quietly(train.train, **flags), mesh))
        done()
    return results


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
    shape = MODEL | {"hidden": 64, "ffn": 192, "seq_len": 64, "global_batch": samples, "dtype": "float64"}
    for mode in MODES:
        for accumulation in (1, 2):
            size = samples // (accumulation * mesh.world.size)
            flags = shape | {"dp_mode": mode, "bucket_mb": 0.1, "micro_batch": size}
            run = Training(train, *checked(mesh, **flags))
            reference = reference_gradients(run.config, run.batches)
            pairs = [(mine, reference[p.spec.name]) for p, mine in zip(run.shards, run.gradients(), strict=True)]
            differences = [((mine - whole).norm() / whole.norm()).item() for mine, whole in pairs]
            result[f"{mode}, {accumulation}"] = max(differences)
    done()
    return result
