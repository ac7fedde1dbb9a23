"""A kernel against its PyTorch reference: on the GPU where there is one, else in Triton's interpreter."""

import pytest
import torch

from step08_5d.gpu_ladder.traffic import BytesMoved
from step08_5d.kernels.launching import HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton (pip install triton)")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of a norm over all elements. Triton's interpreter cuts digits off where it makes a bfloat16, and CUDA rounds
TOLERANCE = {torch.float64: 2e-15, torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)


def random(*shape: int, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def tuple_of(outputs) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-300)).item()


def outputs_and_gradients(function, inputs, *settings, dtype: torch.dtype) -> list[torch.Tensor]:
    """What function(*inputs, *settings) returns, and the gradients of `inputs` for random ones, in `dtype`, of that."""
    outputs = tuple_of(function(*inputs, *settings))
    gradients = [random(*each.shape, dtype=dtype, seed=100 + i).to(each.dtype) for i, each in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, gradients)]


def assert_same(kernel, reference, inputs, *settings) -> None:
    """Outputs and gradients of the kernel are those that the reference computes from the same values in float64."""
    dtype = inputs[0].dtype
    ours = outputs_and_gradients(kernel, [each.requires_grad_() for each in inputs], *settings, dtype=dtype)
    wide = [each.to(torch.float64) if isinstance(each, torch.Tensor) else each for each in settings]
    inputs = [each.detach().double().requires_grad_() for each in inputs]
    exact = outputs_and_gradients(reference, inputs, *wide, dtype=dtype)
    for index, (mine, theirs) in enumerate(zip(ours, exact, strict=True)):
        assert mine.shape == theirs.shape and mine.dtype == dtype
        assert difference(mine, theirs) < TOLERANCE[dtype], f"tensor {index}: {difference(mine, theirs)}"


def eager_bytes(reference, shapes, *settings) -> list[float]:
    """The bytes that the reference moves in bfloat16 for inputs of these shapes: in the forward and in the backward."""
    with torch.device("meta"):
        inputs = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        with BytesMoved() as forward:
            outputs = tuple_of(reference(*inputs, *settings))
        gradients = [torch.empty_like(each) for each in outputs]
        with BytesMoved() as backward:
            torch.autograd.grad(outputs, inputs, gradients)
    return [forward.total, backward.total]
