"""Ring attention by hand: causal, over a sequence that ranks divide in zigzag.

    python step06_context_parallel/sketch.py
    torchrun --nproc_per_node 2 step06_context_parallel/sketch.py

All ranks together hold the same sequence as one process, so both commands print the same losses, up to rounding.
A name that begins with d is a gradient: dq is that of the loss with respect to q.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

TOKENS, WIDTH, STEPS, LEARNING_RATE = 64, 16, 5, 1.0


def pass_on(mine: Tensor) -> Tensor:
    """Send a tensor to the next rank of the ring, and return that of the previous rank."""
    rank, ranks, arriving = dist.get_rank(), dist.get_world_size(), torch.empty_like(mine)
    if ranks == 1:
        return mine
    both = [dist.P2POp(dist.isend, mine, (rank + 1) % ranks), dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return arriving


def block(q: Tensor, k: Tensor, source: int) -> tuple[slice, slice, Tensor]:
    """Return which of my queries see which keys of rank `source`, and their scores. Rank r has parts r and -1 - r."""
    rank, half = dist.get_rank(), len(q) // 2
    # --- write this yourself ---
    queries, keys = slice(0, None), slice(0, None)
    if source < rank:
        keys = slice(0, half)  # both of my parts come after that rank's early part, and before its late part
    elif source > rank:
        queries = slice(half, None)  # my late part comes after both of that rank's parts, my early part before
    scores = q[queries] @ k[keys].T * WIDTH**-0.5
    if source == rank:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=bool).triu(1), -torch.inf)
    return queries, keys, scores
    # --- until here ---


def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of my queries (tokens, width), and the log of the sum of their exponential scores (tokens)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out, lse, ring = torch.zeros_like(q), q.new_full((len(q),), -torch.inf), torch.stack((k, v))
    # --- write this yourself ---
    for hop in range(ranks):
        k, v = ring
        queries, keys, scores = block(q, k, source=(rank - hop) % ranks)
        total = torch.logaddexp(lse[queries], scores.logsumexp(-1))  # of the keys so far, and these
        p = (scores - total[:, None]).exp()  # each key's weight among them
        out[queries] = out[queries] * (lse[queries] - total).exp()[:, None] + p @ v[keys]
        lse[queries] = total
        if hop + 1 < ranks:  # one hop more, and my own keys would return, which only the backward needs
            ring = pass_on(ring)
    # --- until here ---
    return out, lse


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of my tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dq, ring = torch.zeros_like(q), torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))
    # --- write this yourself ---
    for hop in range(ranks):
        k, v, dk, dv = ring  # gradients travel with their keys and values
        queries, keys, scores = block(q, k, source=(rank - hop) % ranks)
        p = (scores - lse[queries, None]).exp()  # each key's weight among all keys
        dp = dout[queries] @ v[keys].T
        dscores = p * (dp - (dout * out)[queries].sum(-1, keepdim=True)) * WIDTH**-0.5
        dq[queries] += dscores @ k[keys]
        dk[keys] += dscores.T @ q[queries]  # all ranks add their part
        dv[keys] += p.T @ dout[queries]
        ring = pass_on(ring)
    # --- until here ---
    return dq, ring[2], ring[3]  # after the last hop they are home


def train(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], Tensor]:
    """Take all steps. Returns the losses and the weights, the same on every rank."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(3, WIDTH, WIDTH, generator=random, dtype=dtype) * WIDTH**-0.5  # of q, k and v
    parts = [tokens.chunk(2 * ranks) for tokens in torch.randn(2, TOKENS, WIDTH, generator=random, dtype=dtype)]
    x, target = (torch.cat((part[rank], part[-1 - rank])) for part in parts)  # my tokens, early and late

    losses = []
    for step in range(STEPS):
        q, k, v = x @ weights
        out, lse = forward(q, k, v)
        error = out - target
        loss = error.square().sum() / (TOKENS * WIDTH)
        dqkv = backward(2 * error / (TOKENS * WIDTH), q, k, v, out, lse)
        dweights = x.T @ torch.stack(dqkv)  # my tokens' part of the sum
        dist.all_reduce(dweights)
        weights -= LEARNING_RATE * dweights
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
