"""Step 3 against PyTorch's own ZeRO: same model, same batch, same optimizer, taking turns in one run.

    python -m tests.benchmarks.zero                                # 2 and 4 gloo ranks, 30 pairs each
    python -m tests.benchmarks.zero --ranks 2 --stages 3 --pairs 10

Stage 1 runs against DistributedDataParallel with ZeroRedundancyOptimizer, stages 2 and 3 against FSDP2's `fully_shard`
of every layer and of the whole, which keeps (2) or frees (3) a layer's weights between its forward and its backward.

Each timed call is a whole training step, ours the real `train_step`. Memory is measured apart from that, with one side
alone in its processes.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.benchmarks.paired import adamw_settings, compare, first_batch, keep, our_step, parse_options, whole_model

# 57 M parameters, 229 MB; the short sequences leave communication and the optimizer a large part of the step
MODEL = "--hidden 768 --layers 8 --heads 12 --kv-heads 12 --ffn 2048 --vocab 384 --no-tie-embeddings --seq-len 64"
PEERS = {1: "DDP + ZeroRedundancyOptimizer", 2: "FSDP2, kept after forward", 3: "FSDP2, freed after forward"}


def peer_step(flags: str, stage: int):
    """The same with PyTorch's classes, used as their documentation shows."""
    config, mesh, tokens, targets = first_batch(flags)
    model = whole_model(config)
    if stage == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
        # Not overlap_with_ddp: it updates inside the backward, before the norm to clip by is known
        optimizer = ZeroRedundancyOptimizer(
            optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **adamw_settings(model, config)
        )
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        options = {"mesh": init_device_mesh(mesh.device.type, (mesh.world.size,)), "reshard_after_forward": stage == 3}
        for layer in model.layers.values():
            fully_shard(layer, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(**adamw_settings(model, config))

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


def main() -> None:
    options, rows = parse_options(__doc__, stages=[1, 2, 3]), {}
    print("step 3 / peer: throughput, median of pairs [95% interval]; peak memory of the fullest rank")
    for world in options.ranks:
        for stage in options.stages:
            flags = f"{MODEL} --micro-batch 2 --global-batch {2 * world}"
            sides = partial(our_step, 3, f"{flags} --zero {stage}"), partial(peer_step, flags, stage)
            title = f"stage {stage} against {PEERS[stage]}"
            rows[f"stage{stage}_{world}_ranks"] = compare(title, world, *sides, options.pairs)
    print(f"written: {keep('zero', rows)}")


if __name__ == "__main__":
    from tests.benchmarks import zero  # by the name under which ranks can import it

    zero.main()
