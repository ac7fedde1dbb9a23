"""What adds up gradients keeps one contract, step 1's `TakesGradients`; and who hands over what it cannot take."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from common.group import Group
from common.parameter import attach_specs
from common.weights.initialisation import values_from
from step01_single_gpu.mixed_precision import Add, GradientSums, TakesGradients
from step02_data_parallel.data_parallel import DataParallel
from step03_zero.zero import Zero
from step04_tensor_parallel.linear import linear
from step08_5d.weight_sums import SummingDense, multiply_by

ALONE = Group("alone", (0,), 0)


def data_parallel(model: nn.Module, mode: str) -> DataParallel:
    return DataParallel(list(model.parameters()), ALONE, mode)


def zero(model: nn.Module, stage: int) -> Zero:
    mesh = SimpleNamespace(device=torch.device("cpu"), shard=ALONE, replica=ALONE)
    values = values_from({name: each.detach().clone() for name, each in model.named_parameters()})
    return Zero(model, [[model]], values, mesh, stage, dtype=torch.bfloat16)


TAKERS = {"one process": lambda model: GradientSums(list(model.parameters()))}
TAKERS |= {f"data parallel, {mode}": partial(data_parallel, mode=mode) for mode in ("overlap", "bucket")}
TAKERS |= {f"ZeRO-{stage}": partial(zero, stage=stage) for stage in (0, 1, 2)}


def adds(part: Tensor) -> Add:
    return lambda total, first: total.copy_(part) if first else total.add_(part)


def hand_over(sums: TakesGradients, model: nn.Module, index: int) -> dict[str, Tensor]:
    """The gradients of a micro-batch, as tensors and functions by turns. Returns their sums, in float32."""
    one, two = torch.randn(2, *model.weight.shape)
    narrow = one.bfloat16()
    parts = [adds(two), narrow] if index % 2 else [narrow, adds(two)]
    sums.accumulate(model.weight, parts[0], whole=False)
    sums.accumulate(model.weight, parts[1])
    bias = torch.randn(model.bias.shape)
    sums.accumulate(model.bias, adds(bias) if index % 2 else bias.bfloat16(), whole=True)
    return {"weight": narrow.float() + two, "bias": bias if index % 2 else bias.bfloat16().float()}


@pytest.mark.parametrize("name", TAKERS)
def test_tensors_and_functions_in_parts(name):
    """In two steps, the second of which finds what the first has left; and sums are as wide as if none were rounded."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, dtype=torch.bfloat16)
    attach_specs(model)
    sums = TAKERS[name](model)
    for first in (0, 1):
        expected = {"weight": torch.zeros(3, 5), "bias": torch.zeros(3)}
        for index in range(3):
            with getattr(sums, "backward", lambda last: nullcontext())(last=index == 2):
                for key, part in hand_over(sums, model, first + index).items():
                    expected[key] += part
        gradients = sums.finish()
        names = [each.spec.name for each in getattr(sums, "shards", model.parameters())]
        for key, found in zip(names, gradients, strict=True):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.view_as(expected[key]), expected[key], rtol=1e-6, atol=1e-6)


def test_products_that_add_to_sums_need_a_sink():
    weight, x = nn.Parameter(torch.ones(3, 2)), torch.ones(4, 2)
    weight.products = SummingDense
    with pytest.raises(TypeError, match="^products that return a function .* need a `gradient_sink` that takes it$"):
        linear(x, weight).sum().backward()
    multiply_by(weight, SummingDense)
    sums = GradientSums([weight])
    linear(x, weight).sum().backward()
    assert weight.grad is None and torch.equal(sums.finish()[0], torch.full((3, 2), 4.0))
