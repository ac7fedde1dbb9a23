"""ZeRO-3 without hooks or autograd: three linear layers, of whose weights each rank stores a part.

    python step03_zero/sketch.py
    torchrun --nproc_per_node 2 step03_zero/sketch.py

All ranks together take the same samples as one process, so both commands print the same losses, up to rounding.
A name that begins with d is a gradient: dx is that of the loss with respect to x.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

LAYERS, WIDTH, SAMPLES, STEPS, LEARNING_RATE = 3, 64, 16, 5, 2.0


def gather(shard: Tensor) -> Tensor:
    """Return the whole weight, of which every rank stores some rows."""
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard)
    return torch.cat(shards)


def reduce_scatter(whole: Tensor) -> Tensor:
    """Return this rank's rows of the sum of every rank's tensor."""
    parts = list(whole.chunk(dist.get_world_size()))
    summed = torch.empty_like(parts[0])
    dist.reduce_scatter(summed, parts)
    return summed


def train_step(shards: list[Tensor], x: Tensor, target: Tensor, ranks: int) -> Tensor:
    """Update this rank's part of each layer. Returns this rank's share of the loss, a mean over all ranks' samples."""
    # --- write this yourself ---
    activations = [x]
    for shard in shards:  # forward
        weight = gather(shard)
        activations.append(torch.relu(activations[-1] @ weight))
        del weight

    error = activations[-1] - target
    dy = 2 * error / (ranks * error.numel())
    for shard in reversed(shards):  # backward
        weight = gather(shard)
        dy = dy * (activations.pop() > 0)  # the layer's output
        dweight = activations[-1].T @ dy  # its input
        dy = dy @ weight.T  # a layer's input is the previous layer's output
        del weight
        shard -= LEARNING_RATE * reduce_scatter(dweight)
    # --- until here ---
    return error.square().sum() / (ranks * error.numel())


def train(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[Tensor]]:
    """Take all steps. Returns the losses, and this rank's shards."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(LAYERS, WIDTH, WIDTH, generator=random, dtype=dtype) * (2 / WIDTH) ** 0.5
    shards = [weight.chunk(ranks)[rank].clone() for weight in weights]  # all that a rank keeps
    del weights
    samples, targets = torch.randn(2, SAMPLES, WIDTH, generator=random, dtype=dtype)
    x, target = samples.chunk(ranks)[rank], targets.chunk(ranks)[rank]

    losses = []
    for step in range(STEPS):
        loss = train_step(shards, x, target, ranks)
        dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}  loss {loss:.6f}")
    if rank == 0:
        print(f"rank 0 of {ranks} stores {sum(map(len, shards)) * WIDTH:,} of {LAYERS * WIDTH * WIDTH:,} weights")
    return losses, shards


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # torchrun tells each rank its number; without it there is one
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
