"""Latent attention without keys and values: what decoding does, and training does not."""

import torch
from torch import Tensor

from common.latent_attention import Expansion


def absorbed_attention(q: Tensor, latent: Tensor, key: Tensor, expansion: Expansion) -> Tensor:
    """The same attention without K and V: queries go into the latent space, and outputs come back from there.

    A score is q . (W_k latent) = (W_k' q) . latent, so the product with W_k may be one of the query. Then all heads
    attend to one head of latents, with the rotated keys beside them. q (batch, heads, seq, nope_dim + rope_dim),
    latent (batch, 1, seq, kv_rank), key (batch, 1, seq, rope_dim) -> (batch, heads, seq, value_dim).

    For a pair of tokens a head multiplies 2 kv_rank + rope_dim numbers, and not nope_dim + rope_dim + value_dim: 1,088
    against 320 in DeepSeek-V3. So it does not pay in training, where every latent is expanded once for many queries. It
    pays where one new query meets thousands of stored latents, whose expansion it saves: in decoding.
    """
    shape = expansion.shape
    weight = expansion.weight.unflatten(0, (-1, shape.pair_width))  # (heads, nope_dim + value_dim, kv_rank)
    of_keys, of_values = weight.split([shape.nope_dim, shape.value_dim], dim=1)
    plain, turned = q.split([shape.nope_dim, shape.rope_dim], dim=-1)
    queries, keys = torch.cat((plain @ of_keys, turned), dim=-1), torch.cat((latent, key), dim=-1)
    scores = queries @ keys.transpose(-2, -1) * shape.key_width**-0.5  # (batch, heads, seq, seq)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ latent @ of_values.transpose(-2, -1)
