"""Known-wrong kernels: something in the source is replaced, and the test of that kernel must notice."""

import importlib
import inspect
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch

from step08_5d.kernels import adamw as update
from step08_5d.kernels import (
    cross_entropy,
    flash_attention,
    grouped_matmul,
    merge,
    quantise,
    rms_norm,
    rotary,
    swiglu,
    tiles,
)
from step08_5d.kernels import flash_attention_backward as backward
from step08_5d.kernels import linear_cross_entropy as head
from tests.harness.narrow_operations import NarrowOperations
from tests.mechanisms.step08.kernels import test_kernels, test_narrow_kernel, test_offsets
from tests.mechanisms.step08.kernels.case import Maker
from tests.mechanisms.step08.kernels.cases import BLOCKS, KERNELS
from tests.mechanisms.step08.kernels.compare import (
    HAS_TRITON,
    assert_same,
    needs_triton,
    on_cpu,
    random,
    results,
    use_tiles,
    wide,
)

pytestmark = needs_triton
# Kernel, what it has, what it has in place of that
MUTANTS = {
    # attention: the online softmax, its mask and its gradient
    "online softmax without rescaling": (flash_attention._rescaling, "before - now", "now - now"),
    "a token does not see itself": (flash_attention.visible, "columns <= rows", "columns < rows"),
    "a token sees the next one": (flash_attention.visible, "columns <= rows", "columns <= rows + 1"),
    "keys that do not exist": (flash_attention.visible, "columns < keys", "columns < keys + 3"),
    "no mask where it is needed": (flash_attention.keys_for, "(first + 1)", "(first + ROWS)"),
    "the last keys skipped": (flash_attention.keys_for, "first + ROWS, keys", "first + ROWS - COLUMNS, keys"),
    "the first queries skipped": (backward._key_gradient_kernel, "start // ROWS", "(start + ROWS) // ROWS"),
    "no mask in the backward": (backward._key_gradient_kernel, "first < unmasked", "first < begin"),
    "gradient of one query head": (
        backward._key_gradient_kernel,
        "(first_head, end_head)",
        "(first_head, first_head + 1)",
    ),
    "heads of the next group": (
        backward._key_gradient_kernel,
        "tl.minimum((part + 1) * share, group)",
        "(part + 1) * share",
    ),
    "gradient of one part": (backward.attend_backward, "parts_of_it.sum(2)", "parts_of_it[:, :, 0]"),
    "softmax's gradient lost": (backward._query_gradient_kernel, "(dp - deltas[:, None])", "dp"),
    "gradient not scaled": (backward._query_gradient_kernel, "sums * SCALE", "sums"),
    "what was merged keeps its weight": (merge._merge_kernel, "kept * tl.exp(before - total)[:, None]", "kept"),
    "total of one block": (merge._merge_kernel, "tl.store(lse_so_far, total", "tl.store(lse_so_far, added"),
    # the head and the loss
    "online sum without rescaling": (cross_entropy.rescaling, "before - now", "now - now"),
    "padding has a probability": (cross_entropy._statistics_kernel, "column < columns", "column < columns + 4"),
    "padding has a gradient": (cross_entropy._gradient_kernel, "column < columns", "column < width"),
    "target not subtracted": (cross_entropy._gradient_kernel, "column == target", "column < 0"),
    "gradient of the last chunk": (head.add_product, "total.addmm_(a.T, b, beta=kept)", "total.copy_(a.T @ b)"),
    "weight's gradient not scaled": (head._LinearCrossEntropy, "dw, gradient,", "dw, gradient / gradient,"),
    # the small operations
    "gradient past the residual": (rms_norm._backward_kernel, "g += stream", "g = stream"),
    "residual's gradient lost": (rms_norm._backward_kernel, "g += stream", "g += 0 * stream"),
    "root's gradient lost": (rms_norm._backward_kernel, "(g - y * mean)", "g"),
    "partial sums in bfloat16": (rms_norm._AddRMSNorm, "dtype=at_least_float32(total.dtype)", "dtype=total.dtype"),
    "weight's gradient of the last rows": (rms_norm._backward_kernel, "d_weight += ", "d_weight = "),
    "turned on instead of back": (rotary._rotary_kernel, "s = -s", "s = s"),
    "gate's gradient lost": (swiglu._backward_kernel, "(d * u * s", "(0 * s"),
    "slope of the sigmoid lost": (swiglu._backward_kernel, "(1 + g * (1 - s))).to", "1).to"),
    # experts
    "partial tiles left out": (grouped_matmul.find_tile, "(count + ROWS - 1)", "count"),
    "one tile too many": (grouped_matmul.find_tile, "tl.cumsum(tiles, 0) <= number", "tl.cumsum(tiles, 0) < number"),
    "rows of all experts before": (grouped_matmul._multiply_transposed_kernel, "range(end - ", "range(0 * "),
    # FP8
    "largest of the last columns": (quantise._quantise_kernel, "tl.maximum(largest, tl", "(tl"),
    "largest of a row of a tile": (quantise._quantise_kernel, "largest = tl.max(largest, 0) +", "largest +="),
    "scale of the tiles before": (quantise._quantise_kernel, "part * scale_strides[1]", "0 * scale_strides[1]"),
    "scale of zero": (quantise.scale_for, "tl.where(scale < TINY, TINY, scale)", "scale"),
    "power of two rounded down": (quantise.scale_for, "+ MANTISSA) &", ") &"),
    "power of two rounded up twice": (quantise.scale_for, "+ MANTISSA) &", "+ MANTISSA + 1) &"),
    "infinity saturates": (quantise.bits_in_8, "tl.where(finite, number | sign, 0x7F)", "number | sign"),
    "numbers are not saturated": (quantise.bits_in_8, "tl.minimum(tl.maximum(quotient, -TOP), TOP)", "quotient"),
    "signs lost": (quantise.bits_in_8, "number | sign", "number"),
    "subnormal numbers are normal": (quantise.bits_in_8, "(127 + LEAST) << 23)", "0)"),
    "digits cut off": (quantise.bits_in_8, "size + base", "size * 0.96875 + base"),
    "added to no sum": (grouped_matmul._multiply_transposed_kernel, "if ADDS:", "if not ADDS:"),
    "one sum for all rows": (grouped_matmul._multiply_transposed_kernel, "load_tile(out, width,", "load_tile(out, 0,"),
    # the update
    "first moment not corrected": (update._adamw_kernel, "tl.exp(count * LOG_BETA1)", "0 * count"),
    "second moment not corrected": (update._adamw_kernel, "tl.exp(count * LOG_BETA2)", "0 * count"),
    "decay without the learning rate": (update._adamw_kernel, "rate * DECAY", "DECAY"),
    "clip factor lost": (update._adamw_kernel, "tl.load(factor).to(WIDE)", "1"),
    "overflow not skipped": (update._adamw_kernel, "tl.load(skip) != 0", "tl.load(skip) < 0"),
    "update in the narrow copy lost": (update._adamw_kernel, "w.to(copy", "(w + m).to(copy"),
}


