"""A linear layer in three products, with two seams.

The backward of a linear layer is two multiplications, and other ranks wait for only one of them, the input's gradient.
When the weight's is computed is up to whoever holds the weight: it may set `weight.postpone`. How all three are
computed is up to it as well: an object `weight.products` has `output` and `input_gradient` with the arguments below,
and `weight_gradient(gradient, x)` in place of `product`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def output(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y = x W' for x (..., in) and the weight (out, in): (..., out)."""
    return weight.products.output(x, weight) if hasattr(weight, "products") else F.linear(x, weight)


def input_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient (..., in) of x, for the gradient (..., out) of y."""
    return weight.products.input_gradient(gradient, weight) if hasattr(weight, "products") else gradient @ weight


def product(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The weight gradient (out, in) of y = x W' for x (..., in) and the gradient (..., out) of y."""
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def weight_gradient(
    weight: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, multiply: Callable = product
) -> torch.Tensor | None:
    """The gradient of `weight`: `multiply(gradient, x)`, for a linear layer their product.

    None if there is `weight.postpone`: it gets (weight, gradient, x, multiply), and sees to the rest. Its x is
    detached, as the graph behind it would keep the input of a pipeline's stage alive.
    """
    if multiply is product and hasattr(weight, "products"):
        multiply = weight.products.weight_gradient
    if hasattr(weight, "postpone"):
        weight.postpone((weight, gradient, x.detach(), multiply))
        return None
    return multiply(gradient, x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight  # itself: what `saved_tensors` gives back may be another tensor of the same memory
        ctx.save_for_backward(x)
        return output(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return input_gradient(gradient, ctx.weight), weight_gradient(ctx.weight, gradient, x)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Linear layer without bias, with this seam: x (..., in), weight (out, in) -> (..., out)."""
    return _Linear.apply(x, weight)
