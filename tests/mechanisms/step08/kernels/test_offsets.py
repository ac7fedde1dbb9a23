"""Every kernel is right where offsets exceed 32 bits, as they do in long sequences and with large vocabularies.

The tensors lie in memory that the system provides page by page, when it is touched. Where a kernel takes strides, a few
elements with large gaps between them suffice. Of kernels that do not, only the program of one far tile runs.
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from common.model import silu_and_multiply
from step07_expert_parallel.experts import Counts
from step08_5d.kernels import (
    adamw,
    cross_entropy,
    flash_attention,
    grouped_matmul,
    merge,
    quantise,
    rms_norm,
    rotary,
    swiglu,
)
from step08_5d.kernels import flash_attention_backward as attention_backward
from step08_5d.narrow_numbers import scaling
from tests.mechanisms.step08.kernels.case import Maker
from tests.mechanisms.step08.kernels.cases import ADAMW, EPS, KERNELS, rotate, tables
from tests.mechanisms.step08.kernels.compare import (
    difference,
    needs_triton,
    on_cpu,
    one_program,
    random,
    tuple_of,
    use_tiles,
)

pytestmark = [needs_triton, on_cpu]  # test_kernels has it for CUDA
FAR = 2**32  # elements: where an offset of 32 bits is 0 again, with a sign and without
NARROW = torch.bfloat16
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # or Linux refuses more than all of its memory
empty, new_empty = torch.empty, Tensor.new_empty


def far(shape, strides, dtype: torch.dtype = NARROW) -> Tensor:
    """Zeros that need memory only where they are written. Wrong offsets, which may be negative, find memory, too."""
    size = FAR // 2 + 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    memory = mmap.mmap(-1, size * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides, FAR // 2)


def dense(*shape: int, dtype: torch.dtype = NARROW) -> Tensor:
    return far(shape, empty(shape, device="meta").stride(), dtype)


@contextmanager
def far_results() -> Iterator[None]:
    """What a launch allocates is far as well: with the gaps of the tensor that it shall be like."""

    def empty_like(tensor):
        return far(tensor.shape, tensor.stride(), tensor.dtype)

    def large_empty(*shape, dtype, device):
        return dense(*(shape if isinstance(shape[0], int) else shape[0]), dtype=dtype)

    def large_new_empty(tensor, *shape, **options):
        return new_empty(tensor, *shape, **options) if options else dense(*shape, dtype=tensor.dtype)

    with (
        mock.patch.multiple(torch, empty_like=empty_like, empty=large_empty),
        mock.patch.object(Tensor, "new_empty", large_new_empty),
    ):
        yield


class Input(NamedTuple):
    """A tensor without gaps; or one whose last index along `axis` is FAR from its first one."""

    shape: tuple[int, ...]
    axis: int | None = None
    dtype: torch.dtype = NARROW

    def make(self) -> Tensor:
        strides = list(empty(self.shape, device="meta").stride())
        if self.axis is not None:
            strides[self.axis] = FAR // (self.shape[self.axis] - 1)
        return far(self.shape, strides, self.dtype)


class Case(NamedTuple):
    """`call(kernel, *inputs)` and `call(reference, *inputs)` return the same.

    part: an index. If there is one, a single program of each launch runs, the last or that at `program(grid)`. It reads
    this part of every input, and only that of its results is compared.
    """

    kernel: Callable
    reference: Callable
    inputs: list[Input]
    call: Callable = lambda function, *tensors: function(*tensors)
    part: object = ...
    program: Callable = lambda grid: [each - 1 for each in grid]


def check(case: Case) -> None:
    with far_results():
        tensors = [each.make() for each in case.inputs]
        parts = [each[case.part] for each in tensors]
        for seed, part in enumerate(parts):
            part.copy_(random(*part.shape, seed=seed))
        exact = tuple_of(case.call(case.reference, *(part.double() for part in parts)))
        with nullcontext() if case.part is ... else one_program(case.program):
            found = tuple_of(case.call(case.kernel, *tensors))
    for index, (ours, theirs) in enumerate(zip(found, exact, strict=True)):
        error = difference(ours[case.part], theirs)
        assert ours[case.part].shape == theirs.shape and error < 2e-2, f"tensor {index}: {error}"


# ---- calls -----------------------------------------------------------------------------------------------------------


def causal(function, *tensors):
    return function(*tensors, True)


def query_gradient(attend_backward, *tensors):
    return attend_backward(*tensors, True)[0]


def key_gradients(attend_backward, gradient, q, k, v, lse):
    """Where the output is 0, as no program computes what is read in its place: `delta` of the last queries."""
    return attend_backward(gradient, q, k, v, dense(*q.shape, dtype=q.dtype), lse, True)[1:]


def merged(merge, out_so_far, out, lse_so_far, lse):
    merge(out_so_far, lse_so_far, out, lse)
    return out_so_far, lse_so_far


def with_gradients(function, first, second, *gradients):
    """For `gradients` of what the function returns."""
    variables = [each.requires_grad_() for each in (first, second)]
    outputs = tuple_of(function(*variables))
    return *outputs, *torch.autograd.grad(outputs, variables, gradients)


def turned(rotate, q, *tensors):
    cos, sin = tables(*q.shape[2:], q.dtype)
    return with_gradients(lambda q, k: rotate(q, k, cos, sin), q, *tensors)


def normed(add_rms_norm, x, residual, weight):
    return add_rms_norm(x, residual, weight[0], EPS)


def norm_backward(total, weight, d_normed, d_total):
    """With one program for each row, or a program would read many."""
    (rows, size), blocks = total.shape, rms_norm._blocks(total.shape[1], 1)
    dx, sums = dense(rows, size), dense(rows, size, dtype=torch.float32)
    rms_norm._backward_kernel[rows // blocks["ROWS"],](
        total, weight, d_normed, d_total, dx, sums, rows, size, EPS, rms_norm.wide_type(NARROW), size, **blocks
    )
    return dx


def norm_backward_reference(total, weight, d_normed, d_total):
    normed = rms_norm.rms_norm_reference(total.requires_grad_(), weight, EPS)
    return d_total + torch.autograd.grad(normed, total, d_normed)[0]


def updated(adamw, *tensors):
    tensors[2][-5:].square_()  # second moments
    adamw(*tensors, step=torch.tensor(3.0), lr=torch.tensor(0.1), **ADAMW)
    return tensors


def routed(multiply, a, b):
    return multiply(a, b, Counts(torch.tensor([3, 0, 7, 2, 5])))


def to_one_expert(multiply, x, matrix):
    return multiply(x, matrix[None], Counts(torch.tensor([len(x)])))


def last_but_one(grid):
    """Of the tiles: the last program finds none."""
    return grid[0] - 1, grid[1] - 2, 0


def to_the_last_expert(multiply_transposed, y, x):
    return multiply_transposed(y, x, Counts(torch.tensor([0, 0, 0, 0, 16])))[-1]


def quantised(function, x):
    numbers, scales, *_ = function(x.to(NARROW), torch.float8_e4m3fn, (1, 128))
    return numbers[-16:, -128:].float(), scales[:, -1:]


# ---- the table -------------------------------------------------------------------------------------------------------

HEADS, ROWS, VECTOR = Input((1, FAR // 2**20 + 1, 2**20, 1)), Input((FAR // 2**14 + 1, 2**14)), Input((FAR + 5,))
LSE, WIDE_VECTOR = (Input(shape, dtype=torch.float32) for shape in (HEADS.shape[:3], VECTOR.shape))
TOKENS, WEIGHT = Input((17, 16), axis=0), Input((1, 2**14))
# Of the last head, the forward and dq have the first queries, dk and dv the last keys
FIRST, LAST = ((slice(0, 1), slice(-1, None), tokens) for tokens in (slice(16), slice(-16, None)))
END, ROW, CORNER = slice(-5, None), slice(-1, None), (slice(-16, None), slice(-16, None))
ROW_STATISTICS = KERNELS["row statistics and gradient of the loss"].case(Maker(NARROW), 37)


def by_axis(kernel, reference, call, tensors: int, lses: int = 0, tokens: int = 33) -> Iterator[Case]:
    """Gaps between samples, heads, and tokens, where the rows of a tile lie within 2^31 elements. Log-sum-exps lie side
    by side."""
    for axis, shape in enumerate(((5, 1, 4), (1, 5, 4), (1, 1, tokens))):
        inputs = [*tensors * [Input((*shape, 16), axis)], *lses * [Input(shape, dtype=torch.float32)]]
        yield Case(kernel, reference, inputs, call)


ATTEND = flash_attention.attend, flash_attention.attend_reference
BACKWARD = attention_backward.attend_backward, attention_backward.attend_backward_reference
MULTIPLY = grouped_matmul.multiply, grouped_matmul.multiply_reference
TRANSPOSED = grouped_matmul.multiply_transposed, grouped_matmul.multiply_transposed_reference
CASES = {  # by the module that has the kernel
    flash_attention: [*by_axis(*ATTEND, causal, 3), Case(*ATTEND, 3 * [HEADS], causal, FIRST)],
    attention_backward: [
        *by_axis(*BACKWARD, causal, 5, lses=1),
        Case(*BACKWARD, [*5 * [HEADS], LSE], query_gradient, FIRST),
        Case(*BACKWARD, [*4 * [HEADS], LSE], key_gradients, LAST),
    ],
    merge: [*by_axis(merge.merge, merge.merge_reference, merged, 2, lses=2, tokens=300)],  # a tile has 128 rows
    rotary: [*by_axis(rotary.rotary, rotate, turned, 4)],
    cross_entropy: [Case(ROW_STATISTICS.ours, ROW_STATISTICS.reference, [Input((5, 40), axis=0), Input((5,))])],
    swiglu: [Case(swiglu.swiglu, silu_and_multiply, 3 * [VECTOR], with_gradients, END)],
    rms_norm: [
        Case(rms_norm.add_rms_norm, rms_norm.add_rms_norm_reference, [ROWS, ROWS, WEIGHT], normed, ROW),
        Case(norm_backward, norm_backward_reference, [ROWS, WEIGHT, ROWS, ROWS], part=ROW),
    ],
    adamw: [Case(adamw.adamw, adamw.adamw_reference, [*4 * [WIDE_VECTOR], VECTOR], updated, END)],
    grouped_matmul: [
        # between rows; between matrices, their rows, their columns
        Case(*MULTIPLY, [TOKENS, Input((5, 16, 16), axis=0)], routed),
        Case(*MULTIPLY, [TOKENS, Input((5, 16, 16), axis=1)], routed),
        Case(*MULTIPLY, [TOKENS, Input((5, 16, 16), axis=2)], routed),
        Case(*TRANSPOSED, [Input((17, 24), axis=0), TOKENS], routed),
        Case(*MULTIPLY, [Input((FAR // 4096 + 16, 16)), Input((16, 4096))], to_one_expert, CORNER, last_but_one),
        Case(*TRANSPOSED, 2 * [Input((16, 2**15))], to_the_last_expert, CORNER),
    ],
    quantise: [
        Case(
            quantise.quantise,
            scaling.quantise_own,
            [Input((FAR // 4096 + 16, 4096))],
            quantised,
            (slice(-16, None), slice(-128, None)),
        )
    ],
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_tiles(monkeypatch, 16, 16)


@pytest.mark.parametrize("case", sum(CASES.values(), []), ids=lambda case: case.kernel.__name__)
def test_offsets_beyond_32_bits(case):
    check(case)
