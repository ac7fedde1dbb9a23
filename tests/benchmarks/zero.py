"""Step 3 against PyTorch's own ZeRO: same model, same batch, same optimizer, taking turns in one run.

    python -m tests.benchmarks.zero                                # 2 and 4 gloo ranks, 30 pairs each
    python -m tests.benchmarks.zero --ranks 2 --stages 3 --pairs 10

Stage 1 runs against DistributedDataParallel with ZeroRedundancyOptimizer, stages 2 and 3 against FSDP2's `fully_shard`
of every layer and of the whole, which keeps (2) or frees (3) a layer's weights between its forward and its backward.

Each timed call is a whole training step: forward, backward, reduction, clipping by the global norm, AdamW, and the mean
loss over the ranks. Memory is measured apart from that, with one side alone in its processes.
"""

import argparse
import dataclasses
import gc
import os
import statistics
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common import collectives
from common.config import ModelConfig, TrainConfig
from common.memory import MemoryMeter
from common.model import Decoder, cross_entropy_sum
from common.parameter import gradient_norm, materialise
from common.process_groups import Degrees, build_mesh
from step01_single_gpu.mixed_precision import Optimizer, clip_factor
from step03_zero.zero import Zero
from tests.benchmarks.paired import keep, summarise, time_pairs
from tests.harness import run_ranks

# 57 M parameters, 229 MB; the short sequences leave communication and the optimizer a large part of the step
MODEL = ModelConfig(vocab=384, hidden=768, layers=8, heads=12, kv_heads=12, ffn=2048, tie_embeddings=False)
SEQ, BATCH = 64, 2  # of one rank
PEERS = {1: "DDP + ZeroRedundancyOptimizer", 2: "FSDP2, kept after forward", 3: "FSDP2, freed after forward"}
WARMUP, MEASURED = 2, 5  # steps of a memory measurement

# Ranks keep freed memory, as CUDA's caching allocator does. By default glibc returns it to the system whenever enough
# of it happens to lie at the end of the heap; page faults then add up to a tenth to the next step of either side.
HEAP = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}


def our_step(stage: int, mesh, tokens, targets):
    """One training step of step 3 as a function without arguments."""
    config = TrainConfig(zero=stage, dp=mesh.world.size)
    model = Decoder(MODEL)
    zero = Zero(model, config, mesh)
    optimizer = Optimizer(zero.shards, config)

    def step():
        zero.gather()
        share = cross_entropy_sum(model(tokens), targets) / (mesh.world.size * targets.numel())
        with zero.no_sync(False):
            share.backward()
        summed = zero.finish()
        norm = gradient_norm(zero.shards, summed, mesh.world).item()
        optimizer.step(summed, config.lr, clip_factor(norm, config.clip))
        loss = share.detach()
        collectives.all_reduce(loss, mesh.dp_cp)
        return loss.item()

    return step


def peer_step(stage: int, mesh, tokens, targets):
    """The same with PyTorch's classes, used as their documentation shows."""
    config, model = TrainConfig(), Decoder(MODEL)
    materialise(model, 0, torch.float32, mesh.device)
    if stage == 1:
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        options = {
            "mesh": init_device_mesh(mesh.device.type, (mesh.world.size,)),
            "reshard_after_forward": stage == 3,
        }
        for layer in model.layers.values():
            fully_shard(layer, **options)
        fully_shard(model, **options)
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    settings = {"lr": config.lr, "betas": (0.9, 0.95), "eps": 1e-5, "fused": True}
    if stage == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # Not overlap_with_ddp: it updates inside the backward, before the norm to clip by is known
        optimizer = ZeroRedundancyOptimizer(
            groups, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **settings
        )
    else:
        optimizer = torch.optim.AdamW(groups, **settings)

    def step():
        if stage == 1:  # gradients are views of DDP's buckets, which stay
            optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        if stage > 1:  # gradients are tensors of their own: gone before the next forward
            optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / mesh.world.size

    return step


def on_rank(stage: int, pairs: int, sides: tuple[str, ...]):
    """With both sides: their times on this rank, and how far their losses are apart. With one: its peak bytes."""
    warnings.filterwarnings("ignore", message="Memory block of unknown size")
    mesh = build_mesh(Degrees(dp=dist.get_world_size()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(mesh.rank)
    tokens = torch.randint(MODEL.vocab, (BATCH, SEQ + 1), generator=generator)
    run = (stage, mesh, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    build = {"ours": our_step, "peer": peer_step}
    steps = [build[side](*run) for side in sides]
    if len(steps) == 1:
        return peak_bytes(steps[0], mesh.device)
    losses = [], []
    times = time_pairs(lambda: losses[0].append(steps[0]()), lambda: losses[1].append(steps[1]()), pairs)
    # Of the first steps only: rounding differs between the sides, and training amplifies it
    return times, max(abs(a - b) for a, b in zip(losses[0][:5], losses[1][:5], strict=True))


def peak_bytes(step, device: torch.device) -> int:
    """Highest number of bytes alive during a training step, the median of a few.

    Where a gloo thread drops the last reference to a message, its release is seen late (see `MemoryMeter`).
    """
    peaks, meter = [], MemoryMeter(device)
    for _ in range(WARMUP):
        step()
    for _ in range(MEASURED):
        gc.collect()
        dist.barrier()
        # Not subclasses: a DTensor has no memory, and its local tensor is in this list as well
        with meter.measure(o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)) as measured:
            step()
        peaks.append(measured.peak_bytes)
    return statistics.median(peaks)


def main() -> None:
    from tests.benchmarks.zero import on_rank  # by the name under which ranks can import it

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    arguments = parser.parse_args()
    os.environ.update(HEAP)  # for the ranks
    rows = {}
    print("step 3 / peer: throughput, median of pairs [95% interval]; peak memory of the fullest rank")
    for world in arguments.ranks:
        for stage in arguments.stages:
            ours, peer = (max(run_ranks(world, on_rank, stage, 0, (side,), timeout=600)) for side in ("ours", "peer"))
            per_rank = run_ranks(world, on_rank, stage, arguments.pairs, ("ours", "peer"), timeout=1800)
            ratio, gap = summarise([times for times, _ in per_rank]), max(gap for _, gap in per_rank)
            print(f"  {world} ranks, stage {stage} against {PEERS[stage]}   first losses differ by {gap:.1e}")
            print(f"    throughput {ratio}")
            print(f"    memory     {ours / peer:.3f}  {ours / 1e6:.1f} MB against {peer / 1e6:.1f} MB", flush=True)
            if not gap < 1e-3:
                raise SystemExit("the two sides do not train the same model")
            rows[f"stage{stage}_{world}_ranks"] = dataclasses.asdict(ratio) | {
                "memory_ratio": ours / peer,
                "ours_peak_bytes": ours,
                "peer_peak_bytes": peer,
                "first_losses_differ_by": gap,
            }
    print(f"written: {keep('zero', rows)}")


if __name__ == "__main__":
    main()
