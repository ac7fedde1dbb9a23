"""Rotary embeddings (arXiv:2104.09864): the angles of each position."""

import torch

from common.layers import at_least_float32


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
