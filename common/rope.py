"""Rotary embeddings (arXiv:2104.09864): the angles of each position, and two ways to stretch them to longer contexts.

Pair i of the d numbers that turn goes through theta^(-2i/d) radians per position. What turns slowly has not come round
within the context of the training, so a longer one shows it angles that it has never seen. Both ways divide the slow
frequencies by `factor`, keep the fast ones, and blend those between them.
"""

import math
from dataclasses import dataclass

import torch

from common.layers import at_least_float32


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

    def kept(self, frequency: torch.Tensor, theta: float) -> torch.Tensor:
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

    def kept(self, frequency: torch.Tensor, theta: float) -> torch.Tensor:
        """How much of each frequency (d/2,) stays: all of it up to the pair that turns `beta_fast` times."""
        pairs = len(frequency)

        def pair_that_turns(times: float) -> float:
            return pairs * math.log(self.original_max_positions / (2 * math.pi * times)) / math.log(theta)

        first, last = math.floor(pair_that_turns(self.beta_fast)), math.ceil(pair_that_turns(self.beta_slow))
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        return 1 - ((torch.arange(pairs).to(frequency) - first) / max(last - first, 1e-3)).clamp(0, 1)

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


def rope_tables(config, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each (len(positions), rotary_width), of the rotation angles position / theta^(2i/d).

    Of `config` it takes rotary_width, rope_theta and rope_scaling, which may be None.
    """
    d, scaling = config.rotary_width, config.rope_scaling
    exponents = torch.arange(0, d, 2, device=positions.device).to(at_least_float32(dtype)) / d
    frequency = 1.0 / config.rope_theta**exponents  # (d/2,)
    if scaling is not None:
        kept = scaling.kept(frequency, config.rope_theta)
        frequency = frequency * kept + frequency / scaling.factor * (1 - kept)
    angles = torch.outer(positions.to(frequency.dtype), frequency)  # (seq, d/2)
    angles = torch.cat((angles, angles), dim=-1)  # (seq, d): elements i and i + d/2 of a head turn by the same angle
    length = scaling.length if scaling else 1.0
    return length * angles.cos(), length * angles.sin()
