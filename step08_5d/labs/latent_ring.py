"""Ring attention by hand for latent attention: causal, over a sequence that ranks divide in zigzag.

    python step08_5d/labs/latent_ring.py
    torchrun --nproc_per_node 2 step08_5d/labs/latent_ring.py

Both commands print how far the ring is from autograd on the whole sequence. A name that begins with d is a gradient.
"""

import os

import common.entry  # noqa: F401 (before torch: one thread per process by default)

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor

from common.layers import at_least_float32
from step06_context_parallel.attention_block import KERNELS, AttentionGradients, MergedAttention
from step06_context_parallel.sequence_layouts import ScoreBlock, SequenceLayout, token_positions

TOKENS, HEADS, PLAIN, ROTATED, VALUE, LATENT = 48, 4, 8, 4, 6, 10  # TOKENS of the whole sequence; others are widths
KERNEL = KERNELS["naive"]  # which computes a block of attention


def pass_on(mine: Tensor) -> Tensor:
    """Send a tensor to the next rank of the ring, and return that of the previous rank."""
    rank, ranks, mine = dist.get_rank(), dist.get_world_size(), mine.contiguous()
    if ranks == 1:
        return mine
    arriving = torch.empty_like(mine)
    both = [dist.P2POp(dist.isend, mine, (rank + 1) % ranks), dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return arriving


def positions_of(rank: int) -> Tensor:
    """The positions of a rank's tokens in the sequence: (tokens,)."""
    return token_positions("zigzag", TOKENS, dist.get_world_size(), rank)


def block_of(source: int) -> ScoreBlock:
    """Which of my queries see which keys of rank `source`."""
    ranks = dist.get_world_size()
    (block,) = SequenceLayout("zigzag", TOKENS, ranks).plan(dist.get_rank()).blocks[source]
    return block


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn each pair of numbers of x (..., tokens, d) by an angle that grows with the position; `-positions` undoes it.

    Turns add up: rotate(rotate(x, a), b) is rotate(x, a + b).
    """
    half = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = (each.to(at_least_float32(x.dtype)) for each in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def expand(latent: Tensor, turned: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys (batch, heads, tokens, PLAIN + ROTATED) and values (batch, heads, tokens, VALUE).

    Args:
        latent: (batch, tokens, LATENT). turned: the rotated key (batch, tokens, ROTATED), which all heads share.
        weight: (heads * (PLAIN + VALUE), LATENT).
    """
    product = (latent @ weight.T).unflatten(-1, (-1, PLAIN + VALUE)).transpose(1, 2)
    plain, v = product.split((PLAIN, VALUE), dim=-1)
    return torch.cat((plain, turned.unsqueeze(1).expand(-1, plain.shape[1], -1, -1)), dim=-1), v


def forward(q: Tensor, latent: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of my queries (batch, heads, tokens, VALUE), and their log-sum-exps (batch, heads, tokens).

    Args:
        q: (batch, heads, tokens, PLAIN + ROTATED), which has been rotated. latent: (batch, tokens, LATENT).
        key: (batch, tokens, ROTATED), which has not been rotated yet.
        weight: what `expand` multiplies by, the same on all ranks.
    """
    rank, ranks, merged = dist.get_rank(), dist.get_world_size(), MergedAttention(q, KERNEL, VALUE)
    # --- write this yourself ---
    shared = torch.cat((latent, rotate(key, positions_of(rank))), dim=-1)  # a token's numbers that all heads need
    for hop in range(ranks):
        k, v = expand(*shared.split((LATENT, ROTATED), dim=-1), weight)
        merged.add(block_of((rank - hop) % ranks), k, v)
        if hop + 1 < ranks:
            shared = pass_on(shared)
    # --- until here ---
    return merged.out, merged.lse


def backward(
    dout: Tensor, q: Tensor, latent: Tensor, key: Tensor, weight: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dlatent and dkey of my tokens, and what my queries contribute to dweight. Shapes are as in `forward`.

    dkey is the gradient of the key before its rotation.
    """
    rank, ranks, gradients = dist.get_rank(), dist.get_world_size(), AttentionGradients(dout, q, out, lse, KERNEL)
    # --- write this yourself ---
    shared = torch.cat((latent, rotate(key, positions_of(rank))), dim=-1)
    total = torch.zeros_like(shared, dtype=lse.dtype)  # the gradient of `shared`, which travels with it
    dweight = torch.zeros_like(weight, dtype=lse.dtype)
    for hop in range(ranks):
        visiting, turned = shared.split((LATENT, ROTATED), dim=-1)
        k, v = expand(visiting, turned, weight)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        gradients.add(block_of((rank - hop) % ranks), k, v, dk, dv)
        dproduct = torch.cat((dk[..., :PLAIN], dv), dim=-1).transpose(1, 2).flatten(2)  # as `expand`, backwards
        dweight += dproduct.flatten(0, 1).T @ visiting.flatten(0, 1)  # of every hop, and it stays here
        total[..., :LATENT] += dproduct @ weight
        total[..., LATENT:] += dk[..., PLAIN:].sum(1)  # all heads share it
        shared, total = pass_on(shared), pass_on(total)
    dlatent, dkey = total.split((LATENT, ROTATED), dim=-1)  # after the last hop they are home
    dkey = rotate(dkey, -positions_of(rank))
    # --- until here ---
    return gradients.dq, dlatent, dkey, dweight


def compare(rank: int, ranks: int) -> dict[str, float]:
    """How far the ring is from the whole sequence on one rank: by name, the largest difference on this rank."""
    random = torch.Generator().manual_seed(0)
    sizes = (1, HEADS, TOKENS, PLAIN + ROTATED), (1, TOKENS, LATENT), (1, TOKENS, ROTATED)
    sizes += (HEADS * (PLAIN + VALUE), LATENT), (1, HEADS, TOKENS, VALUE)
    *inputs, dout = (torch.randn(size, generator=random, dtype=torch.float64) for size in sizes)
    q, latent, key, weight = (each.requires_grad_() for each in inputs)
    k, v = expand(latent, rotate(key, torch.arange(TOKENS)), weight)
    scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(
        torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf
    )
    whole = scores.softmax(-1) @ v
    expected = {"out": whole} | dict(
        zip(("dq", "dlatent", "dkey", "dweight"), torch.autograd.grad(whole, inputs, dout))
    )

    mine = positions_of(rank)
    q, latent, key, dout = (each.detach()[..., mine, :] for each in (q, latent, key, dout))
    out, lse = forward(q, latent, key, weight.detach())
    found = backward(dout, q, latent, key, weight.detach(), out, lse)
    dist.all_reduce(found[3])  # a sum over queries, as every weight's gradient
    found = {"out": out} | dict(zip(("dq", "dlatent", "dkey", "dweight"), found))
    expected = {name: each if name == "dweight" else each[..., mine, :] for name, each in expected.items()}
    return {name: (found[name] - each).abs().max().item() for name, each in expected.items()}


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # torchrun tells each rank its number; without it there is one
    found = compare(dist.get_rank(), dist.get_world_size()).items()
    print(f"rank {dist.get_rank()}:", ", ".join(f"{name} {difference:.0e}" for name, difference in found))
    dist.destroy_process_group()
