"""PyTorch's product of two matrices in FP8: it equals the reference, and gets operands as each device reads them."""

import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from step08_5d.narrow_numbers import linear
from step08_5d.narrow_numbers.linear import FORMATS, Products, multiply, multiply_reference
from step08_5d.narrow_numbers.scaling import quantise_now
from tests.mechanisms.step08.test_narrow_numbers import normal, relative

E4M3, E5M2 = FORMATS.values()
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ANYWHERE = [("cpu", recipe) for recipe in ("tensor", "row")]
ANYWHERE += [pytest.param("cuda", recipe, marks=pytest.mark.gpu) for recipe in ("tensor", "row", "tile")]
BATCH, IN, OUT = 3, 640, 384  # 5 and 3 tiles
TOKENS = {"tensor": 48, "row": 48, "tile": 43}  # those of tiles need not be divisible by anything


def uneven(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, whose size differs from tile to tile."""
    sizes = torch.logspace(-3, 0, shape[-2])[:, None] * torch.logspace(0, 3, shape[-1])
    return normal(*shape, seed=seed) * sizes[torch.randperm(shape[-2], generator=torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize("device, recipe", ANYWHERE)
@pytest.mark.parametrize(
    "dtype, out, weight", [*itertools.product((E4M3, E5M2), (torch.float32, torch.bfloat16), (False, True))]
)
def test_pytorchs_product_equals_the_reference(device, recipe, dtype, out, weight):
    left = quantise_now(uneven(BATCH * TOKENS[recipe], IN).to(device), dtype, recipe)
    right = quantise_now(uneven(OUT, IN, seed=1).to(device), E4M3, recipe, weight)
    if not linear._has_kernel(left, right, out):
        known = HOPPER and device == "cuda" and not (recipe == "tile" and dtype == E5M2)  # PyTorch's tiles are e4m3
        assert not known, "Hopper has this product from CUDA 12.9"
        pytest.skip("this PyTorch has no such product on this device")
    with mock.patch.object(F, "scaled_mm", wraps=F.scaled_mm) as kernel:
        found = multiply(left, right, out)
    assert kernel.call_count == 1
    bound = 1e-6 if out == torch.float32 else 3e-3
    bound = max(bound, 3e-3) if device == "cuda" else bound  # tensor cores keep 14 bits of a sum
    assert relative(found, multiply_reference(left, right, out)) < bound


def three_products(recipe: str, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    tokens = BATCH, TOKENS[recipe]
    wide = uneven(*tokens, IN), uneven(OUT, IN, seed=1), uneven(*tokens, OUT, seed=2)
    x, weight, dy = (each.to(device, dtype) for each in wide)
    products = Products(recipe, E5M2)
    return [products.output(x, weight), products.input_gradient(dy, weight), products.weight_gradient(dy, x)]


@pytest.mark.parametrize("recipe", ["tensor", "row", "tile"])
def test_a_gpu_takes_the_operands_of_all_products(recipe):
    """PyTorch itself checks their shapes and strides as a GPU wants them: it does so for tensors without data, too."""
    available = mock.patch.object(linear, "_runs", return_value=True)
    with available, mock.patch.object(F, "scaled_mm", wraps=F.scaled_mm) as kernel:
        y, dx, dw = three_products(recipe, torch.bfloat16, "meta")
        assert kernel.call_count == 3
        shapes = [tuple(each.shape) for each in (y, dx, dw)]
        assert shapes == [(BATCH, TOKENS[recipe], OUT), (BATCH, TOKENS[recipe], IN), (OUT, IN)]
        if recipe == "tile":
            as_they_are = mock.patch.object(linear, "scales_in_order", lambda operand, right=False: operand.scales)
            with as_they_are, pytest.raises(RuntimeError, match="blockwise scaling"):
                three_products(recipe, torch.bfloat16, "meta")


def cublas(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """The product of tiles, with scales read from memory as cuBLAS's documentation has them (3.1.4.5)."""
    (m, k), n = a.shape, b.shape[1]
    assert m % 4 == n % 4 == 0 and a.stride() == (k, 1) and b.stride() == (1, k)

    def scales_of(scales, recipe, rows):
        row, tile = torch.arange(rows)[:, None], torch.arange(k // 128)
        fours = -(-k // 512) * 4
        where = tile * rows + row if recipe == ScalingType.BlockWise1x128 else row // 128 * fours + tile
        assert scales.data_ptr() % 16 == 0 and scales.dtype == torch.float32
        return scales.as_strided((scales.numel(),), (1,))[where].repeat_interleave(128, 1)

    left, right = a.float() * scales_of(scale_a, recipe_a, m), b.t().float() * scales_of(scale_b, recipe_b, n)
    return (left @ right.t()).to(output_dtype)


def test_every_tile_gets_its_own_scale():
    expected = three_products("tile", torch.float32)
    available = mock.patch.object(linear, "_runs", return_value=True)
    with available, mock.patch.object(F, "scaled_mm", side_effect=cublas) as kernel:
        found = three_products("tile", torch.float32)
    assert kernel.call_count == 3
    assert max(map(relative, found, expected)) < 1e-6
