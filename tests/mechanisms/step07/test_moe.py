"""The layer with experts against the formulas written out, on one process; and what balances their loads."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from step01_single_gpu.mixed_precision import LossScaler
from step05_pipeline.weight_gradients import defer_weight_gradients
from step07_expert_parallel import experts as module
from step07_expert_parallel.balancing import Balancing
from step07_expert_parallel.experts import Counts, Experts
from step07_expert_parallel.router import Router
from tests.harness.observing import mesh_of
from tests.mechanisms.step07.layers import CASES, configured, inputs_of, layer_of, written_out


def gradients_of(moe, x, loss) -> dict[str, torch.Tensor]:
    names, parameters = zip(*moe.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, (x, *parameters), allow_unused=True, materialize_grads=True)
    return dict(zip(("x", *names), found, strict=True))


def assert_close(found: dict, expected: dict, tolerance: float = 1e-12) -> None:
    """Relative differences ||a - b|| / ||b||; what is zero must be zero."""
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        assert (found[name] - theirs).norm() <= tolerance * theirs.norm(), name


@pytest.mark.parametrize("favourite", [None, 2])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_formulas(case, favourite):
    """Output, losses, gradients, loads and drops, also if all tokens choose the same expert. Products of experts and of
    shared experts can be put off; the router's small one is not.
    """
    config = configured(CASES[case])
    moe, x = layer_of(config), inputs_of(config)
    moe.router.bias += torch.linspace(0, 0.2, len(moe.router.bias))
    if favourite:
        moe.router.bias[favourite] += 100
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    out, auxiliary, load, dropped = written_out(moe, x)
    expected = {"out": out} | gradients_of(moe, x, (out * weights).sum() + auxiliary)
    found = {"out": moe(x)}
    router, names = moe.router, {parameter: name for name, parameter in moe.named_parameters()}
    assert router.load.sum() == 0, "counted in the backward, since recomputation repeats the forward"
    with defer_weight_gradients(moe.parameters()) as store:
        (found["out"] * weights).sum().backward()
    assert {names[weight] for weight, *_ in store} == {*names.values()} - {"router.weight"}
    found |= {"x": x.grad, "router.weight": router.weight.grad}
    with torch.no_grad():
        found |= {names[weight]: gradient for weight, gradient in store.compute()}
    assert_close(found, expected)
    assert (router.load.tolist(), router.dropped.item()) == (load, dropped)
    assert router.auxiliary.item() == pytest.approx(auxiliary.item(), rel=1e-12)
    assert router.weight.grad.any(), "a gate that is always 1 could not be trained"
    assert ("capacity" in case) == (0 < dropped < sum(load)) and (not favourite or load[favourite] == 36)


def test_of_equal_scores_the_first_wins():
    scores = torch.zeros(1, 8, dtype=torch.float64)
    for flags in ("", "--expert-groups 4 --node-limit 2"):
        config = configured(f"--experts 8 --top-k 3 {flags}")
        router = Router(config, mesh_of(config))
        assert router.choose(scores).tolist() == [[0, 1, 2]]
        assert router.choose(scores.index_fill(1, torch.tensor(5), 1)).tolist() == [[5, 0, 1]]
    assert router.weigh(scores, torch.tensor([[0, 1, 2]])).isfinite().all(), "sigmoids may all be 0"


COUNTS = [4, 4, 4, 4], [0, 9, 0, 7], [0, 0, 16, 0], [0, 0, 0, 16], [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernel_and_loop_agree(dtype):
    torch.manual_seed(0)
    for counts, hidden in itertools.product(COUNTS, (8, 9)):  # for rows of odd lengths there is no kernel
        experts, x = Experts(4, hidden, 16).to(dtype), torch.randn(sum(counts), hidden, dtype=dtype, requires_grad=True)
        for parameter in experts.parameters():
            parameter.data.normal_()
        results = []
        with mock.patch.object(torch.nn.functional, "grouped_mm", wraps=torch.nn.functional.grouped_mm) as kernel:
            for has_kernel in (module._has_kernel, lambda *_: False):
                with mock.patch.object(module, "_has_kernel", has_kernel):
                    out = experts(x, Counts(torch.tensor(counts)))
                    gradients = torch.autograd.grad(out.sum(), (x, *experts.parameters()))  # an expanded gradient
                    results.append({str(index): each.float() for index, each in enumerate((out, *gradients))})
        assert kernel.call_count == (9 if hidden == 8 and any(counts) else 0)
        assert_close(*results, tolerance=1e-6 if dtype == torch.float32 else 1e-2)


class OnCuda(torch.Tensor):
    """Says that a GPU has it."""

    is_cuda = True


@pytest.mark.parametrize("capability, taken", [((8, 0), False), ((9, 0), True), ((10, 0), False)])
def test_pytorch_s_kernel_on_gpus(capability, taken):
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert module._has_kernel(torch.empty(4, 16, dtype=torch.bfloat16).as_subclass(OnCuda)) == taken
        assert not module._has_kernel(torch.empty(4, 16, dtype=torch.float16).as_subclass(OnCuda))


def test_biases_move_against_the_load():
    config = configured("--layers 3 --dense-layers 1 --experts 4 --balance bias --bias-rate 0.25 --dtype float32")
    mesh = mesh_of(config)
    router, other = Router(config, mesh), Router(config, mesh)
    mlps = {"0": None, "1": SimpleNamespace(router=router), "2": SimpleNamespace(router=other)}
    stage = SimpleNamespace(layers={index: SimpleNamespace(mlp=mlp) for index, mlp in mlps.items()})
    balancing = Balancing([stage], config, mesh, LossScaler(torch.float32))
    for load, skip, expected in (
        ((5, 3, 4, 4), None, [-0.25, 0.25, 0, 0]),
        ((0, 0, 0, 4), torch.tensor(1.0), [-0.25, 0.25, 0, 0]),  # a skipped step
        ((0, 0, 0, 4), torch.tensor(0.0), [0, 0.5, 0.25, -0.25]),
    ):
        router.load, other.load, router.dropped = torch.tensor(load), torch.tensor([7, 1, 4, 4]), torch.tensor(3)
        figures = balancing.finish(skip)
        assert router.bias.tolist() == expected and router.load.sum() == router.dropped == 0
        assert figures["imbalance"] == (max(load) * 4 / sum(load) + 1.75) / 2 and figures["dropped"] == 3


def test_narrow_tokens_get_scores_in_float32():
    config = configured("--experts 8 --top-k 2 --dtype bfloat16")
    router, x = layer_of(config, lively=4.0).router, inputs_of(config)
    for found, expected in zip(router.score(x), router.double().score(x.double())):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
