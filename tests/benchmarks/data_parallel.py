"""Step 2 against torch's DistributedDataParallel: same model, same batch, same optimizer, taking turns in one run.

    python -m tests.benchmarks.data_parallel                       # 2 and 4 gloo ranks, 30 pairs each
    python -m tests.benchmarks.data_parallel --ranks 2 --pairs 10

The last figure is what the tracer's calls take while it is off.
"""

import time
from functools import partial

import torch

from common.process_groups import Degrees, build_mesh
from common.tracing.tracer import Tracer
from tests.benchmarks import paired
from tests.benchmarks.kept import keep
from tests.benchmarks.paired import adamw, compare, first_batch, our_step, parse_options

# 58 MB of gradients, so three buckets
MODEL = "--hidden 384 --layers 8 --heads 6 --kv-heads 6 --ffn 1024 --vocab 384 --no-tie-embeddings --seq-len 128"


def ddp_step(flags: str):
    """The same with DistributedDataParallel, used as its documentation shows."""
    batch = first_batch(flags)
    model = paired.whole_model(batch[0])
    options = {"bucket_cap_mb": batch[0].bucket_mb, "gradient_as_bucket_view": True}
    model = torch.nn.parallel.DistributedDataParallel(model, **options)
    return paired.torch_step(model, adamw(model, batch[0]), batch, keeps_gradients=True)


def tracer_seconds_off(repeats: int = 20_000) -> float:
    """Seconds that the tracer's calls of one step take while it is off. Pairs of steps vary by more."""
    tracer = Tracer(None, build_mesh(Degrees(), torch.device("cpu")), None)
    start = time.perf_counter()
    for _ in range(repeats):
        with tracer.step(0):
            for name in ("forward", "backward", "optimizer"):
                with tracer.phase(name):
                    pass
    return (time.perf_counter() - start) / repeats


def main() -> None:
    options, rows = parse_options(__doc__), {}
    print("step 2 (bucket) / DDP: throughput, median of pairs [95% interval]; peak memory")
    for world in options.ranks:
        flags = f"{MODEL} --micro-batch 2 --global-batch {2 * world}"
        sides = partial(our_step, 2, flags), partial(ddp_step, flags)
        rows[f"ddp_{world}_ranks"] = compare("step 2 / DDP", world, *sides, options.pairs)
    seconds = rows["tracer_off_seconds_a_step"] = tracer_seconds_off()
    print(f"  the tracer's calls, while it is off, take {seconds * 1e6:.1f} us a step")
    keep("data_parallel", rows, options.pairs, options.whole)


if __name__ == "__main__":
    paired.run_as_module("data_parallel")