CHECKS = {  # what the kernels of a module are compared with, in float64
    flash_attention: [("block of attention", BLOCKS[1]), ("block of attention", BLOCKS[3])],
    backward: [
        *(("block of attention", BLOCKS[each]) for each in (1, 3)),
        ("attention on a rank of tp 4", (1, 10, 2, 16, 16)),  # five heads, of which three programs have 2, 2 and 1
    ],
    merge: [("merge", (50,))],
    cross_entropy: [("row statistics and gradient of the loss", (33,))],
    head: [("linear_cross_entropy", (2, 7, 12, 29, False, 5))],
    rms_norm: [("add_rms_norm", (1300, 12))],  # more rows than a program handles at once
    rotary: [("rotary", (2, 4, 2, 5, 8))],
    swiglu: [("swiglu", (2, 3, 7))],
    quantise: [("quantise, rows", KERNELS["quantise, rows"].sizes[1])]
    + [("quantise, tiles of a weight", KERNELS["quantise, tiles of a weight"].sizes[0])]
    + [("quantise, e5m2 and given scales", size) for size in KERNELS["quantise, e5m2 and given scales"].sizes[2:3]],
    grouped_matmul: [
        ("grouped_matmul", ([5, 20, 16], 16, 16)),
        ("grouped_matmul of gradients", ([5, 20, 16], 16, 16, True)),
        ("grouped_matmul added to sums", ([5, 20, 16], 16, 16)),
    ],
    update: [],
}


def check(module) -> None:
    for name, size in CHECKS[module]:
        assert_same(KERNELS[name].case(Maker(torch.float64), *size))
    if module is update:
        test_kernels.test_same_as_step_1(torch.bfloat16, update.adamw)
    if module is quantise:
        test_narrow_kernel.check_special_numbers()
    if module is rms_norm:
        case = KERNELS["rms_norm"].case(Maker(torch.bfloat16), 1300, 12)
        with NarrowOperations() as operations:  # outside of the kernels
            results(case, case.ours)
        assert "sum" not in set().union(*operations.found.values()), "partial sums are added up in 16 bits"


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    use_tiles(monkeypatch)


@pytest.mark.parametrize("module", CHECKS, ids=lambda module: module.__name__.split(".")[-1])
def test_right_kernels_pass(module):
    check(module)


def mutant_of(kernel, right: str, wrong: str, folder, which: int = 0):
    """Replace one occurrence of `right` in a kernel, for as long as the returned context is open."""
    function = getattr(kernel, "fn", kernel)
    module, parts = importlib.import_module(function.__module__), inspect.getsource(function).split(right)
    source = right.join(parts[: which + 1]) + wrong + right.join(parts[which + 1 :])
    path, made = folder / "mutant.py", {}  # a file, since Triton reads the source once more
    path.write_text(source)
    exec(compile(source, path, "exec"), vars(module), made)
    stack = ExitStack()
    for each in (*CHECKS, tiles):  # that have imported it
        if vars(each).get(function.__name__) is kernel:
            stack.enter_context(mock.patch.object(each, function.__name__, made[function.__name__]))
    return stack


