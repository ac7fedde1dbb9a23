"""Linear layers whose weight gradients are deferred."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from step04_tensor_parallel.linear import linear
from step05_pipeline.train import build
from step05_pipeline.weight_gradients import defer_weight_gradients
from tests.harness.observing import mesh_of
from tests.mechanisms.step05.observe import prepare


def two_layers(layer, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A loss in which the same weight is used twice."""
    return layer(layer(x, weight).relu() @ torch.eye(3, 4, dtype=x.dtype), weight).square().sum()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 4), (3, 4)))


def test_deferred_and_computed_later():
    """To the gradients of PyTorch's own layer, which are also those of a backward that nobody splits."""
    x, weight = inputs()
    expected, fired = torch.autograd.grad(two_layers(F.linear, x, weight), (x, weight)), []
    weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.grad))
    with defer_weight_gradients([weight]) as store:
        two_layers(linear, x, weight).backward()
    torch.testing.assert_close(x.grad, expected[0], rtol=0, atol=1e-12)
    assert weight.grad is None and all(gradient is None for gradient in fired), "nothing is computed yet"
    assert len(store) == 2 and all(entry[0] is weight for entry in store), "the parameter itself, once for each use"
    kept, total = [weakref.ref(gradient) for _, gradient, _, _ in store], 0
    with torch.no_grad():
        for index, (_, gradient) in enumerate(store.compute()):
            total = total + gradient
            alive = [reference() is not None for reference in kept]
            assert alive[:index] == [False] * index and all(alive[index + 1 :]), "operands are released one by one"
    assert not any(reference() is not None for reference in kept)
    torch.testing.assert_close(total, expected[1], rtol=0, atol=1e-12)
    whole = torch.autograd.grad(two_layers(linear, x, weight), (x, weight))
    assert store == [], "after the context nothing is deferred"
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_stage_defers_every_product(mode):
    """Also of layers that are recomputed, and while hooks hand back other tensors than were saved: a weight that is
    only looked for among these has lost its attribute, and its gradient is right, but not deferred.
    """
    config = prepare(f"--layers 2 --schedule zb-h1 --recompute {mode}", 1)
    (stage,) = build(config, mesh_of(config))[0].stages
    tokens = torch.arange(config.seq_len).view(1, -1)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        loss = stage(tokens, tokens[0], targets=tokens).sum()
        with defer_weight_gradients(stage.parameters()) as store:
            loss.backward()
    products = [id(p) for name, p in stage.named_parameters() if p.dim() == 2 and "embedding" not in name]
    assert sorted(id(weight) for weight, *_ in store) == sorted(products)
    with torch.no_grad():
        assert all(gradient.shape == weight.shape for weight, gradient in store.compute())
