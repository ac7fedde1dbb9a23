"""Every kernel against its formula: both directions, all types, odd sizes, strides; and more.

Those of attention and of the loss have more in test_attention.py and test_losses.py.
"""

import importlib
import pkgutil
import sys

import pytest
import torch
from torch import Tensor, nn

import step08_5d.kernels
from common.layers import at_least_float32
from common.model import silu_and_multiply
from common.parameter import attach_specs
from step01_single_gpu.mixed_precision import Optimizer
from step07_expert_parallel.experts import Counts
from step08_5d.kernels.adamw import adamw, adamw_reference
from step08_5d.kernels.grouped_matmul import multiply, multiply_transposed
from step08_5d.kernels.rms_norm import rms_norm, rms_norm_reference
from step08_5d.kernels.rotary import rotary
from step08_5d.kernels.swiglu import swiglu
from tests.harness.ranks import run_ranks
from tests.mechanisms.step08.kernels.case import DEVICE, Maker
from tests.mechanisms.step08.kernels.cases import ADAMW, EPS, KERNELS
from tests.mechanisms.step08.kernels.compare import (
    DTYPES,
    assert_same,
    difference,
    eager_bytes,
    needs_triton,
    outputs_and_gradients,
    random,
    results,
    use_tiles,
)

BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # in the sizes of real models, of any output or gradient


def sizes_and_types() -> list:
    """The first size of a kernel in all types, the others in float64; on a GPU one that fills no tile."""
    found = []
    for name, kernel in KERNELS.items():
        for index, size in enumerate(kernel.sizes):
            found += [pytest.param(name, size, dtype) for dtype in (DTYPES if index == 0 else DTYPES[:1])]
        if kernel.checked:
            found += [pytest.param(name, kernel.checked, dtype, marks=pytest.mark.gpu) for dtype in BOUNDS]
    return found


@needs_triton
@pytest.mark.parametrize("name, size, dtype", sizes_and_types(), ids=str)
def test_as_the_formula(name, size, dtype, monkeypatch):
    """On a GPU with real tiles also PyTorch's function, where we take that, since no CPU run calls it."""
    case = KERNELS[name].case(Maker(dtype), *size)
    if size != KERNELS[name].checked:
        use_tiles(monkeypatch)
        return assert_same(case)
    assert_same(case, bounds=BOUNDS)
    if case.pytorch and dtype == torch.bfloat16:  # what PyTorch multiplies in no other type
        assert_same(case, case.pytorch, BOUNDS)


