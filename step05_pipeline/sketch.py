"""Pipeline parallelism by hand: each rank holds some layers, and a list says in which order it works.

    python step05_pipeline/sketch.py
    torchrun --nproc_per_node 2 step05_pipeline/sketch.py

Both commands print the same losses, up to rounding; 4 ranks do so, too. Change SCHEDULE, and see what still works.
With gloo, two ranks may begin a send to each other (isend) and receive afterwards. With NCCL, both would wait for ever.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

LAYERS, WIDTH, SAMPLES, MICRO_BATCHES, STEPS, LEARNING_RATE = 4, 32, 16, 4, 5, 1.0

# 1F1B, a row per rank: F1 is the forward of micro-batch 1, B1 its backward. Fewer ranks take the last rows.
SCHEDULE = [
    "F0 F1 F2 F3 B0 B1 B2 B3",
    "F0 F1 F2 B0 F3 B1 B2 B3",
    "F0 F1 B0 F2 B1 F3 B2 B3",
    "F0 B0 F1 B1 F2 B2 F3 B3",
]

# With 2 ranks this never ends: rank 0 does F1 after B0, for which it needs a gradient from rank 1's B0. But rank 1
# does B0 after F1, for which it needs the output of rank 0's F1. Each waits for the other.
HANGS = [
    "F0 B0 F1 B1 F2 B2 F3 B3",
    "F0 F1 B0 F2 B1 F3 B2 B3",
]


def receive(like: Tensor, rank: int) -> Tensor:
    """Return a tensor that another rank sends, of the same shape as `like`."""
    arriving = torch.empty_like(like)
    dist.irecv(arriving, rank).wait()
    return arriving


def run(actions: str, weights: list[Tensor], samples: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Add up gradients of my layers. Returns the loss (0 except on the last rank), and most micro-batches kept."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    micro_batches = list(zip(samples.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)))
    kept, sends, loss, most = {}, [], samples.new_zeros(()), 0
    # --- write this yourself ---
    for action in actions.split():
        i = int(action[1:])
        if action[0] == "F":
            x, target = micro_batches[i]  # later ranks only use the shape of x
            if rank > 0:
                x = receive(x, rank - 1).requires_grad_()  # the graph of my layers begins here
            y = x
            for weight in weights:
                y = torch.relu(y @ weight)
            if rank < last:
                sends.append(dist.isend(y.detach(), rank + 1))
            else:
                y = (y - target).square().sum() / targets.numel()  # a share of the mean over the whole batch
                loss += y.detach()
            kept[i] = x, y
            most = max(most, len(kept))
        else:
            x, y = kept.pop(i)
            y.backward(receive(y, rank + 1) if rank < last else None)
            if rank > 0:
                sends.append(dist.isend(x.grad, rank - 1))
    for work in sends:
        work.wait()
    # --- until here ---
    return loss, most


def train(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[Tensor]]:
    """Take all steps. Returns the losses, and the weights of this rank's layers."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(LAYERS, WIDTH, WIDTH, generator=random, dtype=dtype) * (2 / WIDTH) ** 0.5
    weights = [weight.clone().requires_grad_() for weight in weights.chunk(ranks)[rank]]  # my stage
    samples, targets = torch.randn(2, SAMPLES, WIDTH, generator=random, dtype=dtype)

    losses = []
    for step in range(STEPS):
        loss, most = run(SCHEDULE[rank - ranks], weights, samples, targets)  # the last rank takes the last row
        for weight in weights:
            weight.data -= LEARNING_RATE * weight.grad
            weight.grad = None
        dist.all_reduce(loss)  # all ranks but the last add 0
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}  loss {loss:.6f}, rank 0 kept at most {most} of {MICRO_BATCHES} micro-batches")
    return losses, weights


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # torchrun tells each rank its number; without it there is one
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
