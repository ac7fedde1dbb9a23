"""Expert parallelism by hand: tokens travel to the experts that they choose, and their results travel back.

    python step07_expert_parallel/sketch.py
    torchrun --nproc_per_node 2 step07_expert_parallel/sketch.py

All ranks together take the same tokens as one process, so both commands print the same losses, up to rounding.
A name that begins with d is a gradient: dx is that of the loss with respect to x.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

EXPERTS, CHOICES, TOKENS, WIDTH, HIDDEN, STEPS, LEARNING_RATE = 8, 2, 64, 16, 32, 5, 1.0


def exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Send `sent[j]` rows to each rank j, in this order. Returns the `received[j]` rows from each rank."""
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
    return arrived


def forward(x: Tensor, router: Tensor, ups: Tensor, downs: Tensor) -> tuple[Tensor, tuple]:
    """Return the tokens' outputs, and what the backward needs. `ups` and `downs` are the weights of my experts."""
    ranks = dist.get_world_size()
    # --- write this yourself ---
    best, chosen = (x @ router).topk(CHOICES)  # (tokens, CHOICES): route
    gates = best.softmax(-1)  # equals the softmax over all experts, divided by its sum over the chosen ones
    order = chosen.flatten().argsort(stable=True)  # sort by expert: choice i is one of token i // CHOICES
    counts = chosen.flatten().bincount(minlength=EXPERTS).view(ranks, -1)  # of my choices, by rank and expert
    arrivals = exchange(counts, [1] * ranks, [1] * ranks)  # of each rank's choices, for my experts
    sent, received = counts.sum(1).tolist(), arrivals.sum(1).tolist()

    rows = exchange(x[order // CHOICES], sent, received)  # dispatch: my experts' rows, by rank and expert
    # Which expert a row is for: if arrivals is [[1, 3], [2, 1]], then 0 1 1 1 0 0 1
    expert = torch.arange(len(ups)).repeat(ranks).repeat_interleave(arrivals.flatten())
    hidden, results = rows.new_empty(len(rows), HIDDEN), torch.empty_like(rows)
    for e in range(len(ups)):
        hidden[expert == e] = torch.relu(rows[expert == e] @ ups[e])
        results[expert == e] = hidden[expert == e] @ downs[e]
    results = exchange(results, received, sent)  # combine: in the order of my choices, as they left

    weighted = results * gates.flatten()[order, None]
    y = torch.zeros_like(x).index_add(0, order // CHOICES, weighted)
    # --- until here ---
    return y, (x, gates, chosen, order, sent, received, rows, expert, hidden, results)


def backward(dy: Tensor, router: Tensor, ups: Tensor, downs: Tensor, kept: tuple) -> tuple[Tensor, ...]:
    """Return dx and drouter, of my tokens, and dups and ddowns, of all tokens of my experts."""
    x, gates, chosen, order, sent, received, rows, expert, hidden, results = kept
    drows, dups, ddowns = torch.empty_like(rows), torch.empty_like(ups), torch.empty_like(downs)
    # --- write this yourself ---
    dweighted = dy[order // CHOICES]
    dresults = exchange(dweighted * gates.flatten()[order, None], sent, received)  # combine, mirrored
    for e in range(len(ups)):
        ddowns[e] = hidden[expert == e].T @ dresults[expert == e]
        dhidden = (dresults[expert == e] @ downs[e].T) * (hidden[expert == e] > 0)
        dups[e] = rows[expert == e].T @ dhidden
        drows[expert == e] = dhidden @ ups[e].T
    drows = exchange(drows, received, sent)  # dispatch, mirrored
    dx = torch.zeros_like(x).index_add(0, order // CHOICES, drows)

    dgates = torch.empty_like(gates)
    dgates.view(-1)[order] = (dweighted * results).sum(-1)  # the router learns through the gates only
    dbest = gates * (dgates - (gates * dgates).sum(-1, keepdim=True))  # of the softmax
    dlogits = x.new_zeros(len(x), EXPERTS).scatter(1, chosen, dbest)
    # --- until here ---
    return dx + dlogits @ router.T, x.T @ dlogits, dups, ddowns


def train(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[Tensor]]:
    """Take all steps. Returns the losses, two weights that are the same on all ranks, and this rank's experts."""
    random = torch.Generator().manual_seed(0)
    first = torch.randn(WIDTH, WIDTH, generator=random, dtype=dtype) * WIDTH**-0.5  # stands for earlier layers
    router = torch.randn(WIDTH, EXPERTS, generator=random, dtype=dtype)
    ups = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=random, dtype=dtype) * WIDTH**-0.5
    downs = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=random, dtype=dtype) * HIDDEN**-0.5
    ups, downs = ups.chunk(ranks)[rank].clone(), downs.chunk(ranks)[rank].clone()
    tokens, targets = torch.randn(2, TOKENS, WIDTH, generator=random, dtype=dtype)
    tokens, target = tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank]

    losses = []
    for step in range(STEPS):
        x = tokens @ first
        y, kept = forward(x, router, ups, downs)
        error = x + y - target
        loss = error.square().sum() / targets.numel()
        dy = 2 * error / targets.numel()
        dx, drouter, dups, ddowns = backward(dy, router, ups, downs, kept)
        dfirst = tokens.T @ (dy + dx)
        for gradient in (dfirst, drouter):  # not of experts: all of their tokens came to them
            dist.all_reduce(gradient)
        for weight, gradient in zip((first, router, ups, downs), (dfirst, drouter, dups, ddowns)):
            weight -= LEARNING_RATE * gradient
        dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}  loss {loss:.6f}")
    return losses, [first, router, ups, downs]


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # torchrun tells each rank its number; without it there is one
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
