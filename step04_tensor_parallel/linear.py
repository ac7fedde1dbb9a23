"""A linear layer in three products, with two seams: places where other code may step in.

The backward of a linear layer is two multiplications, and other ranks wait for only one of them, the input's gradient.
Two attributes of a weight change what happens here:

  weight.products       says how the three products are computed: an object with the functions of `Dense`
  weight.gradient_sink  takes the weight's gradient, which then never reaches autograd. It is called with (weight,
                        gradient, x, multiply), and `multiply(gradient, x)` is the gradient of the weight, as the
                        products return it. The sink calls it exactly once, since it may work in place. It need not
                        do so at once.

Products may return the weight's gradient as a function that adds it to a sum (step 1's `Add`). Autograd cannot take
that, so these weights need a sink which can.

A weight may also have several matrices, each for some of the rows of x. Then all three products are told which rows
these are (`*rows` below), and `default` says how they are computed if the weight does not.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F


class Dense:
    """The products of a linear layer y = x W': x (..., in), weight (out, in), y and its gradient (..., out)."""

    @staticmethod
    def output(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return y."""
        return F.linear(x, weight)

    @staticmethod
    def input_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x, for that of y."""
        return gradient @ weight

    @staticmethod
    def weight_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight, for that of y."""
        return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def output(x: torch.Tensor, weight: torch.Tensor, *rows, default=Dense) -> torch.Tensor:
    """y, by the weight's products."""
    return getattr(weight, "products", default).output(x, weight, *rows)


def input_gradient(gradient: torch.Tensor, weight: torch.Tensor, *rows, default=Dense) -> torch.Tensor:
    """The gradient of x, by the weight's products."""
    return getattr(weight, "products", default).input_gradient(gradient, weight, *rows)


def weight_gradient(
    weight: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, *rows, default=Dense
) -> torch.Tensor | None:
    """The gradient of the weight, by its products; None if its sink takes it."""
    products = getattr(weight, "products", default)
    return hand_over(weight, gradient, x, lambda gradient, x: products.weight_gradient(gradient, x, *rows))


def hand_over(weight: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, multiply: Callable) -> torch.Tensor | None:
    """Return `multiply(gradient, x)`, the gradient of `weight`; None if its sink takes it.

    The sink's x is detached, as the graph behind it would keep the input of a pipeline's stage alive. Raises TypeError
    if the products return a function, and there is no sink.
    """
    if hasattr(weight, "gradient_sink"):
        weight.gradient_sink(weight, gradient, x.detach(), multiply)
        return None
    result = multiply(gradient, x)
    if not isinstance(result, torch.Tensor):
        raise TypeError("products that return a function in place of a gradient need a `gradient_sink` that takes it")
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, default, *rows):
        ctx.weight = weight  # itself: what `saved_tensors` gives back may be another tensor of the same memory
        ctx.rows, ctx.default = rows, default
        ctx.save_for_backward(x)
        return output(x, weight, *rows, default=default)

    @staticmethod
    def backward(ctx, gradient):
        (x,), weight, rows, default = ctx.saved_tensors, ctx.weight, ctx.rows, ctx.default
        dx = input_gradient(gradient, weight, *rows, default=default)
        return dx, weight_gradient(weight, gradient, x, *rows, default=default), None, *(None for _ in rows)


def linear(x: torch.Tensor, weight: torch.Tensor, *rows, default=Dense) -> torch.Tensor:
    """A linear layer without bias, with these seams: x (..., in), weight (out, in) -> (..., out)."""
    return _Linear.apply(x, weight, default, *rows)
