"""Numbers in FP8: scales, products, experts, and moments in bfloat16."""

import itertools

import pytest
import torch
from torch import nn

from common.parameter import ParameterSpec
from step07_expert_parallel.experts import Counts
from step08_5d.narrow_numbers import scaling, sketch
from step08_5d.narrow_numbers.experiments import formats, recipes
from step08_5d.narrow_numbers.experts import ExpertProducts
from step08_5d.narrow_numbers.linear import FORMATS, Products
from step08_5d.narrow_numbers.moments import MOMENTS, NarrowMoments
from step08_5d.narrow_numbers.scaling import block_of, largest_of, quantise_now, scales_for

E4M3, E5M2 = FORMATS.values()
RECIPES = "naive", "tensor", "row", "tile", "mx"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


# ---- scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe, dtype, weight", [*itertools.product(RECIPES[1:], (E4M3, E5M2), (False, True))])
def test_every_block_fills_its_format(recipe, dtype, weight):
    """The largest number of each block, also of the last ones, which are smaller, comes to the end of the format."""
    x = normal(200, 300) * torch.logspace(-12, 9, 300)
    narrow = quantise_now(x, dtype, recipe, weight)
    filled = largest_of(narrow.numbers.float(), block_of(recipe, weight)) / torch.finfo(dtype).max
    assert filled.shape == narrow.scales.shape
    assert (filled <= 1).all() and (filled > (0.49 if recipe == "mx" else 0.99)).all()
    if recipe == "mx":
        assert (narrow.scales.log2() == narrow.scales.log2().round()).all()
    step = torch.finfo(dtype).eps / 2 + 1e-6  # of numbers that are not subnormal
    visible = narrow.numbers.float().abs() >= torch.finfo(dtype).smallest_normal
    assert (((narrow.wide() - x) / narrow.wide()).abs()[visible] <= step).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_equal_rows(recipe):
    x = torch.zeros(130, 130)
    assert torch.equal(quantise_now(x, E4M3, recipe).wide(), x)
    x[3], x[129] = 7.0, -7.0
    wide = quantise_now(x, E4M3, recipe).wide()
    assert relative(wide, x) < 1e-6 and not wide[x == 0].any()  # 7 is a number of the format, scaled or not
    tiny = torch.full((2, 40), 1e-44)  # smaller than the smallest scale times the smallest number
    assert torch.isfinite(quantise_now(tiny, E4M3, recipe).wide()).all()


@pytest.mark.parametrize("recipe, value", [*itertools.product(RECIPES, (torch.inf, -torch.inf, torch.nan))])
def test_what_is_not_finite_is_noticed(recipe, value):
    x = normal(4, 256)
    x[1, 200] = value
    assert quantise_now(x, E4M3, recipe).wide()[1, 200].isnan()


def check_cast() -> None:
    """What exceeds a format becomes its largest number; a scale of earlier steps, or none, may let it happen."""
    for dtype in FORMATS.values():
        top = torch.finfo(dtype).max
        assert scaling.cast(torch.tensor([1.2 * top, -1e9, 1.0]), dtype).tolist() == [top, -top, 1.0], dtype
        assert scaling.cast(torch.tensor(torch.inf), dtype).isnan()


def test_casts_saturate():
    check_cast()


def test_powers_of_two():
    largest = torch.tensor([448.0, 449.0, 224.0, 448 * 2.0**-20, 1e-45])
    assert scales_for(largest, E4M3, power_of_two=True)[:4].tolist() == [1.0, 2.0, 0.5, 2.0**-20]


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe, widths", [*itertools.product(RECIPES, ((37, 50, 3), (128, 160, 2), (8, 300, 1)))])
def test_products_stay_near_exact_ones(recipe, widths):
    """Also with widths that are no multiple of 16 or 128, and with sequences that do not fill a block."""
    tokens, width, batch = widths
    x, weight, dy = normal(batch, tokens, width), normal(40, width, seed=1), normal(batch, tokens, 40, seed=2)
    for gradients, bound in ((E4M3, 0.04), (E5M2, 0.065)):
        products = Products(recipe, gradients)
        assert relative(products.output(x, weight), x @ weight.t()) < 0.04
        assert relative(products.input_gradient(dy, weight), dy @ weight) < bound
        assert relative(products.weight_gradient(dy, x), dy.flatten(0, 1).t() @ x.flatten(0, 1)) < bound


def test_blocks_of_tokens_end_with_their_sequence():
    """What a sequence adds to a weight's gradient does not depend on the sequences beside it."""
    x, dy, products = normal(3, 100, 64), normal(3, 100, 32, seed=1), Products("tile", E4M3)
    alone = sum(products.weight_gradient(dy[i : i + 1], x[i : i + 1]) for i in range(3))
    assert relative(products.weight_gradient(dy, x), alone) < 1e-6


