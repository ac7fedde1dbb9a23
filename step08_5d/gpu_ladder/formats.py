"""Number formats: how far they reach, and how finely they divide. All numbers come from torch.finfo.

A floating-point number is sign, exponent and mantissa. Exponent bits buy range, mantissa bits buy resolution: between
two powers of two there are always as many numbers as the mantissa has patterns.
"""

import math

import torch

from common.drawing.figures import SERIES, new_figure, save_figure
from common.drawing.tables import print_table

FORMATS = {  # name: (type, exponent bits, mantissa bits)
    "float32": (torch.float32, 8, 23),
    "bfloat16": (torch.bfloat16, 8, 7),
    "float16": (torch.float16, 5, 10),
    "e4m3": (torch.float8_e4m3fn, 4, 3),
    "e5m2": (torch.float8_e5m2, 5, 2),
}


def between_one_and_two(dtype: torch.dtype) -> int:
    """How many numbers of this type lie strictly between 1 and 2: steps of eps, without the end points."""
    return round(1 / torch.finfo(dtype).eps) - 1


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of an 8-bit type, sorted."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return numbers[numbers.isfinite()].unique()


def formats(quick: bool) -> None:
    """Range and resolution of float32, bfloat16, float16 and the two 8-bit formats."""
    rows = []
    for name, (dtype, exponent, mantissa) in FORMATS.items():
        info = torch.finfo(dtype)
        numbers = [f"{each:.3g}" for each in (info.smallest_normal, info.max, info.eps)]
        rows.append((name, info.bits, exponent, mantissa, *numbers, f"{between_one_and_two(dtype):,}"))
    header = ("", "bits", "exponent", "mantissa", "smallest normal", "largest", "eps", "between 1 and 2")
    print_table("What the bits buy", header, rows)
    _draw()


def spacing(dtype: torch.dtype, value: float) -> float:
    """The distance from a power of two to the next larger number. Below the smallest normal number it is constant."""
    info = torch.finfo(dtype)
    return max(value, info.smallest_normal) * info.eps


def _draw() -> None:
    figure, (reach, resolution) = new_figure(1, 2, width=10, height=3.9, width_ratios=(1, 1.15))
    for index, (name, (dtype, *_)) in enumerate(FORMATS.items()):
        info, colour = torch.finfo(dtype), SERIES[index]
        low, least, high = (
            math.log2(each) for each in (info.smallest_normal * info.eps, info.smallest_normal, info.max)
        )
        reach.barh(index, least - low, left=low, color=colour, alpha=0.35)
        reach.barh(index, high - least, left=least, color=colour)
        exponents = range(math.floor(low), math.floor(high) + 1)
        relative = [spacing(dtype, 2.0**e) / 2.0**e for e in exponents]
        resolution.plot(list(exponents), relative, color=colour, linewidth=2)
        place = (high + 1, info.eps) if high < 24 else (24, 2 * info.eps)
        resolution.text(*place, name, color=colour, fontweight="bold", va="center")
    reach.set_yticks(range(len(FORMATS)), FORMATS)
    reach.invert_yaxis()
    reach.grid(visible=False, axis="y")
    reach.set(xlabel="power of two", title="range (pale: subnormal numbers)")
    resolution.set(yscale="log", xlim=(-45, 45), ylim=(1e-8, 2), xlabel="power of two")
    resolution.set(title="distance to the next number, divided by the number")
    for axis in (reach, resolution):
        axis.title.set_fontsize(10)
    save_figure(figure, "formats")