def by_columns(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def slices(x: Tensor) -> Tensor:
    """As of a longer sequence, or of one linear layer for q, k and v."""
    return torch.cat((x, x), -1)[..., : x.shape[-1]]


def expanded(x: Tensor) -> Tensor:
    """As the gradient that a sum sends back."""
    return x[..., :1].expand_as(x)


@needs_triton
@pytest.mark.parametrize("name", ["add_rms_norm", "rotary", "swiglu", "block of attention"])
@pytest.mark.parametrize("layout", [by_columns, slices, expanded])
def test_strides(name, layout, monkeypatch):
    use_tiles(monkeypatch)
    case = KERNELS[name].case(Maker(torch.float64), *KERNELS[name].sizes[0])
    case.inputs = [layout(each) if each.dim() > 1 else each for each in case.inputs]
    case.slack = 100  # gradients of equal numbers are differences of near equals
    assert_same(case)


EAGER = {  # bytes per element of the first input (rotary: of q, as large as k): a size, forward and backward
    "rms_norm": ((64, 2048), [36, 96]),
    "add_rms_norm": ((64, 2048), [42, 102]),
    "rotary": ((1, 32, 32, 64, 16), [72, 92]),
    "swiglu": ((64, 64), [10, 18]),
    "adamw": ((4096, False), [118, 0]),
    "quantise, tiles": ((128, 2048, (1, 128)), [75, 0]),
}


@pytest.mark.parametrize("name", EAGER)
def test_eager_bytes(name):
    size, expected = EAGER[name]
    assert [round(each) for each in eager_bytes(KERNELS[name].case(Maker(torch.bfloat16), *size))] == expected


@needs_triton
@pytest.mark.parametrize("used", [0, 1])
def test_outputs_that_nobody_used(used):
    case = KERNELS["add_rms_norm"].case(Maker(torch.float64), 6, 5)
    ours, reference, weight = case.ours, case.reference, case.inputs.pop()
    case.ours = lambda x, residual: ours(x, residual, weight)[used]
    case.reference = lambda x, residual: reference(x, residual, weight.double())[used]
    assert_same(case)


@needs_triton
def test_the_gradient_of_the_weight_is_the_same_in_every_run():
    case = KERNELS["rms_norm"].case(Maker(torch.float32), 1060, 20)
    assert all(map(torch.equal, results(case, case.ours), results(case, case.ours)))


@needs_triton
def test_whoever_takes_the_gradient_of_the_weight_gets_it_unrounded():
    x, weight = random(300, 20, dtype=torch.bfloat16).requires_grad_(), torch.ones(20, device=DEVICE).bfloat16()
    taken, gradient, exact = [], random(300, 20, dtype=torch.bfloat16, seed=1), weight.double().requires_grad_()
    weight.requires_grad_().gradient_sink = lambda owner, dy, x, multiply: taken.append((owner, multiply(dy, x)))
    rms_norm(x, weight, EPS).backward(gradient)
    rms_norm_reference(x.detach().double(), exact, EPS).backward(gradient.double())
    ((owner, found),) = taken
    assert owner is weight and weight.grad is None and x.grad is not None
    assert found.dtype == torch.float32 and difference(found, exact.grad) < 1e-6


@needs_triton
def test_the_heads_of_a_token_stay_side_by_side():
    case = KERNELS["rotary"].case(Maker(torch.float64), 2, 4, 2, 5, 8)
    assert rotary(*case.inputs, *case.settings)[0].stride() == case.inputs[0].stride()


@needs_triton
@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter: exp(1e4) is inf, as it should be
def test_extreme_gates():
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=DEVICE, requires_grad=True)
    out = swiglu(gate, torch.ones_like(gate))
    (d_gate,) = torch.autograd.grad(out.sum(), gate)
    assert out.tolist() == pytest.approx([0, 0, 0, 100, 1e4]) and d_gate.tolist() == pytest.approx([0, 0, 0.5, 1, 1])


@needs_triton
@pytest.mark.gpu
def test_offsets_beyond_int32():
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    x = torch.ones((2**20 + 1, 2048), dtype=torch.bfloat16, device=DEVICE)
    x[-1] = random(2048)
    weight = torch.ones(2048, dtype=torch.bfloat16, device=DEVICE)
    normed, dx = outputs_and_gradients(
        lambda x: rms_norm(x, weight, EPS), [x.requires_grad_()], dtype=torch.bfloat16
    )  # normed does not depend on the length of x, so its gradient is perpendicular to x
    assert difference(normed[-1:], rms_norm_reference(x.detach()[-1:], weight, EPS)) < 8e-3
    assert (dx[-1].double() @ x[-1].double()).abs() < 0.1 * dx[-1].double().norm() * x[-1].double().norm()
    out, end = swiglu(x.detach(), x.detach()), x.detach()[-1:].double()
    assert difference(out[-1:], silu_and_multiply(end, end)) < 8e-3


@needs_triton
def test_the_host_waits_for_no_counts(monkeypatch):
    use_tiles(monkeypatch)
    counts = Counts(torch.tensor([5, 54], device=DEVICE), lambda counts: pytest.fail("the host waited for the device"))
    multiply_transposed(multiply(random(59, 8), random(2, 8, 8), counts), random(59, 8), counts)


