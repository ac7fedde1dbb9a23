"""Step 2 against torch's DistributedDataParallel: same model, same batch, same optimizer, taking turns in one run.

    python -m tests.benchmarks.data_parallel                       # 2 and 4 gloo ranks, 40 pairs each, about 6 minutes
    python -m tests.benchmarks.data_parallel --ranks 2 --pairs 10

Each timed call is a whole training step: forward, backward, reduction, clipping by the global norm, AdamW, and the mean
loss over the ranks. The second table is what the tracer costs while it is off: the step with its calls against the step
without them.
"""

import contextlib
import dataclasses
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common import collectives
from common.config import TrainConfig
from common.model import Decoder, cross_entropy_sum
from common.process_groups import Degrees, build_mesh
from common.tracing.tracer import Tracer
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step02_data_parallel.train import build
from tests.benchmarks.paired import adamw_settings, keep, parse_options, summarise, time_pairs
from tests.harness.ranks import run_ranks

# Against DDP: 58 MB of gradients, so three buckets. For the tracer: short steps, in which its calls weigh most.
CONFIGS = {
    "ddp": TrainConfig(hidden=384, layers=8, heads=6, kv_heads=6, ffn=1024, vocab=384, tie_embeddings=False),
    "tracer": TrainConfig(hidden=128, layers=4, heads=8, kv_heads=4, ffn=384, vocab=384, tie_embeddings=False),
}
PAIRS = {"ddp": 1, "tracer": 5}  # times --pairs
SEQ, BATCH = 128, 2  # of one rank
WITHOUT = SimpleNamespace(step=contextlib.nullcontext, phase=contextlib.nullcontext)  # the tracer's calls, removed


def our_step(config: TrainConfig, world: int, tokens, targets, tracer=None):
    """One training step of step 2 as a function without arguments."""
    mesh = build_mesh(Degrees(dp=world), torch.device("cpu"))
    model, data_parallel, optimizer = build(config, mesh)
    tracer = tracer or Tracer(None, mesh, None)

    def step():
        with tracer.step(0):
            with tracer.phase("forward"):
                share = cross_entropy_sum(model(tokens), targets) / (world * targets.numel())
            with tracer.phase("backward"):
                share.backward()
            with tracer.phase("optimizer"):
                gradients = data_parallel.finish()
                norm = gradient_norm(optimizer.parameters, gradients, mesh.world)
                optimizer.step(gradients, config.lr, clip_factor(norm, config.clip))
                loss = share.detach()
                collectives.all_reduce(loss, mesh.dp_cp)
        return loss.item()

    return step


def ddp_step(config: TrainConfig, world: int, tokens, targets):
    """The same with DistributedDataParallel, used as its documentation shows."""
    model = Decoder(config.model_config)
    materialise(model, torch.float32, torch.device("cpu"), random_values(0))
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(**adamw_settings(model, config))

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / world

    return step


def on_rank(world: int, pairs: int, what: str) -> tuple[list[tuple[float, float]], float]:
    """Times of this rank, and how far the two sides' losses are apart after all those steps."""
    generator = torch.Generator().manual_seed(dist.get_rank() if world > 1 else 0)
    tokens = torch.randint(CONFIGS[what].vocab, (BATCH, SEQ + 1), generator=generator)
    run = (CONFIGS[what], world, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    ours = our_step(*run)
    peer = ddp_step(*run) if what == "ddp" else our_step(*run, WITHOUT)
    times = time_pairs(ours, peer, pairs)
    return times, abs(ours() - peer())


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
    from tests.benchmarks.data_parallel import on_rank  # by the name under which ranks can import it

    arguments, rows = parse_options(__doc__, pairs=40), {}
    titles = {"ddp": "throughput of step 2 (bucket) / DDP", "tracer": "tracer off: without its calls / with"}
    for what, title in titles.items():
        print(f"{title}, median of pairs [95% interval]")
        for world in arguments.ranks:
            per_rank = run_ranks(world, on_rank, world, arguments.pairs * PAIRS[what], what, timeout=1800)
            ratio = summarise([times for times, _ in per_rank])
            print(f"  {world} ranks  {ratio}   losses differ by {max(gap for _, gap in per_rank):.1e}", flush=True)
            rows[f"{what}_{world}_ranks"] = dataclasses.asdict(ratio)
    seconds = tracer_seconds_off()
    shortest = min(row["ours_s"] for name, row in rows.items() if name.startswith("tracer"))
    rows["tracer_off_seconds_a_step"] = seconds
    print(f"  its calls alone take {seconds * 1e6:.1f} us a step: {seconds / shortest:.3%} of the shortest step above")
    print(f"written: {keep('data_parallel', rows)}")


if __name__ == "__main__":
    main()
