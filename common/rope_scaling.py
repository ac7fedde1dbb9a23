"""Two ways to stretch rotary embeddings to contexts that are longer than those of the training.

Pair i of the d numbers that turn goes through theta^(-2i/d) radians per position. What turns slowly has not come round
within the context of the training, so a longer one shows it angles that it has never seen. Both ways divide the slow
frequencies by `factor`, keep the fast ones, and blend those between them.

A configuration has one of them, and commands that only read configurations do without PyTorch, which takes seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's (its model card): it blends by the turns that a pair makes within the original context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    length = score_scale = 1.0

    @property
    def is_sound(self) -> bool:
        return 0 < self.low_freq_factor < self.high_freq_factor and self.factor > 0

    def kept(self, frequency: Tensor, theta: float) -> Tensor:
        """How much of each frequency (d/2,) stays: all of it if a pair turns `high_freq_factor` times or more."""
        turns = self.original_max_positions * frequency / (2 * math.pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071, section 3): it blends by the number of a pair, and sharpens the softmax.

    Sharper means longer queries and keys, or larger scores: `mscale` and `mscale_all_dim` say how much of either.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @property
    def is_sound(self) -> bool:
        return 0 < self.beta_slow < self.beta_fast and self.factor >= 1 and self.original_max_positions > 0

    def kept(self, frequency: Tensor, theta: float) -> Tensor:
        """How much of each frequency (d/2,) stays: all of it up to the pair that turns `beta_fast` times."""
        pairs = len(frequency)

        def pair_that_turns(times: float) -> float:
            return pairs * math.log(self.original_max_positions / (2 * math.pi * times)) / math.log(theta)

        first, last = math.floor(pair_that_turns(self.beta_fast)), math.ceil(pair_that_turns(self.beta_slow))
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        return 1 - ((frequency.new_tensor(range(pairs)) - first) / max(last - first, 1e-3)).clamp(0, 1)

    def sharper(self, share: float) -> float:
        """What the logarithm of `factor` makes of 1, with this share of it."""
        return 1 + 0.1 * share * math.log(self.factor)

    @property
    def length(self) -> float:
        """What the tables are multiplied by, and so the rotated parts of queries and keys."""
        if self.mscale and self.mscale_all_dim:
            return self.sharper(self.mscale) / self.sharper(self.mscale_all_dim)
        return self.sharper(1)

    @property
    def score_scale(self) -> float:
        """What latent attention multiplies its scores by, whose plain parts no table reaches (DeepSeek-V2's code)."""
        return self.sharper(self.mscale_all_dim) ** 2
