"""One layer of the GPT that the playbook's memory formulas describe, to check them: 34 s b h + 5 a s^2 b bytes.

LayerNorm, multi-head attention with materialised scores, GELU over 4h, biases, three dropouts, half precision
(Korthikanti et al., arXiv:2205.05198, section 4). No step trains it.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Dropout(nn.Module):
    """Dropout that keeps one byte an element, as GPU kernels do; F.dropout on the CPU keeps a float mask."""

    def forward(self, x):
        return torch.native_dropout(x, 0.1, train=True)[0]


class SelfAttention(nn.Module):
    """Causal attention without the layer norm before it: 11 s b h + 5 a s^2 b bytes."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.dropout = Dropout()

    def forward(self, x):  # (batch, seq, hidden) -> (batch, seq, hidden)
        q, k, v = (  # (batch, heads, seq, d)
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(-2))

    def core(self, q, k, v):  # what selective recomputation computes again
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (batch, heads, seq, seq)
        scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)  # an addition keeps nothing
        return self.dropout(scores.softmax(-1)) @ v


class GptBlock(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, heads)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.attention_dropout, self.mlp_dropout = Dropout(), Dropout()

    def parts(self) -> dict:
        """The functions of x whose bytes the playbook adds up: norms 4, attention 11 + 5 a s / h, MLP 19."""
        return {
            "attention": lambda x: self.attention_dropout(self.attention(x)),
            "mlp": lambda x: self.mlp_dropout(self.down(F.gelu(self.up(x)))),
            "norms": lambda x: (self.attention_norm(x), self.mlp_norm(x.clone())),
        }

    def forward(self, x):  # (batch, seq, hidden) -> (batch, seq, hidden)
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp_dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
