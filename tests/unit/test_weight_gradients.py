"""Linear layers whose weights' gradients can be put off."""

import torch
import torch.nn.functional as F

from common import weight_gradients


def inputs():
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)  # noqa: E731
    return make(2, 5, 4), make(3, 4)


def test_gradients_are_those_of_linear():
    x, weight = inputs()
    y = F.linear(x, weight)
    expected = torch.autograd.grad(y.square().sum(), (x, weight))
    found = torch.autograd.grad(weight_gradients.linear(x, weight).square().sum(), (x, weight))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_defer_weight_gradients_and_computed_later():
    x, weight = inputs()
    F.linear(F.linear(x, weight).relu() @ torch.eye(3, 4, dtype=x.dtype), weight).sum().backward()
    expected, x.grad, weight.grad = (x.grad, weight.grad), None, None
    fired = []
    weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.grad))
    y = weight_gradients.linear(x, weight)
    y = weight_gradients.linear(y.relu() @ torch.eye(3, 4, dtype=x.dtype), weight)
    with weight_gradients.defer_weight_gradients() as later:
        y.sum().backward()
    torch.testing.assert_close(x.grad, expected[0], rtol=0, atol=1e-12)
    assert weight.grad is None and all(gradient is None for gradient in fired), "nothing is computed yet"
    assert len(later) == 2 and all(entry[0] is weight for entry in later), "the parameter itself, once for each use"
    total = sum(gradient for _, gradient in later.compute())
    torch.testing.assert_close(total, expected[1], rtol=0, atol=1e-12)
    assert later == [], "what was needed for them is let go"


def test_outside_nothing_is_defer_weight_gradients():
    x, weight = inputs()
    with weight_gradients.defer_weight_gradients() as later:
        pass
    weight_gradients.linear(x, weight).sum().backward()
    assert later == [] and weight.grad is not None
