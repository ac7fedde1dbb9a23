"""The kernel that quantises gives the bits of its formula for every number there is, and linear layers take it."""

from unittest import mock

import pytest
import torch

from step08_5d.gpu_ladder.traffic import BytesMoved
from step08_5d.kernels import quantise as kernel
from step08_5d.narrow_numbers import linear, scaling
from step08_5d.narrow_numbers.linear import FORMATS, Products, scales_in_order
from tests.mechanisms.step08.kernels.case import DEVICE
from tests.mechanisms.step08.kernels.compare import launches, needs_triton, on_cpu, random

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:invalid value")]  # infinity / infinity
E4M3, E5M2 = FORMATS.values()
NARROW = torch.float16, torch.bfloat16
TINY = torch.finfo(torch.float32).tiny


def quantise(x: torch.Tensor, dtype: torch.dtype, block: kernel.Block, *options, **named) -> scaling.Narrow:
    return scaling.Narrow(*kernel.quantise(x, dtype, block, *options, **named), block)


def assert_same_bits(found: scaling.Narrow, expected: scaling.Narrow, what: str = "") -> None:
    differ = found.numbers.view(torch.uint8) != expected.numbers.view(torch.uint8)
    assert not differ.any(), f"{what}: {int(differ.sum())} numbers"
    assert torch.equal(found.scales.nan_to_num(-1.0), expected.scales.nan_to_num(-1.0)), what
    assert found.scales.dtype == expected.scales.dtype and found.block == expected.block


def check_special_numbers() -> None:
    """Infinities, NaN, zeros of both signs, subnormal numbers: in tiles with others, in tiles of their own."""
    special = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45, 1e-40, -TINY, 3e38, 448 * 2.0**-126]
    sizes = torch.logspace(-6, 0, 128, device=DEVICE).repeat(len(special))
    x = random(len(special) + 1, 128 * len(special), dtype=torch.float32) * sizes
    x[0] = 0
    for index, value in enumerate(special):
        x[index + 1, 128 * index + 5] = value
        x[index + 1, :128] = value  # a whole tile of it
    for dtype, block, turned in ((E4M3, (1, 128), False), (E5M2, (128, 128), True), (E5M2, (1, None), True)):
        each = x.t() if turned else x
        assert_same_bits(quantise(each, dtype, block), scaling.quantise_own(each, dtype, block), f"{dtype}, {block}")
    found, expected = (function(x, E4M3, (1, 32), power_of_two=True) for function in (quantise, scaling.quantise_own))
    assert_same_bits(found, expected, "powers of two")
    tops = torch.tensor([[448.0, 449.0, 224.0, 447.0]]).t().contiguous().to(DEVICE)  # scales 1, 2, 0.5, 1
    assert quantise(tops, E4M3, (1, 32), power_of_two=True).scales.flatten().tolist() == [1.0, 2.0, 0.5, 1.0]


def test_special_numbers():
    check_special_numbers()


@pytest.mark.parametrize("dtype", FORMATS.values(), ids=str)
def test_every_number_of_16_bits(dtype, monkeypatch):
    """All that is halfway between two numbers is among them, too; and, with float32, what is just beside it."""
    monkeypatch.setattr(kernel, "tile_sizes", lambda x, block: {"ROWS": 128, "COLUMNS": 512, "num_warps": 32})
    ones = torch.ones(1, 1, device=DEVICE)
    half, short = (torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(each) for each in NARROW)
    finite = short[short.isfinite()].float()
    beside = [torch.nextafter(finite, torch.full_like(finite, end)) for end in (torch.inf, -torch.inf)]
    for x in (half, short, torch.cat(beside)):
        x = x.view(-1, 512)
        assert_same_bits(quantise(x, dtype, (None, None), ones), scaling.quantise(x, dtype, (None, None), ones))


