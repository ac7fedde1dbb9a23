"""The three products of a linear layer, each of two matrices in FP8, added up in float32.

    product           left, rows x columns      right, rows x columns    result
    output            x, tokens x in            weight, out x in         y, tokens x out
    input_gradient    gradient, tokens x out    weight', in x out        dx, tokens x in
    weight_gradient   gradient', out x tokens   x', in x tokens          dw, out x in

All are left times right transposed, so columns are what is added up, and blocks lie along them. That is why each
operand is quantised anew for each product. Everything else stays wide: x, y and gradients come and go in the training
type, and the gradient of the weight leaves in float32.
"""

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from common.group import Group
from common.layers import at_least_float32
from step08_5d.kernels.quantise import quantise as quantise_in_kernel
from step08_5d.narrow_numbers.history import History
from step08_5d.narrow_numbers.scaling import Block, Narrow, block_of, largest_of, quantise, scales_for

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# Blocks, and what PyTorch's product calls them. Those of `mx` are missing, as Blackwell wants their scales interleaved
SCALING = {
    (None, None): ScalingType.TensorWise,
    (1, None): ScalingType.RowWise,
    (1, 128): ScalingType.BlockWise1x128,
    (128, 128): ScalingType.BlockWise128x128,
}


def multiply(left: Narrow, right: Narrow, dtype: torch.dtype) -> Tensor:
    """left (m, k) times right (n, k) transposed: (m, n), added up in at least float32 and then rounded to `dtype`."""
    function = multiply_by_kernel if _has_kernel(left, right, dtype) else multiply_reference
    return function(left, right, dtype)


def multiply_reference(left: Narrow, right: Narrow, dtype: torch.dtype) -> Tensor:
    """The same in three plain steps: dequantise both, multiply, round."""
    return (left.wide() @ right.wide().t()).to(dtype)


def multiply_by_kernel(left: Narrow, right: Narrow, dtype: torch.dtype) -> Tensor:
    """The same by PyTorch's product, which reads both operands along their rows.

    For tiles it needs Hopper, CUDA 12.9, e4m3 on both sides, and whole fours of rows, so zeros fill them up.
    """
    rows = len(left.numbers)
    if left.block[1] and rows % 4:
        numbers, scales = (F.pad(each, (0, 0, 0, -rows % 4)) for each in (left.numbers.view(torch.uint8), left.scales))
        left = Narrow(numbers.view(left.numbers.dtype), scales, left.block)
    product = F.scaled_mm(
        left.numbers.contiguous(),
        right.numbers.contiguous().t(),
        scales_in_order(left),
        SCALING[left.block],
        scales_in_order(right, right=True),
        SCALING[right.block],
        output_dtype=dtype,
    )
    return product[:rows]


def scales_in_order(operand: Narrow, right: bool = False) -> Tensor:
    """The scales of the left or right operand as PyTorch's product reads them (cuBLAS's documentation, 3.1.4.5).

    block       shape                  next to each other in memory
    tensor      (1, 1)
    row         (rows, 1)              rows; of the right operand it is (1, rows)
    1 x 128     (rows, tiles)          rows
    128 x 128   (tiles, rows of them)  tiles of a row, filled up to whole fours

    Tiles whose scales lie otherwise get a copy, which also begins at an address that 16 divides.
    """
    rows, columns = operand.block
    if columns is None:
        return (operand.scales.t() if right else operand.scales).contiguous()
    scales, filling = operand.scales.t() if rows == 1 else operand.scales, -operand.scales.shape[1] % 4
    scales = F.pad(scales, (0, filling)) if rows > 1 and filling else scales
    if not scales.is_contiguous() or scales.storage_offset():
        scales = scales.clone(memory_format=torch.contiguous_format)
    return scales.t()


def _has_kernel(left: Narrow, right: Narrow, dtype: torch.dtype) -> bool:
    """Whether PyTorch's product takes these: widths of whole tiles, or of 16 numbers if there are none; no float64."""
    sizes = zip(right.numbers.shape, right.block, strict=True)
    whole = all(length % max(size or 0, 16) == 0 for length, size in sizes) and len(left.numbers) > 0
    blocks = left.block, right.block
    taken = all(block in SCALING for block in blocks) and dtype != torch.float64
    return whole and taken and _runs(left.numbers.device, left.numbers.dtype, blocks, dtype)


@functools.cache
def _runs(device: torch.device, left: torch.dtype, blocks: tuple[Block, Block], dtype: torch.dtype) -> bool:
    """Whether this PyTorch has such a product on this device: tried once."""
    zeros, formats = torch.zeros(128, 128, device=device), (left, FORMATS["e4m3"])
    scales = [torch.ones_like(largest_of(zeros, block)) for block in blocks]
    try:
        multiply_by_kernel(*(quantise(zeros, *each) for each in zip(formats, blocks, scales, strict=True)), dtype)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


