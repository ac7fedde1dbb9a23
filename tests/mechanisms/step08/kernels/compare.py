"""A kernel against its PyTorch reference: on the GPU where there is one, else in Triton's interpreter."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from step08_5d.gpu_ladder.traffic import BytesMoved
from step08_5d.kernels import cross_entropy, flash_attention, grouped_matmul
from step08_5d.kernels.launching import HAS_TRITON
from tests.mechanisms.step08.kernels.case import DEVICE, Case, Maker

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton (pip install triton)")
on_cpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="about Triton's interpreter, or ranks on the CPU")
# Of a norm over all elements. Triton's interpreter cuts digits off where it makes a bfloat16, and CUDA rounds
TOLERANCE = {torch.float64: 2e-15, torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)


def random(*shape: int, dtype=torch.float64, seed: int = 0) -> Tensor:
    return Maker(torch.float64, torch.device("cpu"), seed)(*shape).to(DEVICE, dtype)


def tuple_of(outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-300)).item()


def outputs_and_gradients(function: Callable, inputs: list[Tensor], *settings, dtype: torch.dtype) -> list[Tensor]:
    """What the function returns, and the gradients of `inputs` for random ones, in `dtype`, of that."""
    outputs, make = tuple_of(function(*inputs, *settings)), Maker(dtype, inputs[0].device, seed=100)
    gradients = [make(*each.shape).to(each.dtype) for each in outputs]
    return [*(each.detach().clone() for each in outputs), *torch.autograd.grad(outputs, inputs, gradients)]


def results(case: Case, function: Callable, convert: Callable = lambda each: each) -> list[Tensor]:
    """What a function of the case returns and, if autograd knows them, the gradients."""
    inputs = [convert(each.detach()) for each in case.inputs]
    if not case.gradients:
        return [*tuple_of(function(*inputs, *map(convert, case.settings)))]
    inputs, dtype = [each.requires_grad_() for each in inputs], case.inputs[0].dtype
    return outputs_and_gradients(function, inputs, *map(convert, case.settings), dtype=dtype)


def wide(value):
    """A copy in float64 of what has floating-point numbers, since some functions work in place."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.float64, copy=True) if floating else value


def assert_same(case: Case, function: Callable | None = None, bounds: dict[torch.dtype, float] = TOLERANCE) -> None:
    """The function, or the kernel, returns what the reference does for the same values in float64."""
    exact, found = results(case, case.reference, wide), results(case, function or case.ours)
    for index, (ours, theirs) in enumerate(zip(found, exact, strict=True)):
        error, bound = difference(ours, theirs), case.slack * bounds.get(ours.dtype, 0)  # integers are equal
        assert ours.shape == theirs.shape and not math.isnan(error) and error <= bound, f"tensor {index}: {error}"
    if case.gradients:
        assert {each.dtype for each in found[-len(case.inputs) :]} == {case.inputs[0].dtype}


def eager_bytes(case: Case) -> list[float]:
    """Bytes that the reference moves per element of the first input, in forward and backward."""
    inputs = [each.to("meta").requires_grad_(case.gradients) for each in case.inputs]
    settings = [each.to("meta") if isinstance(each, Tensor) else each for each in case.settings]
    with BytesMoved() as forward:
        outputs = tuple_of(case.reference(*inputs, *settings))
    gradients = [torch.empty_like(each) for each in outputs]
    with BytesMoved() as backward:
        if case.gradients:
            torch.autograd.grad(outputs, inputs, gradients)
    return [each.total / inputs[0].numel() for each in (forward, backward)]


def use_tiles(monkeypatch, rows: int = 32, columns: int = 16) -> None:
    """Make tiles and blocks so small that short sequences and narrow matrices have several."""
    tile, wide = {"ROWS": rows, "COLUMNS": columns, "num_warps": 4, "num_stages": 1}, cross_entropy.wide_type
    monkeypatch.setattr(flash_attention, "tile_sizes", lambda q, kernel: tile)
    monkeypatch.setattr(grouped_matmul, "tile_sizes", lambda x: tile | {"ROWS": 16, "INNER": 16})
    monkeypatch.setattr(cross_entropy, "_blocks", lambda x: {"BLOCK": 16, "WIDE": wide(x.dtype)})


@contextmanager
def one_program(choose: Callable = lambda grid: [each - 1 for each in grid]) -> Iterator[None]:
    """Here the interpreter runs one program of each launch: the last, or that at `choose(grid)`."""
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
