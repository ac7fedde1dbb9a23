"""An optimizer whose state is divided among the ranks: ZeRO-1 for SGD with momentum."""

import torch
import torch.distributed as dist
from torch import Tensor

MOMENTUM, LEARNING_RATE = 0.9, 0.1


def gather(shard: Tensor) -> Tensor:
    """Return the shards of all ranks, end to end."""
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard)
    return torch.cat(shards)


def reduce_scatter(whole: Tensor) -> Tensor:
    """Return this rank's part of the sum of every rank's tensor."""
    parts = list(whole.chunk(dist.get_world_size()))
    summed = torch.empty_like(parts[0])
    dist.reduce_scatter(summed, parts)
    return summed


def step(weights: Tensor, gradients: Tensor, momentum: Tensor, limit: float) -> Tensor:
    """Update `weights` in place, equally on all ranks, and this rank's `momentum`. Returns the norm of the gradient.

    Before the update, the gradient is scaled to a norm of at most `limit`. All are flat.

    Args:
        weights: all of them, the same on every rank.
        gradients: of all weights, but from this rank's samples; the gradient is their sum over the ranks.
        momentum: of this rank's part of the weights.
    """
    # --- write this yourself ---
    mine = reduce_scatter(gradients)
    square = mine.square().sum()  # of my part ...
    dist.all_reduce(square)  # ... and of all parts, each of which is on one rank
    norm = square.sqrt()
    momentum.mul_(MOMENTUM).add_(mine * (limit / norm).clamp(max=1.0))
    shard = weights.chunk(dist.get_world_size())[dist.get_rank()] - LEARNING_RATE * momentum
    weights.copy_(gather(shard))
    # --- until here ---
    return norm
