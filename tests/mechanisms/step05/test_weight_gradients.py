"""Linear layers whose weight gradients are deferred."""

import weakref

import pytest
import torch

from common.weights.initialisation import materialise, random_values
from step01_single_gpu.recompute import apply_recompute
from step05_pipeline.config import schedule_of
from step05_pipeline.stages import build_stages
from step05_pipeline.weight_gradients import defer_weight_gradients
from tests.harness.observing import mesh_of
from tests.mechanisms.step05.observe import prepare


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_stage_defers_every_product(mode):
    """Also of layers that are recomputed, and while hooks hand back other tensors than were saved: a weight that is
    only looked for among these has lost its attribute, and its gradient is right, but not deferred.
    """
    config = prepare("--layers 2 --schedule zb-h1", 1)
    mesh = mesh_of(config)
    (stage,) = build_stages(config, schedule_of(config), mesh)
    apply_recompute(stage, mode)
    materialise(stage, torch.float64, mesh.device, random_values(0))
    tokens, parameters = torch.arange(config.seq_len).view(1, -1), list(stage.parameters())
    stage(tokens, tokens[0], targets=tokens).sum().backward()
    expected = [parameter.grad for parameter in parameters]
    stage.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        loss = stage(tokens, tokens[0], targets=tokens).sum()
        with defer_weight_gradients(parameters) as store:
            loss.backward()
    products = [p for name, p in stage.named_parameters() if p.dim() == 2 and "embedding" not in name]
    assert sorted(id(weight) for weight, *_ in store) == sorted(map(id, products))
    assert all(weight.grad is None for weight in products), "nothing is computed yet"
    kept, found = [weakref.ref(gradient) for _, gradient, *_ in store], {each: each.grad for each in parameters}
    with torch.no_grad():
        for index, (weight, gradient) in enumerate(store.compute()):
            found[weight] = gradient
            assert not any(reference() is not None for reference in kept[:index]), "operands are released one by one"
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=1e-12)
    assert not hasattr(products[0], "postpone"), "after the context nothing is deferred"
