"""A linear layer in two products, with a seam at the second one.

The backward of a linear layer is two multiplications, and other ranks wait for only one of them, the input's gradient.
When the weight's is computed is up to whoever holds the weight: it may set `weight.postpone`.
"""

from collections.abc import Callable

import torch


def product(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The weight gradient (out, in) of y = x W' for x (..., in) and the gradient (..., out) of y."""
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def weight_gradient(
    weight: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, multiply: Callable = product
) -> torch.Tensor | None:
    """The gradient of `weight`: `multiply(gradient, x)`, for a linear layer their product.

    None if there is `weight.postpone`: it gets (weight, gradient, x, multiply), and sees to the rest.
    """
    if hasattr(weight, "postpone"):
        weight.postpone((weight, gradient, x, multiply))
        return None
    return multiply(gradient, x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight  # itself: what `saved_tensors` gives back may be another tensor of the same memory
        ctx.save_for_backward(x)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, weight_gradient(ctx.weight, gradient, x)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Linear layer without bias, with this seam: x (..., in), weight (out, in) -> (..., out)."""
    return _Linear.apply(x, weight)
