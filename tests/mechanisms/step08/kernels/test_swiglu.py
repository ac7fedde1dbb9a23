"""silu(gate) * up: kernels against the reference."""

import pytest
import torch

from step08_5d.kernels.swiglu import swiglu, swiglu_reference
from tests.mechanisms.step08.kernels.compare import (
    DEVICE,
    DTYPES,
    assert_same,
    difference,
    eager_bytes,
    needs_triton,
    random,
)


def inputs_of(shape, dtype=torch.float64) -> list[torch.Tensor]:
    return [3 * random(*shape, dtype=dtype, seed=seed) for seed in range(2)]


def test_eager_bytes():
    assert [each / 4096 for each in eager_bytes(swiglu_reference, [(64, 64)] * 2)] == [10, 18]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 7), (1,), (5, 1024), (0, 8)])
def test_same_as_reference(shape, dtype):
    assert_same(swiglu, swiglu_reference, inputs_of(shape, dtype))


@needs_triton
def test_halves_of_one_tensor():
    gate, up = random(6, 10).chunk(2, dim=-1)
    assert_same(swiglu, swiglu_reference, [gate, up])


@needs_triton
@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter: exp(1e4) is inf, as it should be
def test_extreme_gates():
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=DEVICE, requires_grad=True)
    out = swiglu(gate, torch.ones_like(gate))
    (d_gate,) = torch.autograd.grad(out.sum(), gate)
    assert out.tolist() == pytest.approx([0, 0, 0, 100, 1e4]) and d_gate.tolist() == pytest.approx([0, 0, 0.5, 1, 1])


@needs_triton
@pytest.mark.gpu
def test_offsets_beyond_int32():
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    gate = torch.zeros(2**31 + 5, dtype=torch.bfloat16, device=DEVICE)
    gate[-5:] = random(5)
    out = swiglu(gate, gate)
    assert difference(out[-5:], swiglu_reference(gate[-5:].double(), gate[-5:].double())) < 8e-3
    assert not out[:-5].any()