def check_weight_gradient() -> None:
    """In a bfloat16 run too it is added up in float32 and never rounded."""
    x, dy = normal(2, 128, 64).bfloat16(), normal(2, 128, 32, seed=1).bfloat16()
    for recipe in RECIPES:
        found = Products(recipe, E4M3).weight_gradient(dy, x)
        left, right = (quantise_now(each.flatten(0, 1).t().float(), E4M3, recipe) for each in (dy, x))
        exact = left.wide().double() @ right.wide().double().t()
        assert found.dtype == torch.float32 and relative(found, exact) < 1e-6, recipe


def test_weight_gradients_are_float32():
    check_weight_gradient()


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_are_linear_layers(recipe):
    """Each one multiplies its rows as if it were alone; one without rows has no gradient."""
    sizes = [5, 0, 40]
    x, dy, weight = normal(45, 32), normal(45, 48, seed=1), nn.Parameter(normal(3, 48, 32, seed=2))
    counts = Counts(torch.tensor(sizes))
    each = [Products(recipe, E4M3, blocks_of_tokens=False) for _ in sizes]
    experts = ExpertProducts(each)
    y, dx = experts.output(x, weight, counts), experts.input_gradient(dy, weight, counts)
    dw, add = torch.full_like(weight, torch.nan), experts.weight_gradient(dy, x, counts)
    add(dw, True)
    add(twice := dw.clone(), False)
    assert not dw[1].any() and torch.equal(twice, 2 * dw)
    for index, rows in ((0, slice(0, 5)), (2, slice(5, 45))):
        assert torch.equal(y[rows], each[0].output(x[rows], weight[index]))
        assert torch.equal(dx[rows], each[0].input_gradient(dy[rows], weight[index]))
        assert torch.equal(dw[index], each[0].weight_gradient(dy[rows], x[rows]))
        assert relative(dw[index], dy[rows].t() @ x[rows]) < 0.05


def test_the_sketch_is_a_layer_of_tiles():
    x, weight, dy = normal(256, 256).bfloat16(), normal(128, 256, seed=1), normal(256, 128, seed=2).bfloat16()
    x.requires_grad_(), weight.requires_grad_()
    y, products = sketch.Linear8.apply(x, weight), Products("tile", E4M3)
    y.backward(dy)
    assert relative(y, products.output(x.detach(), weight.detach())) < 1e-3
    assert relative(x.grad, products.input_gradient(dy, weight.detach())) < 1e-3
    assert relative(weight.grad, products.weight_gradient(dy, x.detach())) < 1e-6


# ---- formats, bytes, moments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", formats.FORMATS)
def test_formats_are_those_of_torch(name):
    dtypes = {"e5m2": E5M2, "e4m3": E4M3} | {each: getattr(torch, each) for each in ("float32", "bfloat16", "float16")}
    each = formats.FORMATS[name]
    if name in dtypes:
        info = torch.finfo(dtypes[name])
        assert (each.largest, each.smallest_normal) == (info.max, info.smallest_normal)
        assert each.between_one_and_two == round(1 / info.eps) - 1
    if each.mantissa < 4:
        assert len(formats.numbers(each)) == {"e5m2": 124, "e4m3": 127, "e2m1": 8}[name]
    if name in FORMATS:
        x = normal(10_000).double() * torch.logspace(-6, 2, 10_000, dtype=torch.float64)
        x[:127] = formats.numbers(each)[:124].repeat(2)[:127] * 1.0625  # halfway between two numbers, some of them
        assert torch.equal(formats.round_to(x, each), scaling.cast(x, dtypes[name]).double())


def test_stochastic_rounding_is_right_on_average():
    x = torch.tensor([0.1, 0.75, 2.3, 5.0, -4.4, 6.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    mean = (
        sum(formats.round_to(x, formats.FORMATS["e2m1"], torch.rand(6, generator=generator)) for _ in range(4000))
        / 4000
    )
    assert (mean - x).abs().max() < 0.04


def test_bytes_of_recipes():
    totals = [each.total for each in (recipes.PUBLISHED | recipes.OURS).values()]
    assert totals == [20, 16, 16, 9, 15, 10, 18, 18, 14]


def test_moments_in_bfloat16():
    """The update is torch's, from moments that are rounded after each step; they take half the bytes."""
    weight = nn.Parameter(normal(64, 32))
    weight.spec = ParameterSpec("w", (64, 32), ((0, 64), (0, 32)), 0.02)
    ours = NarrowMoments([weight], torch.float32, weight_decay=0.1)
    other = nn.Parameter(weight.detach().clone())
    theirs = torch.optim.AdamW([other], lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    for step in range(4):
        gradient = normal(64, 32, seed=step)
        other.grad = 0.5 * gradient
        theirs.step()
        ours.step([gradient.clone()], 1e-3, torch.tensor(0.5))
        state = ours.state_of(ours.masters[0])
        for key in MOMENTS:
            assert state[key].dtype == torch.bfloat16
            assert relative(state[key], theirs.state[other][key]) < 2**-8
            theirs.state[other][key].copy_(state[key])
    assert relative(ours.masters[0], other) < 1e-6
    with pytest.raises(ValueError, match="^moments in BF16 are for training in bfloat16 or float32"):
        ours.step([gradient], 1e-3, skip=torch.ones(()))
