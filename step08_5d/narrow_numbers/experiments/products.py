"""The error of one product: what shares a scale, and what 4 bits need besides."""

import torch
from torch import Tensor

from common.drawing.charts import lines
from common.drawing.figures import new_figure, save_figure
from common.drawing.tables import print_table
from step08_5d.narrow_numbers.experiments.formats import FORMATS as SMALL
from step08_5d.narrow_numbers.experiments.formats import round_to
from step08_5d.narrow_numbers.linear import FORMATS, multiply_reference
from step08_5d.narrow_numbers.scaling import largest_of, quantise_now, stretched

TOKENS, WIDTH, OUT = 256, 1024, 256
FACTORS = (1, 100, 1_000, 10_000, 100_000)  # by which one column exceeds the others
RECIPES = ("tensor", "row", "tile", "mx")
BLOCK = 16  # of NVFP4, whose scales are e4m3


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def operands(factor: float) -> tuple[Tensor, Tensor]:
    """x (tokens, in) and weight (out, in), normal, in float64; one column of x is so many times larger."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for rows in (TOKENS, OUT))
    x[:, 7] *= factor
    weight[:, 7] /= factor  # as a model may learn it: in the product the column counts no more than the others
    return x, weight


def outliers(quick: bool) -> None:
    """The error of one product by what shares a scale, if one column is 100 times larger than the others, or more."""
    rows, curves = [], {recipe: {} for recipe in RECIPES}
    for name in FORMATS:
        for recipe in RECIPES:
            cells = []
            for factor in FACTORS:
                x, weight = operands(factor)
                left = quantise_now(x, FORMATS[name], recipe)
                right = quantise_now(weight, FORMATS["e4m3"], recipe, weight=True)
                error = relative(multiply_reference(left, right, x.dtype), x @ weight.t())
                zeros = (left.numbers.float() == 0).float().mean().item()
                cells.append(f"{error:.2%}, {zeros:.2%}")
                if name == "e4m3":
                    curves[recipe][factor] = 100 * error
            rows.append((f"{name}, {recipe}", *cells))
    title = f"Error of x ({TOKENS} x {WIDTH}) times a weight ({OUT} x {WIDTH}), and share of x that becomes 0"
    print_table(title, ("one column times", *(f"{factor:,}" for factor in FACTORS)), rows)
    figure, axis = new_figure(width=6.5, height=3)
    lines(axis, curves, log="xy")
    axis.set(xlabel="one column is so many times larger", ylabel="error of the product in %")
    save_figure(figure, "outliers")


def in_four_bits(x: Tensor, random: Tensor | None = None) -> Tensor:
    """What x (rows, columns) becomes in NVFP4: e2m1 with an e4m3 scale for each 16 numbers, and a scale for them all.

    NVIDIA, "Pretraining LLMs with NVFP4" (arXiv:2509.25149).
    """
    largest = largest_of(x, (1, BLOCK))
    whole = largest.amax() / (SMALL["e2m1"].largest * SMALL["e4m3"].largest)
    scales = round_to(largest / SMALL["e2m1"].largest / whole, SMALL["e4m3"]).clamp_min(SMALL["e4m3"].smallest) * whole
    scales = stretched(scales, (1, BLOCK), x.shape)
    return round_to(x / scales, SMALL["e2m1"], random) * scales


def hadamard(size: int) -> Tensor:
    """The matrix of +-1 / sqrt(size) that mixes `size` numbers and is its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def four_bits(quick: bool) -> None:
    """NVFP4, emulated: the error of a product with and without a Hadamard transform, and the mean of many roundings."""
    x, weight = operands(1)
    wild = x.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype) > 0.01, 30 * x)
    mix = torch.block_diag(*[hadamard(BLOCK)] * (WIDTH // BLOCK))
    rows = []
    for name, each in {"normal numbers": x, "1 % of them 30 times larger": wild}.items():
        for how, matrix in {"as they are": torch.eye(WIDTH, dtype=x.dtype), "mixed by 16": mix}.items():
            left, right = each @ matrix, weight @ matrix
            error = relative(in_four_bits(left) @ in_four_bits(right).t(), each @ weight.t())
            rows.append((f"{name}, {how}", f"{error:.2%}", f"{(in_four_bits(left) == 0).float().mean():.2%}"))
    print_table("A product in NVFP4, with and without a Hadamard transform", ("", "error", "become 0"), rows)
    generator, x = torch.Generator().manual_seed(2), x[:16]
    rows = []
    for count in (1, 16, 256):
        means = [torch.zeros_like(x), torch.zeros_like(x)]
        for _ in range(count):
            means[0] += in_four_bits(x) / count
            means[1] += in_four_bits(x, torch.rand(x.shape, generator=generator, dtype=x.dtype)) / count
        rows.append((count, *(f"{relative(mean, x):.2%}" for mean in means)))
    print_table("Relative error of the mean of so many roundings", ("roundings", "to nearest", "stochastic"), rows)
