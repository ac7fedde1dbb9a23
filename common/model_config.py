"""The shape of the model: `ModelConfig`, and the rules that its numbers must obey."""

import math
from dataclasses import astuple, dataclass

from common.errors import UsageError
from common.rope_scaling import RopeScaling, YarnScaling


@dataclass(frozen=True)
class LatentShape:
    """The widths of latent attention (`latent_attention.py`)."""

    q_rank: int  # width of the latent of queries; 0: they come from the hidden state
    kv_rank: int  # width of the latent of keys and values
    nope_dim: int  # of a head's keys, the width of the part without positions
    rope_dim: int  # the width of the rotated part, which all heads share
    value_dim: int

    @classmethod
    def parse(cls, text: str) -> "LatentShape":
        """Return what `--latent Q,KV,NOPE,ROPE,VALUE` describes. Raises UsageError if it does not."""
        parts = text.split(",")
        if len(parts) != 5 or not all(part.isdecimal() for part in parts):
            raise UsageError(f"--latent {text} is not Q,KV,NOPE,ROPE,VALUE, such as 1536,512,128,64,128")
        return cls(*map(int, parts))

    @property
    def key_width(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def pair_width(self) -> int:
        """What the latent is multiplied to, for one head: the plain part of a key, and a value."""
        return self.nope_dim + self.value_dim

    @property
    def shared_width(self) -> int:
        """What all heads of a token share: the latent and the rotated key."""
        return self.kv_rank + self.rope_dim

    def check(self) -> None:
        """Raise UsageError unless there is something of each, and pairs to rotate."""
        given = f"latent attention {','.join(map(str, astuple(self)))} (Q,KV,NOPE,ROPE,VALUE)"
        if min(self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim) < 1 or self.rope_dim % 2:
            raise UsageError(f"{given}: all but Q must be at least 1, and ROPE even, as it turns pairs")
        if self.value_dim > self.key_width:
            raise UsageError(f"{given}: values wider than keys, {self.key_width}, have no kernel here")


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
    rope_scaling: RopeScaling | YarnScaling | None = None
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
    latent: LatentShape | None = None  # K and V are products of a latent; then kv_heads is heads
    mtp: int = 0  # blocks behind the layers that predict the token after the next one: 0 or 1

    @property
    def head_width(self) -> int:
        """Width of one attention head: of its queries and keys."""
        if self.latent:
            return self.latent.key_width
        return self.head_dim or self.hidden // self.heads

    @property
    def rotary_width(self) -> int:
        """How much of a head rotary embeddings turn."""
        return self.latent.rope_dim if self.latent else self.head_width

    @property
    def value_width(self) -> int:
        """Width of a head's values."""
        return self.latent.value_dim if self.latent else self.head_width

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
        if self.latent:
            self.latent.check()
            if self.kv_heads != self.heads:
                raise UsageError(f"latent attention has as many K/V heads as --heads {self.heads}, not {self.kv_heads}")
        elif self.head_dim is None and self.hidden % self.heads:
            raise UsageError(f"--heads {self.heads} does not divide --hidden {self.hidden}")
        if self.heads % self.kv_heads:
            raise UsageError(f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}")
        if self.rotary_width < 2 or self.rotary_width % 2:
            division = f"--hidden {self.hidden} over --heads {self.heads}"
            raise UsageError(f"{division} makes heads {self.head_width} wide; rotary embeddings turn pairs")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise UsageError(f"--top-k {self.top_k} must lie between 1 and --experts {self.experts}")
        if self.mtp not in (0, 1):
            raise UsageError(f"--mtp {self.mtp} must be 0 or 1: one block predicts one token more")
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"the model's {name} {getattr(self, name)} must be positive")
