"""Linear layers whose weight gradients can be deferred: computed after the backward, at a time of the caller's choice.

Tensor parallelism defers nothing: here `linear` is an ordinary linear layer and `weight_gradient` an ordinary product.
Pipelines will defer. The backward of a linear layer is two multiplications, and other ranks wait for only one of them,
the input's gradient. Zero-bubble pipelines (Qi et al., arXiv:2401.10241) compute the other one later. Splitting the
backward into two passes of autograd would run everything between the layers twice, so the linear layers themselves ask
whether to defer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def product(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The weight gradient (out, in) of y = x W' for x (..., in) and the gradient (..., out) of y."""
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class WeightGradStore(list):
    """Deferred weight gradients of one backward, as (weight, dy, x, product) in the order of the backward."""

    def compute(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (weight, gradient) in order, and release each one's operands."""
        while self:
            weight, gradient, x, multiply = self.pop(0)
            yield weight, multiply(gradient, x)


_store: WeightGradStore | None = None  # of the backward that is deferring; None: weight gradients are computed


@contextmanager
def defer_weight_gradients() -> Iterator[WeightGradStore]:
    """A backward in this context leaves out the weight gradients of linear layers and stores what they need."""
    global _store
    before, _store = _store, WeightGradStore()
    try:
        yield _store
    finally:
        _store = before


def weight_gradient(
    weight: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, multiply: Callable = product
) -> torch.Tensor | None:
    """The gradient of `weight`: `multiply(gradient, x)`, for a linear layer their product. None if it is deferred."""
    if _store is not None:
        _store.append((weight, gradient, x, multiply))
        return None
    return multiply(gradient, x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, weight_gradient(weight, gradient, x)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Linear layer without bias whose weight gradient can be deferred: x (..., in), weight (out, in) -> (..., out)."""
    return _Linear.apply(x, weight)
