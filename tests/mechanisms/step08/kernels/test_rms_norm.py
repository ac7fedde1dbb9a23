"""RMSNorm with and without the addition before it: kernels against the reference, and that against the model."""

import pytest
import torch

from common.model import RMSNorm
from step08_5d.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.mechanisms.step08.kernels.compare import (
    DEVICE,
    DTYPES,
    assert_same,
    difference,
    eager_bytes,
    needs_triton,
    outputs_and_gradients,
    random,
)

EPS = 1e-5
SHAPES = {
    "odd width": (2, 5, 12),
    "one row": (1, 64),
    "several blocks of rows": (150, 9),
    "more rows than programs": (1060, 20),
    "long rows": (19, 1030),
    "rows in two parts": (3, 8200),
}


def inputs_of(shape, dtype, count: int = 1) -> list[torch.Tensor]:
    """`count` activations, and a weight around 1."""
    return [random(*shape, dtype=dtype, seed=seed) for seed in range(count)] + [
        (1 + 0.3 * random(shape[-1], seed=9)).to(dtype)
    ]


def test_the_reference_is_the_model_s():
    (x, weight), norm = inputs_of((4, 12), torch.bfloat16), RMSNorm(12, EPS)
    norm.weight = torch.nn.Parameter(weight)
    assert norm(x).equal(rms_norm_reference(x, weight, EPS))


def test_eager_bytes():
    rows, size = 4096, 2048
    found = eager_bytes(rms_norm_reference, [(rows, size), (size,)], EPS)
    assert [round(each / (rows * size)) for each in found] == [36, 96]
    found = eager_bytes(add_rms_norm_reference, [(rows, size), (rows, size), (size,)], EPS)
    assert [round(each / (rows * size)) for each in found] == [42, 102]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_same_as_reference(shape, dtype):
    assert_same(rms_norm, rms_norm_reference, inputs_of(shape, dtype), EPS)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 12), (19, 1030)])
def test_with_residual_same_as_reference(shape, dtype):
    def rounded_once(x, residual, weight, eps):  # the sum as it is stored; its gradient passes unchanged
        total = x + residual
        stored = total + (total.detach().to(dtype) - total).detach()
        return rms_norm_reference(stored, weight, eps), stored

    assert_same(add_rms_norm, rounded_once, inputs_of(shape, dtype, 2), EPS)


@needs_triton
def test_strides_and_outputs_that_nobody_used():
    x, residual, weight = inputs_of((6, 5), torch.float64, 2)
    for tensors in ((x.T.contiguous().T, residual), (x, residual[:, :1].expand(6, 5))):  # by columns; repeated
        assert_same(add_rms_norm, add_rms_norm_reference, [each.detach() for each in (*tensors, weight)], EPS)
    for used in (0, 1):
        assert_same(
            lambda *args, used=used: add_rms_norm(*args)[used],
            lambda *args, used=used: add_rms_norm_reference(*args)[used],
            [x.detach(), residual.detach()],
            weight,
            EPS,
        )


@needs_triton
def test_no_rows():
    x, weight = torch.empty(0, 12, device=DEVICE, requires_grad=True), torch.ones(12, device=DEVICE, requires_grad=True)
    normed, dx, d_weight = outputs_and_gradients(rms_norm, [x, weight], EPS, dtype=torch.float32)
    assert normed.shape == dx.shape == (0, 12) and d_weight.equal(torch.zeros(12, device=DEVICE))


@needs_triton
def test_the_gradient_of_the_weight_is_the_same_in_every_run():
    inputs = [each.requires_grad_() for each in inputs_of((1060, 20), torch.float32)]
    runs = [outputs_and_gradients(rms_norm, inputs, EPS, dtype=torch.float32) for _ in range(2)]
    assert all(one.equal(other) for one, other in zip(*runs, strict=True))


@needs_triton
@pytest.mark.gpu
def test_offsets_beyond_int32():
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    x = torch.ones((2**20 + 1, 2048), dtype=torch.bfloat16, device=DEVICE)
    x[-1] = random(2048)
    x.requires_grad_()
    weight = torch.ones(2048, dtype=torch.bfloat16, device=DEVICE)
    normed = rms_norm(x, weight, EPS)
    (dx,) = torch.autograd.grad(normed, x, x.detach())
    last = x.detach()[-1:].requires_grad_()
    expected = rms_norm_reference(last, weight, EPS)
    assert difference(normed[-1:], expected) < 8e-3
    assert dx[-1].abs().max() < 0.1  # normed does not depend on the length of x, so its gradient along x is 0
