"""How many all-reduces, how many bytes, and whether the result is the same."""

import itertools
from collections.abc import Callable

from common.experiments.counting import Counted, counted, mean_rank, print_counted
from common.experiments.gradients import compare_with_one_process
from common.experiments.local_ranks import on_ranks, train_quietly
from common.experiments.runs import BUCKET_MB, MODEL, tensor_sizes
from common.process_groups import Mesh
from step02_data_parallel import cost, train
from step02_data_parallel.data_parallel import pack

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
            buckets = pack(sizes, BUCKET_MB * 1e6 if name.startswith("bucket") else 0)
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
    shape = MODEL | {"hidden": 64, "ffn": 192, "seq_len": 64, "global_batch": 8, "dtype": "float64", "bucket_mb": 0.1}
    cases = []
    for ranks, mode, m in itertools.product((2,) if quick else (2, 4), MODES, (1, 2)):
        flags = shape | {"dp_mode": mode, "micro_batch": 8 // (m * ranks)}
        cases.append((ranks, f"{mode}, {m} micro-batches", flags))
    compare_with_one_process(train, cases)
