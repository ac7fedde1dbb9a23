"""Step 3 against PyTorch's own ZeRO: same model, same batch, same optimizer, taking turns in one run.

    python -m tests.benchmarks.zero                                # 2 and 4 gloo ranks, 30 pairs each
    python -m tests.benchmarks.zero --ranks 2 --stages 3 --pairs 10

Stage 1 runs against DistributedDataParallel with ZeroRedundancyOptimizer, stages 2 and 3 against FSDP2's `fully_shard`
of every layer and of the whole, which keeps (2) or frees (3) a layer's weights between its forward and its backward.
"""

from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.benchmarks import paired
from tests.benchmarks.kept import keep
from tests.benchmarks.paired import adamw, compare, first_batch, our_step, parse_options

# 57 M parameters, 229 MB; the short sequences leave communication and the optimizer a large part of the step
MODEL = "--hidden 768 --layers 8 --heads 12 --kv-heads 12 --ffn 2048 --vocab 384 --no-tie-embeddings --seq-len 64"
PEERS = {1: "DDP + ZeroRedundancyOptimizer", 2: "FSDP2, kept after forward", 3: "FSDP2, freed after forward"}


def peer_step(flags: str, stage: int):
    """The same with PyTorch's classes, used as their documentation shows."""
    config, mesh, *_ = batch = first_batch(flags)
    model = paired.whole_model(config)
    if stage == 1:
        options = {"bucket_cap_mb": config.bucket_mb, "gradient_as_bucket_view": True}
        model = torch.nn.parallel.DistributedDataParallel(model, **options)
        # Not overlap_with_ddp: it updates inside the backward, before the norm to clip by is known
        options = {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True}
        optimizer = adamw(model, config, ZeroRedundancyOptimizer, **options)
    else:
        options = {"mesh": init_device_mesh(mesh.device.type, (mesh.world.size,)), "reshard_after_forward": stage == 3}
        for part in (*model.layers.values(), model):
            fully_shard(part, **options)
        optimizer = adamw(model, config)
    return paired.torch_step(model, optimizer, batch, keeps_gradients=stage == 1)


def main() -> None:
    options, rows = parse_options(__doc__, stages=[1, 2, 3]), {}
    print("step 3 / peer: throughput, median of pairs [95% interval]; peak memory of the fullest rank")
    for world in options.ranks:
        for stage in options.stages:
            flags = f"{MODEL} --micro-batch 2 --global-batch {2 * world}"
            sides = partial(our_step, 3, f"{flags} --zero {stage}"), partial(peer_step, flags, stage)
            title = f"stage {stage} against {PEERS[stage]}"
            rows[f"stage{stage}_{world}_ranks"] = compare(title, world, *sides, options.pairs)
    keep("zero", rows, options.pairs, options.whole)


if __name__ == "__main__":
    paired.run_as_module("zero")