@needs_triton
def test_sums_are_not_rounded_on_the_way():
    """A large number, and then many small ones: added to it in bfloat16, they would all be lost."""
    x = torch.full((16, 512), 0.05, device=DEVICE, dtype=torch.bfloat16)
    x[:, 0] = 256
    ones, exact = torch.ones(1, 512, 16, device=DEVICE, dtype=torch.bfloat16), x.double().sum(1)[:, None].expand(16, 16)
    assert difference(multiply(x, ones, Counts(torch.tensor([16], device=DEVICE))), exact) < 8e-3
    counts = Counts(torch.tensor([512], device=DEVICE))
    assert difference(multiply_transposed(x.T.contiguous(), ones[0], counts)[0], exact) < 8e-3


@needs_triton
@pytest.mark.parametrize("function", [adamw, adamw_reference])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_same_as_step_1(dtype, function):
    """Four updates of a matrix, of which the second is skipped since its gradient overflows."""
    model, wide = nn.Linear(29, 37, bias=False, device=DEVICE, dtype=dtype), at_least_float32(dtype)
    attach_specs(model, {"": 0.02})
    model.weight.data.copy_(random(37, 29))
    optimizer = Optimizer([model.weight], dtype, weight_decay=0.1)
    (master,), (weight,) = optimizer.masters, optimizer.parameters
    ours = {"master": master.detach().clone()}
    ours |= {name: torch.zeros_like(ours["master"]) for name in ("exp_avg", "exp_avg_sq")}
    ours["copy"], step = weight.detach().clone() if dtype != wide else None, torch.tensor(0.0, device=DEVICE)
    for index in range(4):
        gradient = random(37, 29, seed=10 + index).to(wide) * 10 ** (index - 2)
        scalars = [torch.tensor(each, device=DEVICE, dtype=wide) for each in (1e-2 / (1 + index), 0.3 + index)]
        skip = None if dtype == torch.float64 else torch.tensor(float(index == 1), device=DEVICE)
        if skip is not None and skip:
            gradient[3] = torch.nan
        step += 1 if skip is None else 1 - skip
        settings = {"step": step, "lr": scalars[0], "factor": scalars[1], "skip": skip}
        function(**ours, gradient=gradient.clone(), **settings, **ADAMW)
        optimizer.step([gradient], scalars[0].item(), scalars[1], skip)
        state, tolerance = optimizer.state[master], 1e-14 if dtype == torch.float64 else 1e-6
        assert difference(ours["master"], master) < tolerance
        assert all(difference(ours[name], state[name]) < tolerance for name in ("exp_avg", "exp_avg_sq"))
        assert state["step"] == step
        if ours["copy"] is not None:  # it may differ by the last digit where the masters lie on either side of a middle
            assert difference(ours["copy"], weight) < 8e-3 and ours["copy"].dtype == dtype


def rank_without_triton() -> str:
    """Import every kernel file without Triton, and launch a kernel: the error's message."""
    for name in [name for name in sys.modules if name.startswith("step08_5d.kernels.")]:
        del sys.modules[name]
    sys.modules["triton"] = None
    names = [each.name for each in pkgutil.iter_modules(step08_5d.kernels.__path__)]
    modules = {name: importlib.import_module(f"step08_5d.kernels.{name}") for name in names}
    x, weight = torch.ones(2, 4), torch.ones(4)
    assert not modules["launching"].HAS_TRITON, "Triton is there"
    assert modules["rms_norm"].rms_norm_reference(x, weight, 0.0).equal(x), "the reference needs no Triton"
    try:
        modules["rms_norm"].rms_norm(x, weight, 0.0)
    except ImportError as error:
        return str(error)


def test_without_triton_only_the_launch_of_a_kernel_fails():
    (message,) = run_ranks(1, rank_without_triton)
    assert message.startswith("_forward_kernel is a Triton kernel, and Triton is not installed")
