"""A matrix in FP8 in one pass: scales, division and cast; see `narrow_numbers/scaling.py` for what they are.

For one number in bfloat16, and blocks of 128:

             least                            eager (a test counts it)
    bytes      3   read x, write its number    75   every step of the formula reads and writes float32

The transposed operands of a backward are views with other strides. A tile of them is read along the rows of the memory
that is there, turned in registers, and written along its own rows: nobody makes a transposed copy in 16 bits first.

Triton can cast to FP8 itself, but on some GPUs only, and its interpreter does not round. So numbers are rounded here,
by an addition, as follows. With float32's 23 bits of mantissa, numbers between 2^20 and 2^21 have a distance of 2^-3.
So if a number between 1 and 2 is added to 2^20, the hardware rounds it to 3 bits of mantissa, halfway cases to even,
and these bits are the last ones of the sum. For a number between 2^e and 2^(e+1) it is 2^(e+20) that does so. Below the
smallest normal number of the format, e stays, and with it the distance.
"""

import torch
from torch import Tensor

from common.layers import at_least_float32
from step08_5d.kernels.grouped_matmul import load_tile, store_tile
from step08_5d.kernels.launching import ceil_div, next_power_of_two, tl, triton, warps_for, wide_type

Block = tuple[int | None, int | None]  # rows and columns that share a scale; None: all of them


@triton.jit
def divide(a, b):
    """a / b, rounded once. (For float32, Triton's `/` may be wrong in the last digits.)"""
    if a.dtype == tl.float64:
        return a / b
    return tl.div_rn(a, b)


