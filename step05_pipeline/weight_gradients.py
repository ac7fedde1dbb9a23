"""The halves of a backward: I computes the gradients of inputs, and W, later, those of weights.

Other ranks wait for I alone, so zero-bubble pipelines (Qi et al., arXiv:2401.10241) do W when a rank would be idle.
Splitting the backward into two passes of autograd would run everything between the linear layers twice. So the linear
layers themselves hand over the operands of W, and a store keeps them (after DeepSeek's WeightGradStore).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from step04_tensor_parallel.linear import linear


class WeightGradStore(list):
    """Deferred weight gradients of one backward, in its order."""

    def put(self, weight: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, multiply: Callable) -> None:
        """A `gradient_sink` of step 4's linear layers."""
        self.append((weight, gradient, x, multiply))

    def compute(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (weight, gradient) in order, and release each one's operands."""
        while self:
            weight, gradient, x, multiply = self.pop(0)  # gradient: of the layer's output
            yield weight, multiply(gradient, x)


@contextmanager
def defer_weight_gradients(weights: Iterable[nn.Parameter]) -> Iterator[WeightGradStore]:
    """A backward in this context leaves out the gradients of these weights in linear layers, and stores what they need.

    Parameters of other layers, such as norms, get their gradients as usual.
    """
    store, before = WeightGradStore(), {weight: getattr(weight, "gradient_sink", None) for weight in weights}
    for weight in before:
        weight.gradient_sink = store.put
    try:
        yield store
    finally:
        for weight, sink in before.items():
            if sink:
                weight.gradient_sink = sink
            else:
                del weight.gradient_sink


class DeferringLinear(nn.Linear):
    """A linear layer whose weight gradient can be deferred. That of its bias is a sum, and comes at once."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None):
        super().__init__(*reversed(weight.shape), bias=False, device="meta")
        self.weight, self.bias = weight, bias

    def forward(self, x):
        y = linear(x, self.weight)
        return y if self.bias is None else y + self.bias


def defer_linear_layers(module: nn.Module) -> None:
    """Let linear layers in a module defer the gradients of their weights, unless they are of a kind of their own."""
    for name, each in list(module.named_modules()):
        if type(each) is nn.Linear:
            module.set_submodule(name, DeferringLinear(each.weight, each.bias))
