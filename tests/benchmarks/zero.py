"""Step 3 against PyTorch's own ZeRO: same model, same batch, same optimizer, taking turns in one run.

    python -m tests.benchmarks.zero                                # 2 and 4 gloo ranks, 30 pairs each
    python -m tests.benchmarks.zero --ranks 2 --stages 3 --pairs 10

Stage 1 runs against DistributedDataParallel with ZeroRedundancyOptimizer, stages 2 and 3 against FSDP2's `fully_shard`
of every layer and of the whole, which keeps (2) or frees (3) a layer's weights between its forward and its backward.

Each timed call is a whole training step: forward, backward, reduction, clipping by the global norm, AdamW, and the mean
loss over the ranks. Memory is measured apart from that, with one side alone in its processes.
"""

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common import collectives
from common.config import TrainConfig
from common.model import Decoder, cross_entropy_sum
from common.process_groups import Degrees, build_mesh
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step03_zero.train import build
from tests.benchmarks.paired import adamw_settings, compare, keep, measure_steps, parse_options

# 57 M parameters, 229 MB; the short sequences leave communication and the optimizer a large part of the step
CONFIG = TrainConfig(hidden=768, layers=8, heads=12, kv_heads=12, ffn=2048, vocab=384, tie_embeddings=False)
SEQ, BATCH = 64, 2  # of one rank
PEERS = {1: "DDP + ZeroRedundancyOptimizer", 2: "FSDP2, kept after forward", 3: "FSDP2, freed after forward"}


def our_step(stage: int, mesh, tokens, targets):
    """One training step of step 3 as a function without arguments."""
    config = dataclasses.replace(CONFIG, zero=stage, dp=mesh.world.size)
    model, zero, optimizer = build(config, mesh)

    def step():
        zero.gather()
        share = cross_entropy_sum(model(tokens), targets) / (mesh.world.size * targets.numel())
        with zero.backward(last=True):
            share.backward()
        gradients = zero.finish()
        norm = gradient_norm(zero.shards, gradients, mesh.world)
        optimizer.step(gradients, config.lr, clip_factor(norm, config.clip))
        loss = share.detach()
        collectives.all_reduce(loss, mesh.dp_cp)
        return loss.item()

    return step


def peer_step(stage: int, mesh, tokens, targets):
    """The same with PyTorch's classes, used as their documentation shows."""
    model = Decoder(CONFIG.model_config)
    materialise(model, torch.float32, mesh.device, random_values(0))
    if stage == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
        # Not overlap_with_ddp: it updates inside the backward, before the norm to clip by is known
        optimizer = ZeroRedundancyOptimizer(
            optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **adamw_settings(model, CONFIG)
        )
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        options = {"mesh": init_device_mesh(mesh.device.type, (mesh.world.size,)), "reshard_after_forward": stage == 3}
        for layer in model.layers.values():
            fully_shard(layer, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(**adamw_settings(model, CONFIG))

    def step():
        if stage == 1:  # gradients are views of DDP's buckets, which stay
            optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip)
        optimizer.step()
        if stage > 1:  # gradients are tensors of their own: gone before the next forward
            optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / mesh.world.size

    return step


def on_rank(stage: int, pairs: int, sides: tuple[str, ...]):
    """With both sides: their times on this rank, and how far their losses are apart. With one: its peak bytes."""
    mesh = build_mesh(Degrees(dp=dist.get_world_size()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(mesh.rank)
    tokens = torch.randint(CONFIG.vocab, (BATCH, SEQ + 1), generator=generator)
    run = (stage, mesh, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    build = {"ours": our_step, "peer": peer_step}
    steps = [build[side](*run) for side in sides]
    return measure_steps(steps, pairs, mesh.device)


def main() -> None:
    from tests.benchmarks.zero import on_rank  # by the name under which ranks can import it

    arguments, rows = parse_options(__doc__, pairs=30, stages=[1, 2, 3]), {}
    print("step 3 / peer: throughput, median of pairs [95% interval]; peak memory of the fullest rank")
    for world in arguments.ranks:
        for stage in arguments.stages:
            title = f"stage {stage} against {PEERS[stage]}"
            rows[f"stage{stage}_{world}_ranks"] = compare(title, world, on_rank, stage, arguments.pairs)
    print(f"written: {keep('zero', rows)}")


if __name__ == "__main__":
    main()
