"""The Llama-style decoder that every step trains (Touvron et al., arXiv:2302.13971; Llama 3, arXiv:2407.21783).

Pre-norm blocks of grouped-query attention (arXiv:2305.13245) with rotary embeddings (arXiv:2104.09864) and SwiGLU
(arXiv:2002.05202), RMSNorm (arXiv:1910.07467), embedding tied to the head or not. Norm statistics, rotary tables,
softmax and loss are computed in at least float32.

The model knows nothing about parallelism. It may be built for a range of layers, and what others replace from outside
are attributes. Some are modules: linear layers, norms, a layer's `mlp`, the embedding and the head. Others are
functions: the attention's `core` and `rotate`, SwiGLU's `activation`, `apply_linears`, the `loss`, and `call`, by which
the attention calls its core and a block its layer: whatever the core and the layer are made of by then.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common.latent_attention import LatentAttention
from common.layers import RMSNorm, apply_linears, at_least_float32, call, rotate
from common.model_config import ModelConfig
from common.parameter import attach_specs
from common.rope import rope_tables


def naive_attention(q, k, v):
    """Causal attention that materialises the scores: q (batch, heads, seq, d), k and v (batch, kv_heads, seq, d)."""
    repeats, seq = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5  # (batch, heads, seq, seq)
    future = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(-1, dtype=at_least_float32(q.dtype)).to(q.dtype) @ v  # (batch, heads, seq, d)


def fused_attention(q, k, v):
    """The same without materialised scores (FlashAttention, arXiv:2205.14135), by PyTorch's kernel."""
    # The only fused CUDA kernel for float32, and for GPUs before Ampere, has no grouped queries
    if q.is_cuda and (q.dtype == torch.float32 or torch.cuda.get_device_capability(q.device) < (8, 0)):
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    narrower = k.shape[-1] - v.shape[-1]  # of latent attention; not every kernel has values of another width
    v = F.pad(v, (0, narrower)) if narrower else v
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out[..., :-narrower] if narrower else out


ATTENTION_CORES = {"naive": naive_attention, "fused": fused_attention}


class Attention(nn.Module):
    """Grouped-query causal self-attention. `core` maps q, k, v (batch, heads or kv_heads, seq, d) to the shape of q."""

    def __init__(self, config: ModelConfig, core):
        super().__init__()
        self.head_width, self.core, self.call = config.head_width, core, call
        self.apply_linears, self.rotate = apply_linears, rotate
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_width, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_width, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_width, config.hidden, bias=False)

    def forward(self, x, rope, *mask):  # (batch, seq, hidden) -> (batch, seq, hidden)
        def split(y):  # (batch, seq, heads * d) -> (batch, heads, seq, d)
            return y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

        q, k, v = map(split, self.apply_linears(x, (self.q_proj, self.k_proj, self.v_proj)))
        out = self.call(self.core, *self.rotate(q, k, *rope), v, *mask)  # (batch, heads, seq, d)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def attention_of(config: ModelConfig, core) -> nn.Module:
    """The attention of one layer of this model."""
    return (LatentAttention if config.latent else Attention)(config, core)


def silu_and_multiply(gate, up):
    """silu(gate) * up, of equal shapes."""
    return F.silu(gate) * up


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.apply_linears, self.activation = apply_linears, silu_and_multiply
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):  # (batch, seq, hidden) -> (batch, seq, hidden)
        gate, up = self.apply_linears(x, (self.gate_proj, self.up_proj))  # (batch, seq, ffn) each
        return self.down_proj(self.activation(gate, up))


class Block(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)). All of it is in `compute`."""

    def __init__(self, config: ModelConfig, core):
        super().__init__()
        self.call = call
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = attention_of(config, core)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = SwiGLU(config.hidden, config.ffn)

    def forward(self, x, rope, *mask):  # (batch, seq, hidden) -> (batch, seq, hidden)
        return self.call(self.compute, x, *rope, *mask)

    def compute(self, x, cos, sin, *mask):
        normed, x = self.mlp_norm.after_adding(self.attention(self.attention_norm(x), (cos, sin), *mask), x)
        return x + self.mlp(normed)


def initial_stds(config: ModelConfig) -> dict[str, float | None]:
    """How initial weights are drawn, by the end of a parameter's name: see `attach_specs`.

    GPT-2's initialization: 0.02, and less for the 2 * layers matrices that add to the residual stream. The embedding
    has 1, unless it is the head too, since RMSNorm's gradients spike if the stream starts small (Takase et al., "Spike
    No More", arXiv:2312.16903).
    """
    residual = 0.02 / math.sqrt(2 * config.layers)
    stds = {"norm.weight": None, "o_proj.weight": residual, "down_proj.weight": residual}
    return stds | {"embedding.weight": 0.02 if config.tie_embeddings else 1.0, "": 0.02}


class Decoder(nn.Module):
    """Layers `first` to `last` (not included) of the model, on the meta device: without memory or values.

    With layer 0 it has the embedding and takes token ids (batch, seq) int64, else hidden states (batch, seq, hidden).
    With the last layer it has the final norm and the head and returns logits (batch, seq, vocab), else hidden states.

    layers  by number. Those of `own` run in `forward`; there may be others, which somebody else calls

    loss    maps what the head returns, and targets (batch, seq), to their summed loss: who divides the head replaces it
    """

    def __init__(self, config: ModelConfig, core=fused_attention, first: int = 0, last: int | None = None):
        super().__init__()
        last = config.layers if last is None else last
        self.config, self.own = config, range(first, last)
        self.has_embedding, self.has_head = first == 0, last == config.layers
        with torch.device("meta"):
            if self.has_embedding:
                # From a tensor: nn.Embedding would draw values, for which it imports torch._dynamo, a second's work
                matrix = torch.empty(config.vocab, config.hidden)
                self.embedding = nn.Embedding.from_pretrained(matrix, freeze=False)
            self.layers = nn.ModuleDict({str(index): Block(config, core) for index in range(first, last)})
            if self.has_head:
                self.norm = RMSNorm(config.hidden, config.norm_eps)
                self.head = nn.Linear(config.hidden, config.vocab, bias=False)
                self.loss = cross_entropy_sum
        if config.tie_embeddings and self.has_embedding and self.has_head:
            self.head.weight = self.embedding.weight
        attach_specs(self, initial_stds(config))
        if config.tie_embeddings and self.has_head:
            self.head.weight.spec.name = "embedding.weight"  # even if these layers do not include the embedding

    def forward(self, x, positions=None, *mask):
        """`positions` (seq,) are those of the tokens in their sequence, by default 0, 1, 2, ...

        What `mask` holds is handed to the attention's core. The cores of this file take none.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        if self.has_embedding:
            x = self.embedding(x)  # (batch, seq, hidden)
        rope = rope_tables(self.config, positions, x.dtype)
        for index in self.own:
            x = self.layers[str(index)](x, rope, *mask)
        return self.head(self.norm(x)) if self.has_head else x


def cross_entropy_sum(logits, targets):
    """Sum over tokens of -log p(target): logits (batch, seq, vocab), targets (batch, seq) -> () in at least float32."""
    return F.cross_entropy(logits.flatten(0, 1).to(at_least_float32(logits.dtype)), targets.flatten(), reduction="sum")
