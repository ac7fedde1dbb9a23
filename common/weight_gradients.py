"""When the gradient of a linear layer's weight is computed: in the backward, or put off to a moment of one's choice.

A linear layer's backward is two multiplications, and only one of them, the input's gradient, has somebody waiting for
it. Zero-bubble pipelines (Qi et al., arXiv:2401.10241; step 5) do the other later. Splitting the backward in two passes
of autograd would run everything between the layers twice; so the linear functions themselves ask here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

_store: list | None = None  # (weight, gradient, x) that the backward under way puts off; None: it computes


@contextmanager
def put_off() -> Iterator[list]:
    """A backward in here computes no gradients of linear layers' weights. It yields what `compute` needs for them."""
    global _store
    before, _store = _store, []
    try:
        yield _store
    finally:
        _store = before


def compute(store: list) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(weight, gradient) of all that was put off, in order; lets go of each one's tensors. A weight may come twice."""
    while store:
        weight, gradient, x = store.pop(0)
        yield weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def weight_gradient(weight: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """That of y = x W', for x (..., in) and the gradient (..., out) of y: (out, in), or None when it is put off.

    For the backward of a Function that got `weight` as an input; None then is what it returns.
    """
    if _store is not None:
        _store.append((weight, gradient, x))
        return None
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, weight_gradient(weight, gradient, x)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """F.linear whose weight gradient can be put off: x (..., in), weight (out, in) -> (..., out)."""
    return _Linear.apply(x, weight)
