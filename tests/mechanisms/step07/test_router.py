"""The router: choices, ties, groups, places in the queue of an expert, and what balances the load."""

from types import SimpleNamespace

import pytest
import torch

from step01_single_gpu.mixed_precision import LossScaler
from step07_expert_parallel.balancing import Balancing
from step07_expert_parallel.capacity import count_earlier
from step07_expert_parallel.router import Router
from tests.harness.observing import mesh_of
from tests.mechanisms.step07.layers import CASES, choice_of, configured, inputs_of


def router_of(flags: str) -> Router:
    config = configured(flags)
    router = Router(config, mesh_of(config))
    weight = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0))
    router.weight = torch.nn.Parameter(weight.to(config.torch_dtype))
    return router


@pytest.mark.parametrize("case", CASES)
def test_choices(case):
    """The same as one token at a time, with a bias too; no token uses more groups than it may."""
    router = router_of(CASES[case])
    shape = router.shape
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(50, shape.experts, generator=generator, dtype=torch.float64)
        router.bias.copy_(torch.randn(shape.experts, generator=generator, dtype=torch.float64) * seed)
        chosen = router.choose(scores)
        assert chosen.tolist() == [choice_of(row, router.bias.tolist(), router.config) for row in scores.tolist()]
        fan_out = [len(set(row)) for row in (chosen // (shape.experts // shape.expert_groups)).tolist()]
        assert shape.expert_groups == 1 or max(fan_out) == shape.groups_per_token


def test_of_equal_scores_the_first_wins():
    scores = torch.zeros(1, 8, dtype=torch.float64)
    assert router_of("--experts 8 --top-k 3").choose(scores).tolist() == [[0, 1, 2]]
    limited = router_of("--experts 8 --top-k 3 --expert-groups 4 --node-limit 2")
    assert limited.choose(scores).tolist() == [[0, 1, 2]]
    scores[0, 5] = 1
    assert limited.choose(scores).tolist() == [[5, 0, 1]]
    scores = torch.randint(3, (200, 8), generator=torch.Generator().manual_seed(0)).double()
    for router in (router_of("--experts 8 --top-k 3"), limited):
        assert router.choose(scores).tolist() == [choice_of(row, [0] * 8, router.config) for row in scores.tolist()]


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_gates(gate):
    router = router_of(f"--experts 6 --top-k 3 --gate {gate}")
    x = inputs_of(router.config)
    chosen, gates = router(x)
    assert chosen.shape == gates.shape == (36, 3) and chosen.dtype == torch.int64
    torch.testing.assert_close(gates.sum(-1), torch.ones(36, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (gates.diff() <= 0).all(), "the best expert comes first"
    with torch.no_grad():
        router.bias += torch.tensor([9, 0, 0, 0, 0, 0])  # decides who is chosen, and no gate
        chosen, biased = router(x)
    scores = (x.flatten(0, 1) @ router.weight.T).double()
    scores = scores.softmax(-1) if gate == "softmax" else scores.sigmoid()
    assert (chosen[:, 0] == 0).all()
    torch.testing.assert_close(biased, (p := scores.gather(1, chosen)) / p.sum(-1, keepdim=True), rtol=1e-12, atol=0)
    router.weight.data.fill_(-1000)  # the sigmoids are all 0
    assert router(torch.ones_like(x))[1].isfinite().all()


def test_places_in_the_queue():
    chosen = torch.tensor([[[0, 1], [1, 2], [1, 0]], [[2, 0], [2, 1], [2, 0]]])
    assert count_earlier(chosen).tolist() == [[[0, 0], [1, 0], [2, 1]], [[0, 0], [1, 0], [2, 1]]]


def test_losses_are_scaled_like_the_loss():
    """float16: the gradient of the auxiliary losses has the factor of the loss, and their value has not."""
    router = router_of("--experts 6 --z-coef 0.5")
    x = inputs_of(router.config)
    found = []
    for scale in (1.0, 1024.0):
        router.scaler.scale = scale
        router.start_over()
        _, gates = router(x)
        found.append(torch.autograd.grad(gates, router.weight, torch.zeros_like(gates))[0])
        found.append(router.auxiliary)
    assert torch.equal(found[2], found[0] * 1024) and found[0].any()
    assert torch.equal(found[3], found[1]) and found[1] > 0


def test_biases_move_against_the_load():
    config = configured("--layers 3 --dense-layers 1 --experts 4 --balance bias --bias-rate 0.25 --dtype float32")
    mesh = mesh_of(config)
    router, other = Router(config, mesh), Router(config, mesh)
    mlps = {"0": None, "1": SimpleNamespace(router=router), "2": SimpleNamespace(router=other)}
    stage = SimpleNamespace(layers={index: SimpleNamespace(mlp=mlp) for index, mlp in mlps.items()})
    balancing = Balancing([stage], config, mesh, LossScaler(torch.float32))

    def finish(*load, skip=None):
        router.load, router.dropped = torch.tensor(load), torch.tensor(3)
        router.auxiliary = torch.tensor(0.5, dtype=torch.float64)
        other.load = torch.tensor([7, 1, 4, 4])
        return [each.item() for each in balancing.finish(skip).values()]

    assert finish(5, 3, 4, 4) == [0.5, (1.25 + 1.75) / 2, 3.0]
    assert router.bias.tolist() == [-0.25, 0.25, 0, 0] and router.load.sum() == router.auxiliary == 0
    finish(0, 0, 0, 4, skip=torch.tensor(1.0))
    assert router.bias.tolist() == [-0.25, 0.25, 0, 0], "a skipped step"
    finish(0, 0, 0, 4, skip=torch.tensor(0.0))
    assert router.bias.tolist() == [0, 0.5, 0.25, -0.25]
