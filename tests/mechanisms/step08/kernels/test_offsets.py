"""Every kernel is right where offsets exceed 32 bits, as they do in long sequences and with large vocabularies.

The tensors lie in memory that the system provides page by page, when it is touched. Where a kernel takes strides, a few
elements with large gaps between them suffice. Of kernels that do not, only the program of one far tile runs.
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

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
from tests.mechanisms.step08.kernels.cases import ADAMW, KERNELS
from tests.mechanisms.step08.kernels.compare import (
    TOLERANCE,
    assert_same,
    difference,
    needs_triton,
    on_cpu,
    one_program,
    random,
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


def apart(axis: int, *shape: int, seed: int) -> Tensor:
    """Random numbers whose last index along `axis` is FAR from its first one."""
    strides = list(empty(shape, device="meta").stride())
    strides[axis] = FAR // (shape[axis] - 1)
    made = far(shape, strides)
    return made.copy_(random(*shape, seed=seed))


def assert_close(found, exact, what: str = "") -> None:
    for index, pair in enumerate(zip(found, exact, strict=True)):
        assert difference(*pair) < 2e-2, f"{what}, tensor {index}"


# ---- with gaps -------------------------------------------------------------------------------------------------------


def check_with_gaps(name: str, size: tuple, axis: int, *shapes: tuple[int, ...]) -> None:
    """A kernel of the table, with these inputs."""
    case = KERNELS[name].case(Maker(NARROW), *size)
    case.inputs[: len(shapes)] = [apart(axis, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    case.slack = 1
    assert_same(case, bounds=dict.fromkeys(TOLERANCE, 2e-2))


def attention_with_gaps() -> None:
    """Between samples, between heads, and between tokens: there the rows of a tile lie within 2^31 elements."""
    for axis, shape in enumerate(((5, 1, 4, 16), (1, 5, 4, 16), (1, 1, 33, 16))):
        check_with_gaps("block of attention", (4, 4, 16, 1, True), axis, *4 * [shape])


def merging() -> None:
    """As above; a tile has 128 rows."""
    for axis, shape in enumerate(((5, 1, 4, 16), (1, 5, 4, 16), (1, 1, 300, 16))):
        so_far, out = (apart(axis, *shape, seed=seed) for seed in range(2))
        lses = [random(*shape[:3], dtype=torch.float32, seed=seed) for seed in (2, 3)]
        exact = so_far.double()
        merge.merge_reference(exact, lses[0].double(), out.double(), lses[1].double())
        merge.merge(so_far, lses[0], out, lses[1])
        assert_close([so_far], [exact], f"axis {axis}")


def rotation() -> None:
    for axis in range(3):
        shape = [5 if each == axis else 1 for each in range(3)]
        check_with_gaps("rotary", (1, 1, 1, shape[2], 8), axis, *2 * [(*shape, 8)])


def loss() -> None:
    check_with_gaps("row statistics and gradient of the loss", (37,), 0, (5, 40))


def experts_with_gaps() -> None:
    """Between rows; between matrices, rows or columns of matrices."""
    x, y, counts = apart(0, 17, 16, seed=0), apart(0, 17, 24, seed=1), Counts(torch.tensor([3, 0, 7, 2, 5]))
    reference = grouped_matmul.multiply_reference
    for axis in range(3):
        matrices = apart(axis, 5, 16, 16, seed=2) if axis < 2 else apart(1, 5, 16, 16, seed=2).mT
        assert_close([grouped_matmul.multiply(x, matrices, counts)], [reference(x.double(), matrices.double(), counts)])
    exact = grouped_matmul.multiply_transposed_reference(y.double(), x.double(), counts)
    assert_close([grouped_matmul.multiply_transposed(y, x, counts)], [exact])


# ---- one program -----------------------------------------------------------------------------------------------------


def last(*tensors: Tensor, count: int = 5, seed: int = 0) -> list[Tensor]:
    """The last elements, or rows, of far tensors, which are written here."""
    parts = [each[-count:] for each in tensors]
    return [part.copy_(random(*part.shape, seed=seed + index)) for index, part in enumerate(parts)]


def attention_in_one_tile() -> None:
    """Log-sum-exps lie side by side. Of the last head, the forward and dq have the first queries, dk and dv the last
    keys, where `delta` is what the memory holds: 0."""
    q, k, v, gradient, out = (dense(1, FAR // 2**20 + 1, 2**20, 1) for _ in range(5))
    lse = dense(*q.shape[:3], dtype=torch.float32)
    first, end = (slice(0, 1), slice(-1, None), slice(16)), (slice(0, 1), slice(-1, None), slice(-16, None))
    for seed, each in enumerate((q, k, v, gradient)):
        for part in (first, end):
            each[part] = random(1, 1, 16, 1, seed=seed)
    with one_program():
        found = flash_attention.attend(q, k, v, True)
    exact = flash_attention.attend_reference(*(each[first].double() for each in (q, k, v)), True)
    assert_close([each[first] for each in found], exact)
    out[first], lse[first] = exact
    lse[end] = exact[1]
    with one_program():
        dq, dk, dv = attention_backward.attend_backward(gradient, q, k, v, out, lse, True)
    for part, found in ((first, {0: dq}), (end, {1: dk, 2: dv})):
        parts = [each[part].double() for each in (gradient, q, k, v, out, lse)]
        exact = attention_backward.attend_backward_reference(*parts, True)
        for index, each in found.items():
            assert_close([each[part]], [exact[index]])


def activation() -> None:
    gate, up, d_out = (dense(FAR + 5) for _ in range(3))
    ends = [each.double().requires_grad_() for each in last(gate, up)]
    (d_end,) = last(d_out, seed=2)
    with one_program():
        out = swiglu.swiglu(gate.requires_grad_(), up.requires_grad_())
        found = out, *torch.autograd.grad(out, (gate, up), d_out)
    out = swiglu.swiglu_reference(*ends)
    assert_close([each[-5:] for each in found], [out, *torch.autograd.grad(out, ends, d_end.double())])


def norm() -> None:
    size, rows = 2**14, FAR // 2**14 + 1
    x, residual, d_normed, d_total, dx = (dense(rows, size) for _ in range(5))
    weight, blocks = random(size, seed=9).to(NARROW), rms_norm._blocks(size, 1)
    ends = [each.double().requires_grad_() for each in last(x, residual, weight[None], count=1)]
    d_ends = last(d_normed, d_total, count=1, seed=3)
    with one_program():
        normed, total = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
        sums = dense(rows, size, dtype=torch.float32)  # one program for each row, or a program would read many
        rms_norm._backward_kernel[rows // blocks["ROWS"],](
            total, weight, d_normed, d_total, dx, sums, rows, size, 1e-5, rms_norm.wide_type(NARROW), size, **blocks
        )
    exact = rms_norm.add_rms_norm_reference(*ends, 1e-5)
    d_x, *_ = torch.autograd.grad(exact, ends, [each.double() for each in d_ends])
    assert_close([each[-1:] for each in (normed, total, dx)], [*exact, d_x])


def update() -> None:
    tensors = {name: dense(FAR + 5, dtype=torch.float32) for name in ("master", "exp_avg", "exp_avg_sq", "gradient")}
    tensors["copy"] = dense(FAR + 5)
    last(*tensors.values())
    tensors["exp_avg_sq"][-5:].square_()
    ends = {name: each[-5:].clone() for name, each in tensors.items()}
    settings = {"step": torch.tensor(3.0), "lr": torch.tensor(0.1)} | ADAMW
    with one_program():
        adamw.adamw(**tensors, **settings)
    adamw.adamw_reference(**ends, **settings)
    assert_close([each[-5:] for each in tensors.values()], ends.values())


def experts_in_one_tile() -> None:
    rows, columns = FAR // 4096 + 16, 4096
    x, matrix, counts = dense(rows, 16), dense(1, 16, columns), Counts(torch.tensor([rows]))
    last(x, matrix[0].T, count=16)
    with one_program(lambda grid: (grid[0] - 1, grid[1] - 2, 0)):  # the last one finds no tile
        found = grouped_matmul.multiply(x, matrix, counts)
    assert_close([found[-16:, -16:]], [x[-16:].double() @ matrix[0, :, -16:].double()])
    y, x, counts = dense(16, 2**15), dense(16, 2**15), Counts(torch.tensor([0, 0, 0, 0, 16]))
    last(y.T, x.T, count=16)
    with one_program():
        found = grouped_matmul.multiply_transposed(y, x, counts)
    assert_close([found[-1, -16:, -16:]], [y[:, -16:].T.double() @ x[:, -16:].double()])


def narrowing() -> None:
    x = dense(FAR // 4096 + 16, 4096)
    last(x, count=16)
    with one_program():
        numbers, scales = quantise.quantise(x, torch.float8_e4m3fn, (1, 128))
    exact = scaling.quantise_own(x[-16:, -128:], torch.float8_e4m3fn, (1, 128))
    assert_close([numbers[-16:, -128:].float(), scales[-16:, -1:]], [exact.numbers.float(), exact.scales])


CHECKS: dict[Callable, list] = {  # and the modules whose kernels they launch
    attention_in_one_tile: [flash_attention, attention_backward],
    attention_with_gaps: [flash_attention, attention_backward],
    merging: [merge],
    rotation: [rotary],
    loss: [cross_entropy],
    experts_with_gaps: [grouped_matmul],
    experts_in_one_tile: [grouped_matmul],
    activation: [swiglu],
    norm: [rms_norm],
    update: [adamw],
    narrowing: [quantise, grouped_matmul],
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_tiles(monkeypatch, 16, 16)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_offsets_beyond_32_bits(check):
    with far_results():
        check()
