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

from common.model import at_least_float32
from common.process_groups import Group
from step08_5d.narrow_numbers.history import History
from step08_5d.narrow_numbers.scaling import Block, Narrow, block_of, largest_of, quantise, scales_for

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def multiply(left: Narrow, right: Narrow, dtype: torch.dtype) -> Tensor:
    """left (m, k) times right (n, k) transposed: (m, n), added up in at least float32 and then rounded to `dtype`."""
    if _has_kernel(left, right, dtype):
        scales = left.scales.contiguous(), right.scales.t().contiguous()
        return torch._scaled_mm(left.numbers, right.numbers.t(), *scales, out_dtype=dtype)
    return multiply_reference(left, right, dtype)


def multiply_reference(left: Narrow, right: Narrow, dtype: torch.dtype) -> Tensor:
    """The same in three plain steps: dequantise both, multiply, round."""
    return (left.wide() @ right.wide().t()).to(dtype)


def _has_kernel(left: Narrow, right: Narrow, dtype: torch.dtype) -> bool:
    """Whether PyTorch's product takes these: a scale per tensor or per row, widths of whole 16 numbers, no float64.

    (It takes tiles too, on Hopper alone and with scales in an order of its own. That path is not built here.)
    """
    whole = all(size % 16 == 0 for size in right.numbers.shape) and len(left.numbers) > 0
    per_row = left.block == right.block == (1, None)
    taken = per_row or left.block == right.block == (None, None)
    return whole and taken and dtype != torch.float64 and _runs(left.numbers.device, left.numbers.dtype, per_row, dtype)


@functools.cache
def _runs(device: torch.device, left: torch.dtype, per_row: bool, dtype: torch.dtype) -> bool:
    """Whether this PyTorch has such a product on this device: tried once."""
    a, b = (torch.zeros(16, 16, device=device).to(each) for each in (left, torch.float8_e4m3fn))
    shapes = ((16, 1), (1, 16)) if per_row else ((), ())
    try:
        torch._scaled_mm(a, b.t(), *(torch.ones(shape, device=device) for shape in shapes), out_dtype=dtype)
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

    gathered: the scales of the weight in this step, if ZeRO-3 gathers it in FP8 (see `gather.py`); else None.
    """

    def __init__(
        self,
        recipe: str,
        gradients: torch.dtype,
        cut: Mapping[str, tuple[Group, ...]] = {},
        history: History | None = None,
        blocks_of_tokens: bool = True,
    ):
        self.recipe, self.gradients, self.cut = recipe, gradients, cut
        self.history, self.blocks_of_tokens = history, blocks_of_tokens
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
        return F.pad(x, (0, 0, 0, -x.shape[-2] % (columns or 1))).flatten(0, -2).t()

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
            scales = scales_for(largest_of(x, block, groups), dtype, self.recipe == "mx")
        return quantise(x, dtype, block, scales)

    def groups(self, block: Block, rows: str, columns: str) -> list[Group]:
        """Whose ranks hold other parts of a block of an operand with these axes."""
        whole = [axis for axis, size in zip((rows, columns), block, strict=True) if size is None]
        return [group for axis in whole for group in self.cut.get(axis, ())]
