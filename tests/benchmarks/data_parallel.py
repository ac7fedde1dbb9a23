"""Step 2 against torch's DistributedDataParallel: same model, same batch, same optimizer, taking turns in one run.

    python -m tests.benchmarks.data_parallel                       # 2 and 4 gloo ranks, 40 pairs each, about 6 minutes
    python -m tests.benchmarks.data_parallel --ranks 2 --pairs 10

The second table is what the tracer costs while it is off: the step with its calls against the step without them.
"""

import contextlib
import time
from functools import partial
from types import SimpleNamespace

import torch

from common.process_groups import Degrees, build_mesh
from common.tracing.tracer import Tracer
from tests.benchmarks import paired
from tests.benchmarks.paired import adamw, compare, first_batch, keep, our_step, parse_options

# Against DDP: 58 MB of gradients, so three buckets. For the tracer: short steps, in which its calls weigh most.
DDP = "--hidden 384 --layers 8 --heads 6 --kv-heads 6 --ffn 1024"
SHORT = "--hidden 128 --layers 4 --heads 8 --kv-heads 4 --ffn 384"
WITHOUT = SimpleNamespace(step=contextlib.nullcontext, phase=contextlib.nullcontext)  # the tracer's calls, removed


def flags_of(model: str, world: int) -> str:
    return f"{model} --vocab 384 --no-tie-embeddings --seq-len 128 --micro-batch 2 --global-batch {2 * world}"


def ddp_step(flags: str):
    """The same with DistributedDataParallel, used as its documentation shows."""
    batch = first_batch(flags)
    model = paired.whole_model(batch[0])
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    return paired.torch_step(model, adamw(model, batch[0]), batch, keeps_gradients=True)


def tracer_seconds_off(repeats: int = 20_000) -> float:
    """Seconds that the tracer's calls of one step take while it is off, timed alone: pairs of steps vary by more."""
    tracer = Tracer(None, build_mesh(Degrees(), torch.device("cpu")), None)
    start = time.perf_counter()
    for _ in range(repeats):
        with tracer.step(0):
            for name in ("forward", "backward", "optimizer"):
                with tracer.phase(name):
                    pass
    return (time.perf_counter() - start) / repeats


def main() -> None:
    options, rows = parse_options(__doc__, pairs=40), {}
    print("step 2 (bucket) / DDP; tracer off: without its calls / with: throughput, median of pairs [95% interval]")
    for world in options.ranks:
        large, short = (flags_of(model, world) for model in (DDP, SHORT))
        sides = partial(our_step, 2, large), partial(ddp_step, large)
        rows[f"ddp_{world}_ranks"] = compare("step 2 / DDP", world, *sides, options.pairs)
        sides = partial(our_step, 2, short), partial(our_step, 2, short, WITHOUT)
        rows[f"tracer_{world}_ranks"] = compare("tracer off", world, *sides, 5 * options.pairs)
    shortest = min(row["ours_s"] for name, row in rows.items() if name.startswith("tracer"))
    seconds = rows["tracer_off_seconds_a_step"] = tracer_seconds_off()
    print(f"  its calls alone take {seconds * 1e6:.1f} us a step: {seconds / shortest:.3%} of the shortest step above")
    keep("data_parallel", rows)


if __name__ == "__main__":
    paired.run_as_module("data_parallel")
