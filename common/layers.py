"""Small parts that every kind of layer is made of: the norm, the rotation, and two functions that others replace."""

import torch
from torch import nn


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32 for the narrow types, and float64 for float64, so that no float64 run ever passes through float32."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x, weight, eps):
    """x / rms(x) * weight over the last axis: (..., size), (size,) -> (..., size)."""
    y = x.to(at_least_float32(x.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a weight of its own."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x):  # (..., size) -> (..., size)
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x, residual):
        """Return the norm of x + residual, and x + residual: a replacement may do both at once."""
        x = x + residual  # what was added is not needed any more
        return self(x), x


def rotate(q, k, cos, sin):
    """Rotate the pairs (i, i + d/2) of each head of q and k (batch, heads, seq, d), computing in the tables' type."""

    def turned(x):
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return turned(q), turned(k)


def call(function, *inputs):
    """function(*inputs), which returns one tensor; a replacement may keep less of it for the backward."""
    return function(*inputs)


def apply_linears(x, linears):
    """The outputs of several linear layers for one input x; a replacement may prepare x once for all of them."""
    return [linear(x) for linear in linears]
