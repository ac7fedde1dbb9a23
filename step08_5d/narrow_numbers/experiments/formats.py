"""Number formats from 32 bits to 4: how far they reach, and how many numbers they have between 1 and 2.

A number is (-1)^sign * 2^(exponent - bias) * 1.mantissa; with the smallest exponent it is 0.mantissa. So exponent bits
buy range, and mantissa bits buy numbers between two powers of two. E8M0 has neither sign nor mantissa: it is a scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """Bits of exponent and mantissa; `reserved`: how many patterns of the highest exponent are no finite numbers."""

    exponent: int
    mantissa: int
    reserved: str = "all"  # infinity and NaN take the highest exponent (IEEE); or "nan": one pattern; or "none"

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self) -> float:
        exponent = 2**self.exponent - 1 - self.bias - (self.reserved == "all")
        steps = 2**self.mantissa - 1 - (self.reserved == "nan")
        return 2.0**exponent * (1 + steps / 2**self.mantissa)

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest number above 0, which has no leading 1."""
        return self.smallest_normal / 2**self.mantissa

    @property
    def between_one_and_two(self) -> int:
        """How many numbers lie strictly between 1 and 2."""
        return 2**self.mantissa - 1


FORMATS = {
    "float32": Format(8, 23),
    "bfloat16": Format(8, 7),
    "float16": Format(5, 10),
    "e5m2": Format(5, 2),
    "e4m3": Format(4, 3, "nan"),
    "e2m1": Format(2, 1, "none"),
}


def numbers(format: Format) -> Tensor:
    """All numbers of a small format from 0 up, in float64."""
    steps = torch.arange(2**format.mantissa, dtype=torch.float64) / 2**format.mantissa
    powers = 2.0 ** (torch.arange(1, 2**format.exponent, dtype=torch.float64) - format.bias)
    found = torch.cat([format.smallest_normal * steps, (powers[:, None] * (1 + steps)).flatten()])
    return found[found <= format.largest]


def round_to(x: Tensor, format: Format, random: Tensor | None = None) -> Tensor:
    """x in the nearest numbers of a small format, saturated. Halfway between two, the one with an even mantissa.

    With `random`, uniform in [0, 1) and of the shape of x, it is rounded up as often as it is near the upper number:
    stochastic rounding, whose mean is x.
    """
    table = numbers(format).to(x.dtype)
    size = x.abs().clamp(max=format.largest)
    above = torch.bucketize(size, table).clamp(max=len(table) - 1)  # the first number that is not below
    below = (above - 1).clamp(min=0)
    share = (size - table[below]) / (table[above] - table[below]).clamp(min=format.smallest)
    even = torch.where(below % 2 == 0, share > 0.5, share >= 0.5)  # numbers alternate: even mantissa, odd mantissa
    up = even if random is None else share > random
    return torch.where(up, table[above], table[below]).copysign(x)
