"""Data, pipeline and tensor parallelism at once, by hand: three groups of ranks, and a few lines for each.

    python step08_5d/sketch.py
    torchrun --nproc_per_node 8 step08_5d/sketch.py

Both commands print the same losses, up to rounding; 2 and 4 ranks do so, too. dx is the gradient of x, and so on.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

LAYERS, WIDTH, TOKENS, MICRO_BATCHES, STEPS, LEARNING_RATE = 4, 16, 64, 4, 5, 0.1
DEGREES = {1: (1, 1, 1), 2: (1, 1, 2), 4: (1, 2, 2), 8: (2, 2, 2)}  # dp, pp and tp, by number of ranks


def part(whole: Tensor, group: dist.ProcessGroup, axis: int = 0) -> Tensor:
    """Return my part of a tensor that a group divides along an axis."""
    return whole.chunk(group.size(), axis)[group.rank()].clone()


def gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks of a group."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group)
    return torch.cat(parts)


def reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return my rows of the sum of the group's tensors."""
    summed = torch.empty_like(part(whole, group))
    dist.reduce_scatter(summed, list(whole.chunk(group.size())), group=group)
    return summed


def run(weights, gradients, samples: Tensor, targets: Tensor, pp: dist.ProcessGroup, tp: dist.ProcessGroup) -> Tensor:
    """Add up the gradients of my stage. Returns the loss of my tokens, which only the last stage knows."""
    layers, dlayers = list(zip(*weights)), list(zip(*gradients))  # one (scale, w1, w2) per layer
    stages, kept, loss = dist.get_process_group_ranks(pp), [], samples.new_zeros(())
    before, after = stages[: pp.rank()], stages[pp.rank() + 1 :]
    for micro_batch in samples.chunk(MICRO_BATCHES):  # step 5: all forwards first, to be short
        activations = [part(micro_batch, tp)]
        if before:
            dist.recv(activations[0], before[-1])
        for scale, w1, w2 in layers:  # step 4: layers of two matrices, with sequence parallelism
            hidden = torch.relu(gather(activations[-1] * scale, tp) @ w1)
            activations.append(activations[-1] + reduce_scatter(hidden @ w2, tp))
        if after:
            dist.send(activations[-1], after[0])
        kept.append(activations)
    for activations, target in zip(kept, targets.chunk(MICRO_BATCHES)):
        y, dx = activations.pop(), torch.empty_like(activations[0])
        if after:
            dist.recv(dx, after[0])
        else:
            error = y - part(target, tp)
            loss += error.square().sum() / (TOKENS * WIDTH)
            dx = 2 * error / (TOKENS * WIDTH)
        for x, (scale, w1, w2), (dscale, dw1, dw2) in zip(activations[::-1], layers[::-1], dlayers[::-1]):
            scaled, dy = gather(x * scale, tp), gather(dx, tp)
            hidden = torch.relu(scaled @ w1)  # step 1: recomputed
            dhidden = (dy @ w2.T) * (hidden > 0)
            dscaled = reduce_scatter(dhidden @ w1.T, tp)
            dscale += (dscaled * x).sum(0)
            dw1 += scaled.T @ dhidden
            dw2 += hidden.T @ dy
            dx = dx + dscaled * scale
        if before:
            dist.send(dx, before[-1])
    return loss


def train(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[Tensor]]:
    """Take all steps. Returns the losses, and my part of scale, w1 and w2."""
    # --- write this yourself ---
    grid = torch.arange(ranks).view(DEGREES[ranks])
    groups = [grid.movedim(axis, -1).flatten(0, -2).tolist() for axis in range(3)]  # ranks along dp, pp and tp
    dp, pp, tp = (dist.new_subgroups_by_enumeration(along)[0] for along in groups)  # mine
    # --- until here ---
    random = torch.Generator().manual_seed(0)
    scale = torch.ones(LAYERS, WIDTH, dtype=dtype)
    w1, w2 = torch.randn(2, LAYERS, WIDTH, WIDTH, generator=random, dtype=dtype) * WIDTH**-0.5
    weights = [part(scale, pp), part(part(w1, pp), tp, axis=2), part(part(w2, pp), tp, axis=1)]
    samples, targets = (part(each, dp) for each in torch.randn(2, TOKENS, WIDTH, generator=random, dtype=dtype))

    losses = []
    for step in range(STEPS):
        gradients = dscale, dw1, dw2 = [torch.zeros_like(weight) for weight in weights]
        loss = run(weights, gradients, samples, targets, pp, tp)
        # --- write this yourself ---
        for gradient in (dscale, dw1, dw2):
            dist.all_reduce(gradient, group=dp)  # whose ranks hold the same weights, but saw other samples
        dist.all_reduce(dscale, group=tp)  # whose ranks hold the same scale, but saw other tokens
        # --- until here ---
        for weight, gradient in zip(weights, gradients):
            weight -= LEARNING_RATE * gradient
        dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}  loss {loss:.6f}")
    return losses, weights


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # torchrun tells each rank its number; without it there is one
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
