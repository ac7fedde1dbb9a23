"""Gradient sums, master weights, loss scaling and recomputation of step 1 train what is no model of ours."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.group import Group
from common.parameter import attach_specs
from common.weights.initialisation import values_from
from step01_single_gpu.mixed_precision import GradientSums, Optimizer
from step01_single_gpu.recompute import recompute_modules
from step03_zero.zero import Zero
from step08_5d.fused_adamw import FusedAdamW
from step08_5d.kernels import adamw
from tests.foreign import models
from tests.foreign.models import PRELOAD  # noqa: F401 (of the fork server)
from tests.harness.ranks import run_ranks

RATES, DECAY = (1e-2, 3e-3, 1e-2), 0.1
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8}


def of_torch(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """PyTorch's own, with the same rule: matrices decay, and vectors do not."""
    parameters = list(model.parameters())
    groups = [{"params": [each for each in parameters if each.dim() > 1], "weight_decay": DECAY}]
    groups += [{"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **ADAMW) if kind == "adamw" else torch.optim.SGD(groups)


def trained_by_torch(name: str, kind: str) -> dict[str, torch.Tensor]:
    """The weights after a few steps of a plain loop in one process."""
    model = models.MODELS[name]()
    optimizer = of_torch(model, kind)
    for step, rate in enumerate(RATES):
        for group in optimizer.param_groups:
            group["lr"] = rate
        models.gradients(model, models.tokens(step))  # leaves them in .grad
        for parameter in model.parameters():
            parameter.grad *= 0.5
        optimizer.step()
    return {key: parameter.detach().clone() for key, parameter in model.named_parameters()}


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("name, kind", list(itertools.product(models.MODELS, ("adamw", "sgd"))))
def test_training_is_that_of_torch(name, kind):
    model, expected = models.MODELS[name](), trained_by_torch(name, kind)
    attach_specs(model)
    parameters = list(model.parameters())
    sums, optimizer = GradientSums(parameters), Optimizer(parameters, torch.float64, DECAY, kind, **ADAMW)
    for step, rate in enumerate(RATES):
        for rows in models.tokens(step).split(1):
            models.loss_of(model, rows).backward()
        optimizer.step(sums.finish(), rate, torch.tensor(0.5, dtype=torch.float64))
    for key, parameter in model.named_parameters():
        assert difference(parameter.detach(), expected[key]) < 1e-12, key


def worst_error(name: str, kind: str) -> float:
    """On ranks that share the optimizer's state: of the weights that this rank has updated."""
    ranks = Group.of(dist.group.WORLD, "shard")
    mesh = SimpleNamespace(device=torch.device("cpu"), shard=ranks, replica=Group("replica", (ranks.rank,), 0))
    model = models.MODELS[name]()
    values = values_from({key: each.detach().clone() for key, each in model.named_parameters()})
    zero = Zero(model, models.regions_of(model), values, mesh, 1, dtype=torch.float64)
    optimizer = Optimizer(zero.shards, torch.float64, DECAY, kind, **ADAMW)
    for step, rate in enumerate(RATES):
        zero.gather()
        loss = models.loss_of(model, models.tokens(step).chunk(ranks.size)[ranks.rank])
        with zero.backward(last=True):
            loss.backward()
        optimizer.step(zero.finish(), rate, torch.tensor(0.5, dtype=torch.float64))
    expected, errors = trained_by_torch(name, kind), []
    for shard in zero.shards:
        for box, part in shard.spec.boxes(shard):
            whole = expected[shard.spec.name][tuple(slice(*each) for each in box)]
            errors.append(difference(part, whole))
    return max(errors)


def test_ranks_that_share_the_optimizer_train_as_one_process():
    assert max(run_ranks(2, worst_error, "gpt2", "adamw")) < 1e-11


def test_bfloat16_has_masters_and_float16_a_scale():
    """Updates of a thousandth of a weight are not lost, and an overflow changes nothing."""
    for dtype in (torch.bfloat16, torch.float16):
        layer = nn.Linear(4, 3, dtype=dtype)  # with a bias
        attach_specs(layer)
        optimizer = Optimizer(list(layer.parameters()), dtype, kind="sgd")
        weight, scale = optimizer.masters[0].clone(), optimizer.scaler.scale
        assert scale == (2.0**16 if dtype == torch.float16 else 1.0)
        gradients = [torch.ones_like(master) for master in optimizer.masters]
        for _ in range(8):
            skip = optimizer.scaler.overflow(torch.tensor(1.0))
            optimizer.step([each.clone() for each in gradients], 1e-4, skip=skip)
        assert (optimizer.masters[0] - (weight - 8e-4)).abs().max() < 1e-6
        assert torch.equal(layer.weight.detach(), optimizer.masters[0].to(dtype))
        skip = optimizer.scaler.overflow(torch.tensor(torch.inf))
        if dtype == torch.float16:
            before = [each.clone() for each in optimizer.masters]
            optimizer.step([each * torch.inf for each in gradients], 1e-4, skip=skip)
            assert all(map(torch.equal, before, optimizer.masters))


def test_kernels_count_the_updates_of_any_loop():
    """PyTorch computes what the kernel would. A step that is skipped does not count."""
    found = []
    for kind in (Optimizer, FusedAdamW):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        attach_specs(layer)
        optimizer = kind(list(layer.parameters()), torch.float32, DECAY)
        with mock.patch.object(adamw, "adamw", adamw.adamw_reference):
            for step in range(4):
                gradients = [torch.randn_like(master) for master in optimizer.masters]
                optimizer.step(gradients, 1e-2, torch.tensor(0.5), skip=torch.tensor(float(step == 1)))
        assert {optimizer.state_of(master)["step"].item() for master in optimizer.masters} == {3}
        found.append([master.detach().clone() for master in optimizer.masters])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", models.MODELS)
def test_blocks_keep_only_their_inputs(name):
    """Their gradients are the same ones, hooks on a block run once, and far less is kept for the backward."""
    plain, model, kept, calls = models.MODELS[name](), models.MODELS[name](), {}, []
    expected = models.gradients(plain, models.tokens())
    blocks = models.parts_of(model).blocks
    for block in blocks:
        block.register_forward_hook(lambda *_: calls.append("forward"))
    recompute_modules(blocks)
    for key, each in (("plain", plain), ("recomputed", model)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            loss = models.loss_of(each, models.tokens())
        kept[key] = sum(saved)
    assert calls == ["forward"] * len(blocks)
    loss.backward()
    assert calls == ["forward"] * len(blocks)
    assert {key for key, _ in model.named_parameters()} == expected.keys()
    for key, parameter in model.named_parameters():
        assert difference(parameter.grad, expected[key]) < 1e-12, key
    assert kept["recomputed"] < 0.4 * kept["plain"], kept


class Scaled(nn.Module):
    """Takes a tensor by name, which needs a gradient as well."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x, power=1, *, scale):
        return torch.tanh(self.inner(x)) ** power * scale


def test_what_is_handed_over_by_name_gets_its_gradient():
    """Two modules share it, and it has a graph of its own, through which the backward passes once."""
    first, second, factor = Scaled(), Scaled(), nn.Parameter(torch.rand(4, dtype=torch.float64))
    x, found = torch.rand(2, 4, dtype=torch.float64), []
    for again in (False, True):
        if again:
            recompute_modules([first, second])
        scale, parameters = factor.exp(), [factor, *first.parameters(), *second.parameters()]
        y = second(first(x.clone().requires_grad_(), 2, scale=scale), scale=scale, power=3)
        y.sum().backward()
        found.append([each.grad for each in parameters])
        for each in parameters:
            each.grad = None
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_dropout_is_not_recomputed():
    model = models.gpt2(resid_pdrop=0.1)
    with pytest.raises(ValueError, match=r"^GPT2Block has Dropout\(p=0\.1.*would draw other numbers the second time$"):
        recompute_modules(models.parts_of(model).blocks)
    recompute_modules([nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))])


def test_what_returns_several_tensors_is_refused():
    module = nn.MultiheadAttention(4, 2)
    recompute_modules([module])
    with pytest.raises(TypeError, match=r"^MultiheadAttention\.forward returns a tuple; one tensor can be recomputed$"):
        module(*[torch.rand(3, 2, 4, requires_grad=True)] * 3)
