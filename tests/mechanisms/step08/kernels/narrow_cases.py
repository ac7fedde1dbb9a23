"""The cases of the kernel that quantises, for the table in cases.py."""

import torch
from torch import Tensor

from step08_5d.kernels.quantise import quantise
from step08_5d.narrow_numbers import scaling
from tests.mechanisms.step08.kernels.case import Case, Kernel, Maker


def narrowing(
    make: Maker, rows: int, columns: int, block: scaling.Block, turned: bool = False, power_of_two: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn, given: bool = False,
) -> Case:  # fmt: skip
    """A matrix in FP8 with scales of its own, or with given ones, which let some numbers exceed the format.

    The numbers shall be the same to the last bit, so the reference computes as narrow as the kernel.
    """
    sizes = torch.logspace(-12, 4, columns, dtype=torch.float64, device=make.device)[None]
    x = (
        make(rows, columns, dtype=torch.float64)
        * sizes[:, torch.randperm(columns, device=make.device, generator=make.generator)]
    ).to(make.dtype)
    x, scales = x.t().contiguous().t() if turned else x, None
    if given:
        scales = scaling.scales_for(0.7 * scaling.largest_of(x, block), dtype, power_of_two)

    def parts(numbers: Tensor, scales: Tensor, *_) -> tuple[Tensor, Tensor]:
        return numbers.view(torch.uint8), scales

    def reference(x):
        x = x.to(make.dtype)
        if given:
            return parts(*scaling.quantise(x, dtype, block, scales))
        return parts(*scaling.quantise_own(x, dtype, block, power_of_two))

    def ours(x):
        return parts(*quantise(x, dtype, block, scales, power_of_two))

    work = {"forward": x.nbytes + x.numel()}
    return Case(ours, reference, [x], gradients=False, slack=0, work=work)


# What shares a scale: rows and columns
ROW, TILE, WEIGHT, MX, TENSOR = (1, None), (1, 128), (128, 128), (1, 32), (None, None)
TOKENS = 8 * 4096
NARROW_KERNELS = {
    "quantise, rows": Kernel(narrowing, [(70, 300, ROW), (20, 600, ROW, True)], (1002, 9000, ROW), (TOKENS, 2048, ROW)),
    "quantise, tiles": Kernel(narrowing, [(70, 300, TILE), (1, 1, TILE)], (1002, 5003, TILE), (TOKENS, 2048, TILE)),
    "quantise, tiles, turned": Kernel(
        narrowing, [(300, 70, TILE, True)], (1002, 5003, TILE, True), (2048, TOKENS, TILE, True)
    ),
    "quantise, tiles of a weight": Kernel(
        narrowing, [(130, 260, WEIGHT), (260, 130, WEIGHT, True)], (1002, 5003, WEIGHT), (TOKENS, 2048, WEIGHT)
    ),
    "quantise, powers of two": Kernel(narrowing, [(70, 130, MX, False, True), (70, 130, MX, True, True)]),
    "quantise, e5m2 and given scales": Kernel(
        narrowing,
        [
            (70, 300, block, turned, False, torch.float8_e5m2, True)
            for block in (ROW, TILE, WEIGHT, TENSOR)
            for turned in (False, True)
        ],
        (1002, 5003, TENSOR, False, False, torch.float8_e5m2, True),
    ),
}