@on_cpu  # a compiled kernel keeps the functions that it was compiled with
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")  # of mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    kernel, right, wrong = MUTANTS[name]
    assert inspect.getsource(getattr(kernel, "fn", kernel)).count(right) == 1
    module = importlib.import_module(getattr(kernel, "fn", kernel).__module__)
    with mutant_of(kernel, right, wrong, tmp_path), pytest.raises(AssertionError):
        check(module)


def wide_offsets() -> list[tuple]:
    """Every kernel that computes with 64 bits, as often as it says so."""
    functions = {each: None for module in (*CHECKS, tiles) for each in vars(module).values() if hasattr(each, "fn")}
    return [(each, i) for each in functions for i in range(inspect.getsource(each.fn).count("tl.int64"))]


@on_cpu  # a compiled kernel keeps the functions that it was compiled with
@pytest.mark.parametrize("kernel, which", wide_offsets() if HAS_TRITON else [])
def test_an_offset_of_32_bits_is_rejected(kernel, which, tmp_path):
    module = importlib.import_module(kernel.fn.__module__)
    cases = sum(test_offsets.CASES.values(), []) if module is tiles else test_offsets.CASES[module]
    with mutant_of(kernel, "tl.int64", "tl.int32", tmp_path, which), pytest.raises(AssertionError):
        for case in cases:
            test_offsets.check(case)


# ---- sums in float32: a narrow result is rounded where it is stored, and nowhere else --------------------------------

# Kernel, what it has in float32, and in which type it is narrow then
NARROW = {
    "dq added up in 16 bits": (backward._query_gradient_kernel, "k_tile, sums)", "k_tile.dtype"),
    "dk added up in 16 bits": (backward._key_gradient_kernel, "q_tile, dk_sums)", "q_tile.dtype"),
    "dv added up in 16 bits": (backward._key_gradient_kernel, "d_out, dv_sums)", "d_out.dtype"),
    "sum of squares in 16 bits": (rms_norm._forward_kernel, "keep_dims=True)", "normed.dtype.element_ty"),
    "inverse root in 16 bits": (rms_norm._backward_kernel, "y *= inverse_rms", "dx.dtype.element_ty"),
    "sigmoid in 16 bits": (swiglu._backward_kernel, "s = 1 / (1 + tl.exp(-g))", "d_up.dtype.element_ty"),
}


def units(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Differences in units in the last place of float16, normal or not, of the exact values in float64."""
    exponent = torch.frexp(exact).exponent.clamp(min=-13)  # 2^-14 is the least normal number
    return (found.double() - exact) / 2.0 ** (exponent - 11)


def check_attention() -> None:
    """The products' operands are in float16, and so they are in the exact result; their sums are not."""
    q, k, v, gradient = (random(1, 1, 96, 16, dtype=torch.float16, seed=seed) for seed in range(4))
    out, lse = backward.attend(q, k, v, False)
    found = backward.attend_backward(gradient, q, k, v, out, lse, False)
    q, k, v, gradient, out = (each.double() for each in (q, k, v, gradient, out))
    p = (q @ k.mT / 4 - lse.double().unsqueeze(-1)).exp()
    ds = p * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True))
    p, ds = p.half().double(), ds.half().double()
    exact = ds @ k / 4, ds.mT @ q / 4, p.mT @ gradient
    for name, one, other in zip(("dq", "dk", "dv"), found, exact, strict=True):
        error = units(one, other).square().mean().sqrt().item()
        assert error < 0.4, f"{name}: {error} units on average"


def check_elementwise(name: str) -> None:
    case = KERNELS[name].case(Maker(torch.float16), 64, 100)
    exact, found = results(case, case.reference, wide), results(case, case.ours)
    count = 3 if name == "swiglu" else 2  # without the norm's weight, whose gradient is a sum of many rows
    for index, (one, other) in enumerate(zip(found[:count], exact)):
        error = units(one, other).abs().max().item()
        assert error < 0.51, f"tensor {index}: {error} units"


ROUNDED = {backward: check_attention, rms_norm: partial(check_elementwise, "rms_norm")}
ROUNDED[swiglu] = partial(check_elementwise, "swiglu")


@pytest.mark.parametrize("module", ROUNDED, ids=lambda module: module.__name__.split(".")[-1])
def test_results_are_rounded_once(module, monkeypatch):
    use_tiles(monkeypatch, 16, 16)
    ROUNDED[module]()


@on_cpu  # a compiled kernel keeps the functions that it was compiled with
@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_intermediate_result_is_rejected(name, tmp_path, monkeypatch):
    use_tiles(monkeypatch, 16, 16)
    kernel, wide, narrow = NARROW[name]
    module = next(each for each in ROUNDED if each.__name__ == kernel.fn.__module__)
    with mutant_of(kernel, wide, f"{wide}.to({narrow}).to(WIDE)", tmp_path):
        with pytest.raises(AssertionError, match="units"):
            ROUNDED[module]()
