"""Grouped products against a loop over the experts: uneven counts, experts without rows, odd widths, views."""

from unittest import mock

import pytest
import torch

from step07_expert_parallel import experts
from step07_expert_parallel.experts import Counts, Experts, Kernels
from step08_5d.kernels import grouped_matmul
from step08_5d.kernels.grouped_matmul import (
    multiply,
    multiply_reference,
    multiply_transposed,
    multiply_transposed_reference,
)
from tests.mechanisms.step08.kernels.compare import DEVICE, DTYPES, TOLERANCE, difference, needs_triton, random

pytestmark = needs_triton
COUNTS = {
    "uneven": [5, 37, 16, 1],
    "the first has none": [0, 20, 0, 0, 17],
    "the last have none": [33, 2, 0, 0],
    "one expert": [19],
    "no rows at all": [0, 0],
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    sizes = {"ROWS": 16, "COLUMNS": 32, "INNER": 16, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(grouped_matmul, "tile_sizes", lambda x: sizes)


def counts_of(rows: list[int]) -> Counts:
    return Counts(torch.tensor(rows, device=DEVICE))


def assert_right(rows: list[int], inner: int, outer: int, dtype=torch.float64) -> None:
    counts = counts_of(rows)
    x, y = random(sum(rows), inner, dtype=dtype), random(sum(rows), outer, dtype=dtype, seed=1)
    weight = random(len(rows), outer, inner, dtype=dtype, seed=2)  # as it is stored
    cases = {
        "forward": (multiply, multiply_reference, x, weight.mT),
        "input's gradient": (multiply, multiply_reference, y, weight),
        "weight's gradient": (multiply_transposed, multiply_transposed_reference, y, x),
    }
    for name, (ours, reference, a, b) in cases.items():
        found, exact = ours(a, b, counts), reference(a.double(), b.double(), counts)
        assert found.shape == exact.shape and found.dtype == dtype
        if found.numel() and sum(rows):
            assert difference(found, exact) < 4 * TOLERANCE[dtype], f"{name}: {difference(found, exact)}"
        assert torch.equal(found[exact == 0], exact[exact == 0].to(dtype)), f"{name}: not zero"


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype):
    assert_right(COUNTS["uneven"], 24, 40, dtype)


def test_sums_are_not_rounded_on_the_way():
    """A large number, and then many small ones: added to it in bfloat16, they would all be lost."""
    x = torch.full((16, 512), 0.05, device=DEVICE, dtype=torch.bfloat16)
    x[:, 0] = 256
    ones, exact = torch.ones(1, 512, 16, device=DEVICE, dtype=torch.bfloat16), x.double().sum(1)[:, None].expand(16, 16)
    assert difference(multiply(x, ones, counts_of([16])), exact) < 8e-3
    assert difference(multiply_transposed(x.T.contiguous(), ones[0], counts_of([512]))[0], exact) < 8e-3


@pytest.mark.parametrize("rows", COUNTS.values(), ids=COUNTS.keys())
def test_counts(rows):
    assert_right(rows, 7, 33)


def test_the_host_reads_no_counts(monkeypatch):
    monkeypatch.setattr(experts, "to_host", lambda counts: pytest.fail("the host waited for the device"))
    x, weight, counts = random(42, 8), random(2, 8, 8), counts_of([30, 12])
    multiply_transposed(multiply(x, weight, counts), x, counts)


def test_experts_of_step_7():
    """Outputs and gradients with these kernels in the place of PyTorch's."""
    layer, x, counts = Experts(4, 8, 12), random(59, 8), counts_of(COUNTS["uneven"])
    for index, parameter in enumerate(layer.parameters()):
        parameter.data = random(*parameter.shape, seed=index)
    kernels, results = Kernels(mock.Mock(wraps=multiply), mock.Mock(wraps=multiply_transposed)), []
    for layer.kernels in (None, kernels):
        leaf = x.clone().requires_grad_()
        out = layer(leaf, counts)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()])])
    assert max(map(difference, *results)) < 1e-14
    assert [each.call_count for each in kernels] == [6, 3], "of three matrices: forward, dx and dw"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_tiles(dtype, monkeypatch):
    monkeypatch.undo()
    assert_right([300, 0, 1000, 129, 7], 192, 320, dtype)
