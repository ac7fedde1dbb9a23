"""The shape of the model: `ModelConfig`, and the rules that its numbers must obey."""

import math
from dataclasses import dataclass

from common.errors import UsageError


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the low RoPE frequencies (Llama 3.1 model card; formula in `model.rope_tables`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-style decoder. `experts` 0 means a dense model; `ffn` is the width of the dense SwiGLU."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tie_embeddings: bool
    head_dim: int | None = None  # None: hidden / heads
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 8192
    experts: int = 0  # routed experts of every layer after the first `dense_layers`
    top_k: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    expert_ffn: int = 0
    gate: str = "softmax"  # over the scores of all experts, or "sigmoid" of each
    normalize_gates: bool = True  # the gates of a token's experts sum to 1, before they are
    gate_scale: float = 1.0  # multiplied by this
    expert_groups: int = 1  # equal groups of neighbors: a token's experts belong to
    groups_per_token: int = 1  # so many of them at most (node-limited routing)
    mtp: int = 0  # blocks behind the layers that predict the token after the next one: 0 or 1

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def blocks(self) -> int:
        """The layers, and the block of multi-token prediction, which comes behind them and has the next number."""
        return self.layers + self.mtp

    @property
    def expert_layers(self) -> range:
        """The blocks that have experts. (Without any, it begins, too, where they end.)"""
        return range(self.dense_layers if self.experts else self.blocks, self.blocks)

    def has_experts(self, index: int) -> bool:
        """Whether this layer has experts in place of a dense MLP."""
        return index in self.expert_layers

    def check(self) -> None:
        """Raise UsageError unless the shapes fit together."""
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if self.head_dim is None and self.hidden % self.heads:
            raise UsageError(f"--heads {self.heads} does not divide --hidden {self.hidden}")
        if self.heads % self.kv_heads:
            raise UsageError(f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}")
        if self.head_width < 2 or self.head_width % 2:
            division = f"--hidden {self.hidden} over --heads {self.heads}"
            raise UsageError(f"{division} makes heads {self.head_width} wide; rotary embeddings turn pairs")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise UsageError(f"--top-k {self.top_k} must lie between 1 and --experts {self.experts}")
        if self.mtp not in (0, 1):
            raise UsageError(f"--mtp {self.mtp} must be 0 or 1: one block predicts one token more")
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"the model's {name} {getattr(self, name)} must be positive")
