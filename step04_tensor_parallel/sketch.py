"""Tensor and sequence parallelism by hand: one matrix cut by columns, the next by rows, between them no message.

    python step04_tensor_parallel/sketch.py
    torchrun --nproc_per_node 2 step04_tensor_parallel/sketch.py

The first token and the weights are those of the lesson's first picture. Ranks divide the tokens outside of the two
products, and the products' columns inside. Without sequence parallelism, every rank would hold all tokens. Then gather
would do nothing, and reduce_scatter would be an all-reduce (and the two would be named f and f*, not g and g*). The
all-reduces of dscale and loss would have to go, because every rank would have the whole sum already.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

X = [[1.0, 2], [2, 0], [0, 1], [-1, 1]]  # four tokens of two numbers
TARGET = [[3.0, 3], [1, 1], [2, 0], [3, 2]]
W1 = [[1.0, 2, -1, 1], [1, -2, 1, 1]]
W2 = [[1.0, 0], [1, -1], [2, 1], [0, 1]]
STEPS, LEARNING_RATE = 5, 0.01


def gather(mine: Tensor) -> Tensor:
    """Return the rows of all ranks."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def reduce_scatter(whole: Tensor) -> Tensor:
    """Return this rank's rows of the sum of every rank's tensor."""
    parts = list(whole.chunk(dist.get_world_size()))
    summed = torch.empty_like(parts[0])
    dist.reduce_scatter(summed, parts)
    return summed


def forward(x: Tensor, scale: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Return my tokens' outputs, and all tokens' hidden numbers in my columns. `scale` stands for a norm."""
    # --- write this yourself ---
    hidden = torch.relu(gather(x * scale) @ w1)  # (all tokens, my columns); gather is g
    return reduce_scatter(hidden @ w2), hidden  # the ranks' summands, added up: g*
    # --- until here ---


def backward(dy: Tensor, x: Tensor, hidden: Tensor, scale: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, ...]:
    """Return dx of my tokens, and dscale, dw1 and dw2. dx is the gradient of the loss with respect to x, and so on."""
    # --- write this yourself ---
    dy = gather(dy)  # g* backwards: every summand of y has the gradient of y
    dw2 = hidden.T @ dy
    dhidden = (dy @ w2.T) * (hidden > 0)
    dw1 = gather(x * scale).T @ dhidden  # gathered again: I have kept only my tokens
    dscaled = reduce_scatter(dhidden @ w1.T)  # g backwards: all ranks used these tokens
    dscale = (dscaled * x).sum(0)  # of my tokens ...
    dist.all_reduce(dscale)  # ... so the one weight that all ranks hold needs a sum
    return dscaled * scale, dscale, dw1, dw2
    # --- until here ---


def train(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[Tensor]]:
    """Take all steps. Returns the losses, and this rank's part of scale, W1 and W2."""
    x, target = (torch.tensor(all_tokens, dtype=dtype).chunk(ranks)[rank] for all_tokens in (X, TARGET))
    w1 = torch.tensor(W1, dtype=dtype).chunk(ranks, dim=1)[rank].contiguous()  # my columns
    w2 = torch.tensor(W2, dtype=dtype).chunk(ranks, dim=0)[rank].clone()  # and the rows that they meet
    scale = torch.ones(2, dtype=dtype)  # whole on every rank

    losses = []
    for step in range(STEPS):
        y, hidden = forward(x, scale, w1, w2)
        error = y - target
        loss = error.square().sum() / 2  # of my tokens
        dx, dscale, dw1, dw2 = backward(error, x, hidden, scale, w1, w2)
        scale -= LEARNING_RATE * dscale
        w1 -= LEARNING_RATE * dw1
        w2 -= LEARNING_RATE * dw2
        dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0:
            if step == 0:
                print(f"first token: y {y[0].tolist()}, dy {error[0].tolist()}, dx {dx[0].tolist()}")
            print(f"step {step}  loss {loss:.6f}")
    return losses, [scale, w1, w2]


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # torchrun tells each rank its number; without it there is one
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
