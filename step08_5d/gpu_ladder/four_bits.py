"""Numbers of four and eight bits in blocks, emulated: what scales, rotations and chance do to the error.

e2m1, the four-bit format, has eight magnitudes. So everything depends on the scale that numbers share: MXFP4 gives a
power of two to 32 numbers, NVFP4 an e4m3 number to 16. Nothing here is fast: we round, in float64.
"""

from collections.abc import Callable

import torch

from common.drawing.tables import print_table

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
HADAMARD = 16  # numbers that a rotation mixes, as in NVIDIA's recipe


def to_e2m1(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round to e2m1: to the nearest, ties to even; with a generator, up or down by chance so that the mean is right.

    Beyond 6, the largest number, it saturates.
    """
    grid, size = torch.tensor(E2M1, dtype=x.dtype), x.abs().clamp(max=E2M1[-1])
    lower = (torch.searchsorted(grid, size, right=True) - 1).clamp(max=len(E2M1) - 2)
    part = (size - grid[lower]) / (grid[lower + 1] - grid[lower])
    if generator is None:
        up = (part > 0.5) | ((part == 0.5) & (lower % 2 == 1))
    else:
        up = torch.rand(x.shape, generator=generator, dtype=x.dtype) < part
    return x.sign() * grid[lower + up.long()]


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def in_blocks(x: torch.Tensor, size: int, rounded: Callable) -> torch.Tensor:
    """Apply `rounded(blocks, largest)` to blocks along the last dimension; largest: (..., 1), none of them 0."""
    blocks = x.unflatten(-1, (-1, size))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return rounded(blocks, largest).flatten(-2)


def mx(x: torch.Tensor, largest_of_format: float, rounded: Callable, up: bool = False) -> torch.Tensor:
    """The OCP's MX formats: 32 numbers share a power of two.

    up: the smallest one with which nothing saturates. The standard's rule can be one below that.
    """
    exponent = torch.tensor(largest_of_format).log2().floor()

    def scaled(blocks: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        power = (largest / largest_of_format).log2().ceil() if up else largest.log2().floor() - exponent
        return rounded(blocks / 2.0**power) * 2.0**power

    return in_blocks(x, 32, scaled)


def nvfp4(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """16 numbers share an e4m3 scale, and all of them a float32 one, with which the largest of the others is 448."""
    whole = x.abs().max() / (6 * 448)

    def scaled(blocks: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        scale = to_e4m3(largest / 6 / whole).clamp(min=2.0**-9) * whole
        return to_e2m1(blocks / scale, generator) * scale

    return in_blocks(x, 16, scaled)


def hadamard() -> torch.Tensor:
    """A rotation that spreads each of 16 numbers over all of them: Hadamard's matrix with random signs."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < HADAMARD:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(2, (HADAMARD, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return signs * matrix / HADAMARD**0.5


def rotated(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rotate blocks of 16. In a product both factors are rotated, and the two rotations cancel."""
    return (x.unflatten(-1, (-1, HADAMARD)) @ by).flatten(-2)


def stochastic(x: torch.Tensor) -> torch.Tensor:
    return nvfp4(x, torch.Generator().manual_seed(1))


RECIPES = {
    "e4m3, one scale for all": lambda x: to_e4m3(x * 448 / x.abs().max()) * x.abs().max() / 448,
    "MXFP8, as the standard rounds scales": lambda x: mx(x, 448, to_e4m3),
    "MXFP8, scales rounded up": lambda x: mx(x, 448, to_e4m3, up=True),
    "MXFP4": lambda x: mx(x, 6, to_e2m1),
    "NVFP4": nvfp4,
    "NVFP4, stochastic": stochastic,
    "NVFP4, rotated": lambda x: rotated(nvfp4(rotated(x, hadamard())), hadamard().T),
    "NVFP4, rotated and stochastic": lambda x: rotated(stochastic(rotated(x, hadamard())), hadamard().T),
}


def numbers(outlier: float, rows: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal numbers, one in a hundred of which is `outlier` times larger, and which ones are ordinary."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 512, generator=generator, dtype=torch.float64)
    large = torch.rand(x.shape, generator=generator) < 0.01
    return torch.where(large, outlier * x, x), ~large


def noise_and_loss(rounded: torch.Tensor, x: torch.Tensor) -> tuple[float, float]:
    """||error|| / ||x||, and the part of it that does not average out: what is missing of the numbers' size."""
    return ((rounded - x).norm() / x.norm()).item(), 1 - ((rounded * x).sum() / (x * x).sum()).item()


def four_bits(quick: bool) -> None:
    """Errors of MXFP8, MXFP4 and NVFP4, emulated: with outliers, stochastic rounding and Hadamard's rotation."""
    rows = [[name] for name in RECIPES]
    for outlier in (1, 100):
        x, ordinary = numbers(outlier, 256 if quick else 4096)
        for row, recipe in zip(rows, RECIPES.values()):
            error, loss = noise_and_loss(recipe(x)[ordinary], x[ordinary])
            row += [f"{error:.1%}", f"{loss:.1%}"]
    header = ["", "error", "lost on average", "error, outliers", "lost, outliers"]
    print_table("Ordinary numbers, without and with 1 % that are 100 times larger", header, rows)
