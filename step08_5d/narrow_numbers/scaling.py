"""From wide numbers to FP8 and back: a tensor is cut into blocks, and each block is divided by a scale before the cast.

e4m3 has numbers from 2^-9 to 448, and e5m2 from 2^-16 to 57,344 (Micikevicius et al., arXiv:2209.05433). Gradients of
1e-6 would all become 0. So the largest number of a block is mapped to the largest one of the format, and its scale is
kept beside it. What shares a scale is the recipe:

    naive    nothing is scaled
    tensor   the whole tensor
    delayed  the whole tensor, and the scale is that of earlier steps (`history.py`)
    row      a row, of all the columns that a product adds up
    tile     1 x 128 numbers of activations and gradients, 128 x 128 of weights (DeepSeek-V3, arXiv:2412.19437, 3.3.2)
    mx       1 x 32 numbers, and the scale is a power of two, 8 bits long (OCP Microscaling, arXiv:2310.10537)

The last axis is always the one that a product adds up: columns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common import collectives
from common.group import Group
from common.layers import at_least_float32
from step08_5d.kernels.quantise import Block

BLOCKS = {"tile": 128, "mx": 32}  # numbers of a row that share a scale


def block_of(recipe: str, weight: bool = False) -> Block:
    """The block of a recipe, for a weight or for activations and gradients."""
    if recipe in ("naive", "tensor", "delayed"):
        return None, None
    size = BLOCKS.get(recipe)  # None: the whole row
    return (size, size) if recipe == "tile" and weight else (1, size)


class Narrow(NamedTuple):
    """A matrix in FP8.

    numbers  (rows, columns), in 8 bits
    scales   (blocks along the rows, blocks along the columns), in at least float32: a number stands for number * scale
    block    rows and columns of a block; the last ones may have fewer
    """

    numbers: Tensor
    scales: Tensor
    block: Block

    def wide(self) -> Tensor:
        """What it stands for, (rows, columns) in the type of the scales."""
        return self.numbers.to(self.scales.dtype) * stretched(self.scales, self.block, self.numbers.shape)


def stretched(scales: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """The scale of each number, in a shape that broadcasts to `shape`."""
    for axis, size in enumerate(block):
        if size is not None:
            scales = scales.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
    return scales


def largest_of(x: Tensor, block: Block, groups: Sequence[Group] = ()) -> Tensor:
    """The largest magnitude in each block of x (rows, columns), in at least float32.

    Blocks that do not fill up at the end are filled up with zeros. If ranks of these groups hold other parts of the
    same blocks, it is the largest of all parts.
    """
    rows, columns = (size or length for size, length in zip(block, x.shape, strict=True))
    filling = -x.shape[1] % columns, -x.shape[0] % rows
    x = F.pad(x.abs(), (0, filling[0], 0, filling[1])) if any(filling) else x.abs()
    largest = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3)).to(at_least_float32(x.dtype))
    for group in groups:
        collectives.all_reduce(largest, group, op="max")
    return largest


def largest_of_all(largest: Sequence[tuple[Tensor, Sequence[Group]]]) -> None:
    """Make of each tensor the largest numbers that any rank of its groups has, in one message per group."""
    every = {group.name: group for _, groups in largest for group in groups}
    for name in sorted(every):
        mine = [each for each, groups in largest if every[name] in groups]
        joined = torch.cat([each.flatten() for each in mine])
        collectives.all_reduce(joined, every[name], op="max")
        for each, part in zip(mine, joined.split([each.numel() for each in mine]), strict=True):
            each.copy_(part.view_as(each))


def scales_for(largest: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """The scales that map these numbers to the largest number of the format.

    A power of two is rounded up, so that nothing exceeds the format (Mishra et al., arXiv:2506.08027; the standard
    rounds down). A block of zeros gets the smallest scale there is: 0 stays 0.
    """
    top = torch.full_like(largest, torch.finfo(dtype).max)  # a tensor: instead of dividing by a number, CUDA multiplies
    scales = (largest / top).clamp_min(torch.finfo(largest.dtype).tiny)
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1)
        rounded = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
        scales = torch.where(scales.isfinite(), rounded, scales)
    return scales


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this 8-bit format. What exceeds its largest number becomes that; infinity and NaN become NaN.

    So a step that overflows is noticed: torch's own cast to e4m3 makes 448 of an infinity.
    """
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).where(x.isfinite(), torch.nan).to(dtype)


def quantise(x: Tensor, dtype: torch.dtype, block: Block, scales: Tensor) -> Narrow:
    """x (rows, columns) in this format with these scales, one for each block."""
    return Narrow(cast(x.to(scales.dtype) / stretched(scales, block, x.shape), dtype), scales, block)


def quantise_own(x: Tensor, dtype: torch.dtype, block: Block, power_of_two: bool = False) -> Narrow:
    """x (rows, columns) in this format, with the scales that its own largest numbers suggest."""
    return quantise(x, dtype, block, scales_for(largest_of(x, block), dtype, power_of_two))


def quantise_now(x: Tensor, dtype: torch.dtype, recipe: str, weight: bool = False) -> Narrow:
    """x (rows, columns) as a recipe wants it, with scales from its own largest numbers."""
    block = block_of(recipe, weight)
    if recipe == "naive":
        return quantise(x, dtype, block, torch.ones_like(largest_of(x, block)))
    return quantise_own(x, dtype, block, recipe == "mx")