class Products:
    """The three products of one weight, in FP8.

    Args:
        recipe: what shares a scale, see `scaling.py`.
        gradients: the format of gradients, e4m3 or e5m2; all else is e4m3.
        cut: "tokens", "in" and "out" -> the groups whose ranks hold other parts of the operands along this axis. They
            agree on the scales of what they share, so that a scale is that of the whole tensor.
        history: gives scales before the numbers are there; see `history.py`.
        blocks_of_tokens: whether neighboring tokens form blocks. Those of an expert do not: which ones are neighbors
            depends on the layout. There, a feature has one scale for all tokens.
        in_kernels: whether a kernel quantises, which gives the same bits.

    gathered: the scales of the weight in this step, if ZeRO-3 gathers it in FP8 (see `gather.py`); else None.
    """

    def __init__(
        self,
        recipe: str,
        gradients: torch.dtype,
        cut: Mapping[str, tuple[Group, ...]] = {},
        history: History | None = None,
        blocks_of_tokens: bool = True,
        in_kernels: bool = False,
    ):
        self.recipe, self.gradients, self.cut = recipe, gradients, cut
        self.history, self.blocks_of_tokens, self.in_kernels = history, blocks_of_tokens, in_kernels
        self.gathered: Tensor | None = None

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., in), weight (out, in) -> y (..., out)."""
        rows = x.flatten(0, -2)
        y = multiply(self._narrow(rows, "x", "tokens", "in"), self._narrow(weight, "weight", "out", "in"), x.dtype)
        return y.view(*x.shape[:-1], -1)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """gradient (..., out) of y, weight (out, in) -> dx (..., in)."""
        rows = self._narrow(gradient.flatten(0, -2), "gradient", "tokens", "out")
        weight = self._narrow(weight.t(), "weight", "in", "out")
        dx = multiply(rows, weight, gradient.dtype)
        return dx.view(*gradient.shape[:-1], -1)

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """gradient (..., out) of y, x (..., in) -> dw (out, in), in at least float32."""
        left = self._narrow(self._tokens_last(gradient), "gradient", "out", "tokens")
        right = self._narrow(self._tokens_last(x), "x", "in", "tokens")
        return multiply(left, right, at_least_float32(x.dtype))

    def _tokens_last(self, x: Tensor) -> Tensor:
        """(..., tokens, features) -> (features, all tokens). No block contains tokens of two sequences."""
        _, columns = self._block("x", "tokens")
        filling = -x.shape[-2] % (columns or 1)
        x = F.pad(x, (0, 0, 0, filling)) if filling else x  # that copies even if there is nothing to fill
        return x.flatten(0, -2).t()

    def _block(self, what: str, columns: str) -> tuple[int | None, int | None]:
        rows, size = block_of(self.recipe, what == "weight")
        return rows, size if columns != "tokens" or self.blocks_of_tokens else None

    def _narrow(self, x: Tensor, what: str, rows: str, columns: str) -> Narrow:
        """An operand (rows, columns) in FP8: `what` it is, and the names of its axes."""
        dtype = self.gradients if what == "gradient" else FORMATS["e4m3"]
        block = self._block(what, columns)
        if what == "weight" and self.gathered is not None:
            scales = self.gathered if rows == "out" else self.gathered.t()
        elif self.recipe == "naive":
            scales = torch.ones(1, 1, dtype=at_least_float32(x.dtype), device=x.device)
        elif self.history is not None:
            scales = self.history.scales(what, x, dtype)
        else:
            groups = self.groups(block, rows, columns)
            power_of_two = self.recipe == "mx"
            alone = block != (None, None) and all(group.size == 1 for group in groups)
            if self.in_kernels and alone:  # and in one pass: no other program has a part of a block
                return Narrow(*quantise_in_kernel(x, dtype, block, power_of_two=power_of_two), block)
            scales = scales_for(largest_of(x, block, groups), dtype, power_of_two)
        if self.in_kernels:
            return Narrow(*quantise_in_kernel(x, dtype, block, scales), block)
        return quantise(x, dtype, block, scales)

    def groups(self, block: Block, rows: str, columns: str) -> list[Group]:
        """Whose ranks hold other parts of a block of an operand with these axes."""
        whole = [axis for axis, size in zip((rows, columns), block, strict=True) if size is None]
        return [group for axis in whole for group in self.cut.get(axis, ())]
