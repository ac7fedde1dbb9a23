"""Tiles of matrices, which is what a kernel that multiplies works on: how it loads, stores and multiplies them.

A tensor core multiplies small matrices, and the faster memories of a GPU hold small matrices. So such a kernel cuts
everything into tiles of fixed size, at least 16 x 16. Where a matrix ends inside a tile, the rest is filled with zeros,
which add nothing to a product, and is not stored.
"""

from step08_5d.kernels.launching import HAS_TRITON, tl, triton

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret) if HAS_TRITON else None


@triton.jit
def load_rows(matrix, stride, first, end, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Load the tile (ROWS, PADDED) that begins at row `first` of a matrix: zeros from row `end` and column COLUMNS on.

    `matrix` points to the first row, `stride` elements lie between two rows, and none between two columns.
    """
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = (rows < end - first)[:, None] & (columns < COLUMNS)[None, :]
    start = matrix + tl.cast(first, tl.int64) * stride  # in a long sequence this exceeds 2^31, the rest does not
    return tl.load(start + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(tile, matrix, stride, first, end, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Store what `load_rows` would load, in the type of the matrix."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = (rows < end - first)[:, None] & (columns < COLUMNS)[None, :]
    start = matrix + tl.cast(first, tl.int64) * stride
    tl.store(start + rows[:, None] * stride + columns[None, :], tile.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def multiply_add(a, b, total):
    """Return total + a @ b, where `total` is at least float32 and `a` and `b` have one type, which may be narrower.

    Tensor cores multiply narrow types exactly, and add in float32. Of float32 they would drop 13 bits ("tf32"), unless
    we insist on "ieee". The interpreter takes the bits of a bfloat16 for an integer, and so we widen it there.
    """
    if INTERPRETED:
        a, b = a.to(total.dtype), b.to(total.dtype)
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
