"""Products with one matrix for each expert, in one launch: what step 7 calls `multiply` and `multiply_transposed`.

The rows of an expert are neighbors, and only the device knows how many there are. A launch needs to know its number of
programs, and to ask the device for the counts would make the host wait for it, once in every layer. But a bound is
enough: if tiles have R rows, each expert has at most one that is not full, so that n rows are at most n / R + experts
tiles. Each program finds out from the counts which expert's tile it has; those without one stop at once. (MegaBlocks,
Gale et al., arXiv:2211.15841, showed that experts need no padding to equal lengths; their products are block-sparse.)

For n rows of width i, matrices of o columns and E experts, in numbers of e bytes:
  FLOPs   2 n i o, whoever gets the rows, and for tiles that are not full at most E (R - 1) rows more
  bytes   at least (n i + n o + E i o) e: rows and matrices are read and the result is written. With n / E rows per
          expert that is 2 / (e (E / n + 1 / i + 1 / o)) FLOPs per byte: with few rows, the matrices take the time
The transposed product has the same numbers, with the matrices as its result. Added to sums in float32 it moves 8 bytes
for each of their elements. By itself it would be rounded and written, and then read and added: 2 + 2 + 8 in 16 bits.
"""

import torch
from torch import Tensor

from step07_expert_parallel.experts import Counts
from step08_5d.kernels.launching import ceil_div, next_power_of_two, tl, triton, wide_type
from step08_5d.kernels.tiles import multiply_add


def multiply_reference(x: Tensor, matrices: Tensor, counts: Counts) -> Tensor:
    """The rows of each expert times its matrix: x (rows, in), matrices (experts, in, out) -> (rows, out)."""
    return torch.cat([x[rows] @ matrix for rows, matrix in zip(counts.rows, matrices, strict=True)])


def multiply_transposed_reference(y: Tensor, x: Tensor, counts: Counts) -> Tensor:
    """The transposed rows of each expert in y times those in x: (rows, out), (rows, in) -> (experts, out, in)."""
    return torch.stack([y[rows].T @ x[rows] for rows in counts.rows])


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def load_tile(matrix, row_stride, column_stride, rows, columns, row_end, column_end):
    """The elements at `rows` x `columns` of a matrix, zeros where it has ended. Either stride may be 1."""
    inside = (rows < row_end)[:, None] & (columns < column_end)[None, :]
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    return tl.load(matrix + offsets, mask=inside, other=0.0)