def test_numbers_by_hand():
    """e4m3 has 8, 9, ... 15, 16, 18, 20: halfway it is the one with an even last digit. Its least number is 2^-9."""
    values = [
        16.0,
        17.0,
        19.0,
        17.01,
        -15.5,
        448.0,
        1e9,
        2.0**-9,
        2.0**-10,
        1.01 * 2.0**-10,
        1.5 * 2.0**-9,
        0.9 * 2.0**-6,
    ]
    expected = [16.0, 16.0, 20.0, 18.0, -16.0, 448.0, 448.0, 2.0**-9, 0.0, 2.0**-9, 2.0**-8, 7 * 2.0**-9]
    x, ones = torch.tensor([values], device=DEVICE), torch.ones(1, 1, device=DEVICE)
    assert quantise(x, E4M3, (None, None), ones).numbers.float().flatten().tolist() == expected


def test_scales_lie_as_products_read_them():
    """So that no copy is made on the way."""
    for block, rows in (((1, 128), 256), ((128, 128), 512)):
        narrow = quantise(random(rows, 512, dtype=torch.bfloat16), E4M3, block)
        taken = scales_in_order(narrow)
        assert taken.data_ptr() == narrow.scales.data_ptr()
        assert torch.equal(taken, narrow.scales if block[0] == 1 else narrow.scales.t())


class AnyGrid:
    """A kernel that is launched as Triton's are."""

    def __init__(self, launch):
        self.launch = launch

    def __getitem__(self, grid):
        return self.launch


def layer_on_a_gpu(recipe: str, in_kernels: bool) -> list[tuple[str, int]]:
    """The operations, and bytes of each, of one layer's three products: 4,096 tokens, 2,048 x 8,192."""
    x, weight, dy = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((1, 4096, 2048), (8192, 2048), (1, 4096, 8192))
    )
    products, launched = Products(recipe, E4M3, in_kernels=in_kernels), []

    def launch(x, numbers, scales, *rest, **sizes):
        launched.append(("quantise", x.nbytes + numbers.nbytes + scales.nbytes))

    available = mock.patch.object(linear, "_runs", return_value=True)
    with available, mock.patch.object(kernel, "_quantise_kernel", AnyGrid(launch)):
        with BytesMoved() as moved:
            products.output(x, weight), products.input_gradient(dy, weight), products.weight_gradient(dy, x)
    return launched + [call for call in moved.calls if call[0] != "promote_types"]  # which is none


@pytest.mark.parametrize("recipe, eager", [("tile", (118, 9.2)), ("row", (108, 7.8))])
def test_operations_of_a_layer(recipe, eager):
    """Six casts and three products. Nothing is copied, padded, or turned in 16 bits."""
    calls = layer_on_a_gpu(recipe, in_kernels=False)
    assert (len(calls), round(sum(size for _, size in calls) / 1e9, 1)) == eager
    calls = layer_on_a_gpu(recipe, in_kernels=True)
    assert [name for name, _ in calls] == ["quantise"] * 6 + ["_scaled_mm_v2"] * 3
    operands = 2 * (4096 * 2048 + 2048 * 8192 + 4096 * 8192)  # each of the three is in two products
    results = 2 * (4096 * 8192 + 4096 * 2048) + 4 * 2048 * 8192
    scales = sum(size for _, size in calls) - operands * (3 + 1) - results
    assert 0 < scales < 0.05 * operands


@on_cpu  # counts launches of the interpreter
@pytest.mark.parametrize("recipe", ["tensor", "row", "tile"])
def test_products_take_it(recipe):
    """Six operands of a layer's three products: one launch each, and the same results."""
    x, weight, dy = (random(*shape, dtype=torch.bfloat16) for shape in ((2, 70, 144), (160, 144), (2, 70, 160)))

    def three(in_kernels: bool) -> list[torch.Tensor]:
        products = Products(recipe, E5M2, in_kernels=in_kernels)
        return [products.output(x, weight), products.input_gradient(dy, weight), products.weight_gradient(dy, x)]

    expected = three(False)
    with launches() as counted, mock.patch.object(linear, "quantise", side_effect=AssertionError("eager")):
        found = three(True)
    assert counted == {"quantise._quantise_kernel": 6}
    assert all(map(torch.equal, found, expected))
