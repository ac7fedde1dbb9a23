"""Kernels compute and add up in float32: a narrow result is rounded where it is stored, and nowhere else.

In float16, since Triton's interpreter cuts bfloat16 off instead of rounding it. Errors are in units in the last place
of the exact result: rounding once costs at most 0.5 of them, or 0.29 on average (the root of 1/12).
"""

from functools import partial

import pytest
import torch

from step08_5d.kernels import flash_attention_backward as backward
from step08_5d.kernels import rms_norm, swiglu
from tests.mechanisms.step08.kernels.case import Maker
from tests.mechanisms.step08.kernels.cases import KERNELS
from tests.mechanisms.step08.kernels.compare import needs_triton, on_cpu, random, results, use_tiles, wide
from tests.mechanisms.step08.kernels.test_mutants import mutant_of

pytestmark = needs_triton
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
    q, k, v, gradient = (random(1, 1, 160, 16, dtype=torch.float16, seed=seed) for seed in range(4))
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


CHECKS = {backward: check_attention, rms_norm: partial(check_elementwise, "rms_norm")}
CHECKS[swiglu] = partial(check_elementwise, "swiglu")


@pytest.fixture(autouse=True)
def many_tiles(monkeypatch):
    use_tiles(monkeypatch, 16, 16)


@pytest.mark.parametrize("module", CHECKS, ids=lambda module: module.__name__.split(".")[-1])
def test_results_are_rounded_once(module):
    CHECKS[module]()


@on_cpu  # a compiled kernel keeps the functions that it was compiled with
@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_intermediate_result_is_rejected(name, tmp_path):
    kernel, wide, narrow = NARROW[name]
    module = next(each for each in CHECKS if each.__name__ == kernel.fn.__module__)
    with mutant_of(kernel, wide, f"{wide}.to({narrow}).to(WIDE)", tmp_path):
        with pytest.raises(AssertionError, match="units"):
            CHECKS[module]()