@triton.jit
def store_tile(tile, matrix, stride, rows, columns, row_end, column_end):
    inside = (rows < row_end)[:, None] & (columns < column_end)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(matrix + offsets, tile.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def find_tile(number, counts, experts, ROWS: tl.constexpr, PADDED_EXPERTS: tl.constexpr):
    """Which expert this tile belongs to, its first row, and the end of the expert's rows. No expert: `experts` or more.

    Say ROWS is 4 and the counts are 5, 0, 4: tiles 0 and 1 are expert 0's, tile 2 is expert 2's, there is no tile 3.
    """
    expert = tl.arange(0, PADDED_EXPERTS)
    count = tl.load(counts + expert, mask=expert < experts, other=0).to(tl.int32)
    tiles = (count + ROWS - 1) // ROWS
    passed = tl.cumsum(tiles, 0) <= number  # all of this expert's tiles come before this one
    found = tl.sum(passed.to(tl.int32), 0)
    first_of_expert = tl.sum(tl.where(passed, count, 0), 0)
    first = first_of_expert + (number - tl.sum(tl.where(passed, tiles, 0), 0)) * ROWS
    return found, first, first_of_expert + tl.sum(tl.where(expert == found, count, 0), 0)


@triton.jit
def _multiply_kernel(
    x, matrices, out, counts, x_stride, strides, experts, inner, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PADDED_EXPERTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of the result. Neighboring programs share the rows, and soon all columns: the L2 cache has the matrix."""
    expert, first, end = find_tile(tl.program_id(1), counts, experts, ROWS, PADDED_EXPERTS)
    if expert >= experts:
        return
    rows, column = first + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = matrices + expert.to(tl.int64) * strides[0]
    total = tl.zeros((ROWS, COLUMNS), WIDE)
    for start in range(0, inner, INNER):
        k = start + tl.arange(0, INNER)
        x_tile = load_tile(x, x_stride, 1, rows, k, end, inner)
        total = multiply_add(x_tile, load_tile(matrix, strides[1], strides[2], k, column, inner, columns), total)
    store_tile(total, out, columns, rows, column, end, columns)


@triton.jit
def _multiply_transposed_kernel(
    y, x, out, counts, y_stride, x_stride, experts, height, width, ADDS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PADDED_EXPERTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's result, a sum over its rows, or that added to what is there. Without rows it is zero."""
    expert = tl.program_id(2)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    each = tl.arange(0, PADDED_EXPERTS)
    count = tl.load(counts + each, mask=each <= expert, other=0).to(tl.int32)
    end = tl.sum(count, 0)
    total = tl.zeros((ROWS, COLUMNS), WIDE)
    for start in range(end - tl.sum(tl.where(each == expert, count, 0), 0), end, INNER):
        k = start + tl.arange(0, INNER)
        y_tile = load_tile(y, 1, y_stride, row, k, height, end)  # read as its transpose
        total = multiply_add(y_tile, load_tile(x, x_stride, 1, k, column, end, width), total)
    out += expert.to(tl.int64) * height * width
    if ADDS:  # in halves: beside the whole tile, another one would leave no registers for a second program
        halves = total.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            column = tl.program_id(0) * COLUMNS + half * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            added = halves[half] + load_tile(out, width, 1, row, column, height, width)
            store_tile(added, out, width, row, column, height, width)
    else:
        store_tile(total, out, width, row, column, height, width)


# ---- launches --------------------------------------------------------------------------------------------------------


def tile_sizes(x: Tensor) -> dict[str, int]:
    """Rows and columns of a tile of the result, and how much of the sums' length is loaded at a time.

    Larger tiles need fewer bytes per FLOP, but must fit into registers and shared memory.
    """
    if x.element_size() > 2:  # without the fast tensor cores
        return {"ROWS": 64, "COLUMNS": 64, "INNER": 16, "num_warps": 4, "num_stages": 2}
    return {"ROWS": 128, "COLUMNS": 128, "INNER": 64, "num_warps": 8, "num_stages": 3}


def multiply(x: Tensor, matrices: Tensor, counts: Counts) -> Tensor:
    """The rows of each expert times its matrix: x (rows, in), matrices (experts, in, out) -> (rows, out)."""
    (rows, inner), (experts, _, columns), sizes = x.shape, matrices.shape, tile_sizes(x)
    out, x = x.new_empty(rows, columns), x if x.stride(1) == 1 else x.contiguous()
    grid = ceil_div(columns, sizes["COLUMNS"]), ceil_div(rows, sizes["ROWS"]) + experts
    _multiply_kernel[grid](
        *(x, matrices, out, counts.on_device, x.stride(0), matrices.stride(), experts, inner, columns),
        PADDED_EXPERTS=next_power_of_two(experts),
        WIDE=wide_type(x.dtype),
        **sizes,
    )
    return out


def multiply_transposed(
    y: Tensor, x: Tensor, counts: Counts, total: Tensor | None = None, first: bool = True
) -> Tensor:
    """The transposed rows of each expert in y times those in x: (rows, out), (rows, in) -> (experts, out, in).

    Into `total` if there is one, a dense tensor of at least float32, in place of what it has (`first`) or added to it.
    """
    y, x = (each if each.stride(1) == 1 else each.contiguous() for each in (y, x))
    experts, height, width, sizes = len(counts.on_device), y.shape[1], x.shape[1], tile_sizes(x)
    out = x.new_empty(experts, height, width) if total is None else total
    if not out.is_contiguous():
        raise ValueError("the sums of experts must be dense")
    grid = ceil_div(width, sizes["COLUMNS"]), ceil_div(height, sizes["ROWS"]), experts
    _multiply_transposed_kernel[grid](
        *(y, x, out, counts.on_device, y.stride(0), x.stride(0), experts, height, width, not first),
        PADDED_EXPERTS=next_power_of_two(experts),
        WIDE=wide_type(x.dtype),
        **sizes,
    )
    return out