@triton.jit
def magnitude(x, BITS: tl.constexpr):
    """|x| as an integer. These have the order of the numbers they stand for, with infinity and then NaN at the end."""
    if x.dtype == tl.float64:
        return x.to(BITS, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    return x.to(BITS, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_for(
    largest,
    TOP: tl.constexpr, TINY: tl.constexpr, POWER_OF_TWO: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """`scaling.scales_for`. MANTISSA: the bits of a number that hold its mantissa, which is 0 for powers of two."""
    scale = divide(largest, tl.full(largest.shape, TOP, largest.dtype))
    scale = tl.where(scale < TINY, TINY, scale)  # NaN stays
    if POWER_OF_TWO:
        rounded = ((scale.to(BITS, bitcast=True) + MANTISSA) & ~MANTISSA).to(scale.dtype, bitcast=True)
        scale = tl.where(scale < float("inf"), rounded, scale)
    return scale


@triton.jit
def bits_in_8(x, scale, TOP: tl.constexpr, DIGITS: tl.constexpr, LEAST: tl.constexpr):
    """`scaling.cast` of x / scale, as bytes. DIGITS: bits of mantissa; LEAST: exponent of the least normal number."""
    quotient = divide(x, scale)
    finite = tl.abs(quotient) < float("inf")
    narrow = tl.minimum(tl.maximum(quotient, -TOP), TOP).to(tl.float32)
    sign = (narrow.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.abs(narrow)
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, (127 + LEAST) << 23)
    base = exponent + ((23 - DIGITS) << 23)
    rounded = size + base.to(tl.float32, bitcast=True)
    digits = rounded.to(tl.int32, bitcast=True) - base  # with the leading 1, if there is one
    number = digits + (exponent >> (23 - DIGITS)) - ((127 + LEAST) << DIGITS)
    return tl.where(finite, number | sign, 0x7F)  # NaN


@triton.jit
def _quantise_kernel(
    x, numbers, scales, x_strides, scale_strides, rows, columns, width,
    FINDS: tl.constexpr, TALL: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    TOP: tl.constexpr, TINY: tl.constexpr, DIGITS: tl.constexpr, LEAST: tl.constexpr,
    WIDE: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program handles `width` columns of ROWS rows, COLUMNS at a time. They share a scale if TALL, else each row has
    one, which is theirs if FINDS, else given."""
    across = tl.cdiv(columns, width)  # programs for the same rows, which are neighbors
    down, part = tl.program_id(0) // across, tl.program_id(0) % across
    row = down * ROWS + tl.arange(0, ROWS)
    first = part * width
    end = tl.minimum(first + width, columns)
    column = first + tl.arange(0, COLUMNS)
    tile = load_tile(x, x_strides[0], x_strides[1], row, column, rows, end).to(WIDE)
    block = row // ROWS if TALL else row
    block_scales = scales + block * scale_strides[0] + part * scale_strides[1]
    if FINDS:
        largest = tl.max(magnitude(tile, BITS), 1)
        for start in range(first + COLUMNS, end, COLUMNS):
            again = load_tile(x, x_strides[0], x_strides[1], row, start + tl.arange(0, COLUMNS), rows, end).to(WIDE)
            largest = tl.maximum(largest, tl.max(magnitude(again, BITS), 1))
        if TALL:
            largest = tl.max(largest, 0) + tl.zeros((ROWS,), BITS)
        scale = scale_for(largest.to(WIDE, bitcast=True), TOP, TINY, POWER_OF_TWO, BITS, MANTISSA)
        tl.store(block_scales, scale, mask=row < rows)
    else:
        scale = tl.load(block_scales, mask=row < rows, other=1.0)
    store_tile(bits_in_8(tile, scale[:, None], TOP, DIGITS, LEAST), numbers, columns, row, column, rows, end)
    for start in range(first + COLUMNS, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tile = load_tile(x, x_strides[0], x_strides[1], row, column, rows, end).to(WIDE)  # from a cache
        store_tile(bits_in_8(tile, scale[:, None], TOP, DIGITS, LEAST), numbers, columns, row, column, rows, end)


def tile_sizes(x: Tensor, block: Block) -> dict[str, int]:
    """Rows and columns of a tile: small, so that several programs live at once, and some load while others compute. But
    what is loaded are pieces of memory of at least 32 bytes."""
    (height, width), as_it_lies = block, x.stride(1) == 1
    if height and height > 1:
        rows, columns = height, width
    elif width is None and height and as_it_lies:  # whole rows, if they are not too long
        columns = min(next_power_of_two(x.shape[1]), 8192)
        rows = max(1, 2048 // columns)
    elif width is None and height:
        rows, columns = 16, 256
    else:
        columns = width or 128
        rows = 2048 // columns if as_it_lies else 32
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps_for(rows * columns)}


def quantise(
    x: Tensor, dtype: torch.dtype, block: Block, scales: Tensor | None = None, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Numbers and scales as of `scaling.quantise`, or without scales of `scaling.quantise_own`, to the last bit.

    x: (rows, columns), of any strides. The numbers are dense; scales that are found lie in memory as PyTorch's products
    read them (see `linear.scales_in_order`).
    """
    (rows, columns), (height, width) = x.shape, block
    sizes, wide = tile_sizes(x, block), at_least_float32(x.dtype)
    finds = scales is None
    grid_of_scales = [ceil_div(length, size) if size else 1 for length, size in zip(x.shape, block, strict=True)]
    if finds and height == 1 and width:
        scales = torch.empty(grid_of_scales[::-1], dtype=wide, device=x.device).t()
    elif finds and height is None:
        raise ValueError("a scale that all rows share must be given, as no program sees all of them")
    elif finds:
        scales = torch.empty(grid_of_scales, dtype=wide, device=x.device)
    numbers = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    if numbers.numel():
        each = width or (columns if finds else sizes["COLUMNS"])  # columns of a program
        strides = [stride if size else 0 for stride, size in zip(scales.stride(), block, strict=True)]
        top, small = torch.finfo(dtype), torch.finfo(wide)
        digits, least = (3, -6) if dtype == torch.float8_e4m3fn else (2, -14)
        bits, mantissa = (tl.int64, 2**52 - 1) if wide == torch.float64 else (tl.int32, 2**23 - 1)
        _quantise_kernel[ceil_div(columns, each) * ceil_div(rows, sizes["ROWS"]),](
            *(x, numbers, scales, x.stride(), tuple(strides), rows, columns, each),
            *(finds, (height or 1) > 1, power_of_two, top.max, small.tiny, digits, least),
            *(wide_type(x.dtype), bits, mantissa),
            **sizes,
        )
    return numbers.view(dtype), scales
