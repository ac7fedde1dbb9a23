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
    """A linear layer without bias whose weight gradient can be deferred."""

    def __init__(self, weight: nn.Parameter):
        super().__init__(*reversed(weight.shape), bias=False, device="meta")
        self.weight = weight

    def forward(self, x):
        return linear(x, self.weight)


def defer_linear_layers(module: nn.Module) -> None:
    """Let the linear layers in a module defer the gradients of their weights, unless they are of a kind of their own.

    Those with a bias do not: autograd computes both gradients at once, and W would have nothing left to do.
    """
    for name, each in list(module.named_modules()):
        if type(each) is nn.Linear and each.bias is None:
            module.set_submodule(name, DeferringLinear(each.weight))
