"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): K and V are made of a few shared numbers.

For each token a layer computes a *latent*, `kv_rank` numbers, and a *rotated key*, `rope_dim` numbers. All heads share
both. A head's key has two parts: a plain one, a product of the latent, and the rotated key, which is the same in every
head. Its value is another product of the latent. Positions enter through the rotated parts alone. With DeepSeek-V3's
128 heads, 192 wide keys and 128 wide values:

    x  7168 --kv_a_proj--> 512 + 64 --kv_a_norm--> latent 512 --kv_b_proj--> 128 plain and 128 value, for each head
                                \\-----------------> rotated key 64, one for all heads
    x  7168 --q_a_proj---> 1536 --q_a_norm--> 1536 --q_b_proj--> 128 plain and 64 rotated, for each head

So whatever must be kept or sent for a token's keys and values in all heads can be 576 numbers in place of 128 x (192 +
128) = 40,960. The step from the one to the other, `expand`, can be made anywhere: that is what context parallelism
uses.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.layers import RMSNorm, apply_linears, call, rotate
from common.model_config import LatentShape, ModelConfig

LATENT_EPS = 1e-6  # of the norms of latents, in transformers' class whatever `norm_eps` is


class Expansion(NamedTuple):
    """How K and V come from latents: a product with `weight`, and an arrangement of numbers, which is linear, too."""

    weight: Tensor  # (heads * (nope_dim + value_dim), kv_rank), or the rows of some heads
    shape: LatentShape

    def arrange(self, product: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """product (batch, seq, heads * (nope_dim + value_dim)), rotated key (batch, 1, seq, rope_dim) -> K and V.

        They are (batch, heads, seq, nope_dim + rope_dim) and (batch, heads, seq, value_dim).
        """
        shape = self.shape
        product = product.unflatten(-1, (-1, shape.pair_width)).transpose(1, 2)  # (batch, heads, seq, ...)
        plain, v = product.split([shape.nope_dim, shape.value_dim], dim=-1)
        return torch.cat((plain, key.expand(-1, plain.shape[1], -1, -1)), dim=-1), v

    def arrange_backward(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of product and rotated key, for those of K and V. All heads add to the rotated key's."""
        plain, turned = dk.split([self.shape.nope_dim, self.shape.rope_dim], dim=-1)
        return torch.cat((plain, dv), dim=-1).transpose(1, 2).flatten(-2), turned.sum(1, keepdim=True)


def pairs_to_halves(x: Tensor) -> Tensor:
    """Reorder the last axis from 0 1 2 3 4 5 to 0 2 4 1 3 5: neighbors, which turn together in these models, go to the
    places i and i + d/2, which `rotate` turns together."""
    return x.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)


def same(x: Tensor) -> Tensor:
    """x itself, which is whole where nobody divides sequences."""
    return x


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are products of a latent.

    core          as in `Attention`; values may be narrower than keys
    core_expands  whether the core takes latent and rotated key, and makes K and V of them itself
    whole         makes the whole sequence of this rank's part, for what all heads read: latent and rotated key
    """

    def __init__(self, config: ModelConfig, core):
        super().__init__()
        shape, hidden = config.latent, config.hidden
        self.shape, self.core, self.call, self.core_expands = shape, core, call, False
        self.apply_linears, self.rotate, self.whole = apply_linears, rotate, same
        self.key_width, self.pair_width, self.value_width = shape.key_width, shape.pair_width, shape.value_dim
        self.score_scale = config.rope_scaling.score_scale if config.rope_scaling else 1.0
        queries = config.heads * shape.key_width
        self.q_proj = None if shape.q_rank else nn.Linear(hidden, queries, bias=False)
        self.q_a_proj = nn.Linear(hidden, shape.q_rank, bias=False) if shape.q_rank else None
        self.q_a_norm = RMSNorm(shape.q_rank, LATENT_EPS) if shape.q_rank else None
        self.q_b_proj = nn.Linear(shape.q_rank, queries, bias=False) if shape.q_rank else None
        self.kv_a_proj = nn.Linear(hidden, shape.shared_width, bias=False)
        self.kv_a_norm = RMSNorm(shape.kv_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(shape.kv_rank, config.heads * shape.pair_width, bias=False)
        self.o_proj = nn.Linear(config.heads * shape.value_dim, hidden, bias=False)

    def forward(self, x, rope, *mask):  # (batch, seq, hidden) -> (batch, seq, hidden)
        shape = self.shape
        if self.q_proj is None:
            (q,) = self.apply_linears(self.q_a_norm(self.q_a_proj(x)), (self.q_b_proj,))
        else:
            (q,) = self.apply_linears(x, (self.q_proj,))
        q = q.unflatten(-1, (-1, shape.key_width)).transpose(1, 2)  # (batch, heads, seq, nope_dim + rope_dim)

        latent, key = self.kv_a_proj(x).split([shape.kv_rank, shape.rope_dim], dim=-1)
        shared = self.whole(torch.cat((self.kv_a_norm(latent), key), dim=-1)).unsqueeze(1)  # a head that all share
        latent, key = shared.split([shape.kv_rank, shape.rope_dim], dim=-1)  # (batch, 1, seq, ...)

        plain, turning = q.split([shape.nope_dim, shape.rope_dim], dim=-1)
        turned, key = self.rotate(pairs_to_halves(turning), pairs_to_halves(key), *rope)
        q = torch.cat((plain, turned), dim=-1)
        if self.score_scale != 1:
            q = q * self.score_scale
        out = self.call(self.attend, q, latent, key, *mask)  # (batch, heads, seq, value_dim)
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def attend(self, q, latent, key, *mask):
        """The core, and `expand` before it or in it: a recomputed attention keeps the latent, not K and V."""
        if self.core_expands:
            return self.core(q, latent, key, *mask, expansion=Expansion(self.kv_b_proj.weight, self.shape))
        return self.core(q, *self.expand(latent, key), *mask)

    def expand(self, latent, key):
        """latent (batch, 1, seq, kv_rank), rotated key (batch, 1, seq, rope_dim) -> K and V of this rank's heads."""
        return Expansion(self.kv_b_proj.weight, self.shape).arrange(self.kv_b_proj(latent.squeeze(1)), key)
