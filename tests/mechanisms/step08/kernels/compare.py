"""A kernel against its PyTorch reference: on the GPU where there is one, else in Triton's interpreter."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

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


@contextmanager
def one_program(choose: Callable = lambda grid: [each - 1 for each in grid]) -> Iterator[None]:
    """In this block the interpreter runs one program of each launch: the last one, or that at `choose(grid)`."""
    from triton.runtime.interpreter import InterpretedFunction, interpreter_builder

    run, set_dim, set_idx = InterpretedFunction.run, interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx

    def run_one(self, *arguments, grid, **named):
        grid = (*grid, 1, 1)[:3]
        place = {"set_grid_dim": lambda *_: set_dim(*grid), "set_grid_idx": lambda *_: set_idx(*choose(grid))}
        with mock.patch.multiple(interpreter_builder, **place):
            run(self, *arguments, grid=(1,), **named)

    with mock.patch.object(InterpretedFunction, "run", run_one):
        yield


@contextmanager
def launches() -> Iterator[Counter]:
    """Counts the launches in this block, by file and kernel."""
    from triton.runtime.interpreter import InterpretedFunction

    run, found = InterpretedFunction.run, Counter()

    def counted(self, *arguments, **named):
        found[f"{self.fn.__module__.split('.')[-1]}.{self.fn.__name__}"] += 1
        run(self, *arguments, **named)

    with mock.patch.object(InterpretedFunction, "run", counted):
        yield found
