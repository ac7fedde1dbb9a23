"""The layer with experts against the formulas written out, on one process."""

import copy
from unittest import mock

import pytest
import torch

from common.errors import UsageError
from common.model import Decoder
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.recompute import apply_recompute
from step05_pipeline.weight_gradients import defer_weight_gradients
from step07_expert_parallel import experts as module
from step07_expert_parallel.experts import Counts, Experts
from step07_expert_parallel.moe import Choices, apply_experts
from tests.harness.observing import mesh_of
from tests.mechanisms.step07.layers import CASES, configured, inputs_of, layer_of, written_out
from tests.unit.test_model import Only64


def gradients_of(moe, x, loss) -> dict[str, torch.Tensor]:
    names, parameters = zip(*moe.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, (x, *parameters), allow_unused=True, materialize_grads=True)
    return dict(zip(("x", *names), found, strict=True))


def assert_close(found: dict, expected: dict, tolerance: float = 1e-12) -> None:
    """Relative differences ||a - b|| / ||b||; what is zero must be zero."""
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        assert (found[name] - theirs).norm() <= tolerance * theirs.norm(), name


@pytest.mark.parametrize("case", CASES)
def test_equals_the_formulas(case):
    """Output, losses, gradients of both, loads and drops."""
    config = configured(CASES[case])
    moe, x = layer_of(config), inputs_of(config)
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    expected, auxiliary, load, dropped = written_out(moe, x)
    out = moe(x)
    assert moe.router.load.sum() == 0, "counted in the backward"
    found = gradients_of(moe, x, (out * weights).sum())
    assert_close({"out": out}, {"out": expected})
    assert_close(found, gradients_of(moe, x, (expected * weights).sum() + auxiliary))
    router = moe.router
    assert (router.load.tolist(), router.dropped.item()) == (load, dropped)
    assert router.auxiliary.item() == pytest.approx(auxiliary.item(), rel=1e-12)
    if "capacity" in case:
        assert 0 < dropped < router.load.sum()


@pytest.mark.parametrize("flags", ["", "--gate sigmoid --shared-experts 1", "--capacity-factor 1"])
@pytest.mark.parametrize("favourite", [0, 3, 5])
def test_all_tokens_choose_the_same_experts(favourite, flags):
    config = configured(f"--experts 6 --top-k 1 --balance bias {flags}")
    moe, x = layer_of(config), inputs_of(config)
    moe.router.bias[favourite] += 100
    expected, _, load, dropped = written_out(moe, x)
    out = moe(x)
    assert_close({"out": out}, {"out": expected})
    found = gradients_of(moe, x, out.square().sum())
    assert_close(found, gradients_of(moe, x, expected.square().sum()))
    assert load == moe.router.load.tolist() == [36 * (index == favourite) for index in range(6)]
    unused = [index for index in range(6) if index != favourite]
    assert not any(found[f"experts.{name}"][unused].any() for name in ("gate_proj", "up_proj", "down_proj"))
    assert dropped == moe.router.dropped == (30 if "capacity" in flags else 0)  # 2 of 12 tokens of each sequence


def test_nothing_is_left():
    """No rows at all, as on a rank whose experts nobody has chosen."""
    experts, x = Experts(3, 8, 16), torch.zeros(0, 8, requires_grad=True)
    for each in (experts, copy.deepcopy(experts).double()):
        each(x.to(each.up_proj.dtype), Counts(torch.zeros(3, dtype=torch.int64))).sum().backward()
        assert all(parameter.grad.abs().sum() == 0 for parameter in each.parameters()) and x.grad.shape == (0, 8)


CHOSEN = {"all": [[2, 0], [1, 2], [0, 1]], "some": [[3, 0], [3, 3], [2, 1]], "none": [[3, 3], [3, 3], [3, 3]]}


@pytest.mark.parametrize("kept", CHOSEN)
def test_rows_and_back(kept):
    """Three tokens and three experts, of which number 3 stands for what is dropped."""
    choices = Choices(torch.tensor(CHOSEN[kept]), 3, some_dropped=kept != "all")
    expert = [each for row in CHOSEN[kept] for each in row]
    rows = sorted((each, index) for index, each in enumerate(expert) if each < 3)
    assert choices.order.tolist() == [index for _, index in rows]
    assert choices.tokens.tolist() == [index // 2 for _, index in rows]
    assert choices.counts.on_host == [expert.count(each) for each in range(3)]
    x, gates = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, 2.0, 4.0, 8.0, 16.0, 32.0])
    times = [[sum(each < 3 for each in row)] for row in CHOSEN[kept]]
    weights = [[sum(gates[index].item() for _, index in rows if index // 2 == token)] for token in range(3)]
    for factors, of_rows in ((times, ()), (weights, (gates[choices.order],))):
        assert torch.equal(choices.add_up(x[choices.tokens], *of_rows), x * torch.tensor(factors))


COUNTS = {"even": [4, 4, 4, 4], "empty": [0, 9, 0, 7], "one": [0, 0, 16, 0], "last": [0, 0, 0, 16]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("hidden", [8, 9])  # for rows of odd lengths there is no kernel
def test_kernel_and_loop_agree(hidden, counts, dtype):
    torch.manual_seed(0)
    experts, x = Experts(4, hidden, 16).to(dtype), torch.randn(16, hidden, dtype=dtype, requires_grad=True)
    for parameter in experts.parameters():
        parameter.data.normal_()
    results = []
    with mock.patch.object(torch.nn.functional, "grouped_mm", wraps=torch.nn.functional.grouped_mm) as kernel:
        for has_kernel in (module._has_kernel, lambda *_: False):
            with mock.patch.object(module, "_has_kernel", has_kernel):
                out = experts(x, Counts(torch.tensor(counts)))
                gradients = torch.autograd.grad(out.sum(), (x, *experts.parameters()))  # an expanded gradient
                results.append({str(index): each.float() for index, each in enumerate((out, *gradients))})
    assert kernel.call_count == (9 if hidden == 8 else 0)
    assert_close(*results, tolerance=1e-6 if dtype == torch.float32 else 1e-2)


class OnCuda(torch.Tensor):
    """Says that a GPU has it."""

    is_cuda = True


@pytest.mark.parametrize("capability, taken", [((8, 0), False), ((9, 0), True), ((10, 0), False)])
def test_pytorch_s_kernel_on_gpus(capability, taken):
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert module._has_kernel(torch.empty(4, 16, dtype=torch.bfloat16).as_subclass(OnCuda)) == taken
        assert not module._has_kernel(torch.empty(4, 16, dtype=torch.float16).as_subclass(OnCuda))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrow_types_run_near_float64(dtype):
    config = configured(f"{CASES['mixtral']} --dtype {dtype}")
    moe, x = layer_of(config), inputs_of(config)
    exact = copy.deepcopy(moe).double()
    y = x.detach().double().requires_grad_()
    out, expected = moe(x), exact(y)
    assert out.dtype == x.dtype
    found = gradients_of(moe, x, out.float().square().sum())
    assert all(each.dtype == x.dtype for each in found.values())
    wide = {name: each.double() for name, each in found.items()} | {"out": out.double()}
    theirs = gradients_of(exact, y, expected.square().sum()) | {"out": expected}
    assert_close(wide, theirs, 0.03 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("case", ["node-limited", "capacity"])
def test_float64_never_passes_through_float32(case):
    config = configured(CASES[case])
    moe, x = layer_of(config), inputs_of(config)
    with Only64() as mode:
        moe(x).square().sum().backward()
    assert mode.seen > 50


@pytest.mark.parametrize("case", ["deepseek", "capacity"])
def test_deferred_weight_gradients(case):
    """The products of experts and shared experts are put off; the router's small one is not."""
    config = configured(CASES[case])
    moe, x = layer_of(config), inputs_of(config)
    expected = gradients_of(moe, x, moe(x).square().sum())
    with defer_weight_gradients(moe.parameters()) as store:
        moe(x).square().sum().backward()
    names = {parameter: name for name, parameter in moe.named_parameters()}
    found = {"x": x.grad, "router.weight": moe.router.weight.grad}
    assert [name for name in names.values() if name not in found and moe.get_parameter(name).grad is not None] == []
    with torch.no_grad():
        found |= {names[weight]: gradient for weight, gradient in store.compute()}
    assert_close(found, expected)


def counted(mode: str) -> list[tuple[int, int, float]]:
    """What the routers have counted after a forward without and one with a backward."""
    config = configured("--layers 3 --dense-layers 1 --experts 4 --capacity-factor 0.5 --z-coef 0.1")
    model = Decoder(config.model_config)
    apply_experts(model, config, mesh_of(config))
    apply_recompute(model, mode)
    materialise(model, torch.float64, torch.device("cpu"), random_values(0))
    tokens = torch.arange(36).view(3, 12)
    with torch.no_grad():
        model(tokens)
    model(tokens).square().mean().backward()
    assert not hasattr(model.layers["0"].mlp, "router")
    routers = [layer.mlp.router for layer in list(model.layers.values())[1:]]
    return [(each.load.sum().item(), each.dropped.item(), each.auxiliary.item()) for each in routers]


def test_counted_once_under_recomputation():
    expected = counted("none")
    assert [load for load, _, _ in expected] == [36 * 2] * 2 and all(min(each) > 0 for each in expected)
    assert counted("selective") == counted("full") == expected


GROUPS = "--experts 4 --expert-groups 2 --node-limit 1"
REFUSED = {  # flags, and the one line
    "--top-k 3": "--top-k 3 needs --experts",
    "--capacity-factor 1": "--capacity-factor 1.0 needs --experts",
    "--experts 4 --top-k 5": "--top-k 5 must lie between 1 and --experts 4",
    "--experts 4 --dense-layers 1": "--dense-layers 1 leaves none of --layers 1 for experts",
    "--experts 4 --aux-coef 0.1 --balance bias": "--aux-coef 0.1 needs --balance aux",
    "--experts 4 --bias-rate 0.1": "--bias-rate 0.1 needs --balance bias",
    "--experts 4 --expert-groups 2": "--expert-groups 2 needs --node-limit",
    "--experts 4 --node-limit 1": "--node-limit 1 needs --expert-groups",
    "--experts 4 --expert-groups 3 --node-limit 1": "--expert-groups 3 does not divide --experts 4",
    "--experts 4 --expert-groups 2 --node-limit 3": "--node-limit 3 exceeds --expert-groups 2",
    f"{GROUPS} --top-k 3": "--top-k 3 exceeds the 2 experts of --node-limit 1 groups",
    "--experts -1": "--experts -1 must be at least 0",
    "--experts 4 --bias-rate 0": "--bias-rate 0.0 must be positive",
    "--ep 2": "--ep 2 needs --experts",
    "--experts 4 --ep 3 --global-batch 6": "--ep 3 does not divide --experts 4",
    "--experts 4 --ep 2 --pp 2 --layers 2": "--ep 2 does not divide the 1 ranks of a stage (dp x cp x tp)",
    "--experts 4 --tp 2 --kv-heads 2 --no-sequence-parallel": "--tp 2 with --experts needs sequence parallelism, or "
    "tokens would be sent twice",
}
WORLDS = {"--ep 3": 3, "--pp 2": 2, "--tp 2": 2}  # of those flags; one rank otherwise


@pytest.mark.parametrize("flags", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(flags):
    with pytest.raises(UsageError) as caught:
        configured(flags, next((world for name, world in WORLDS.items() if name in flags), 1))
    assert str(caught.value) == REFUSED[flags]


def test_what_fits():
    for flags in ("", "--experts 0", "--model mixtral-8x7b --seq-len 64", "--model deepseek-v3-like", *CASES.values()):
        configured(flags if "--experts" in flags else f"{flags} --layers 4")
    shape = configured("--experts 4").model_config
    assert (shape.top_k, shape.expert_ffn, shape.normalize_gates) == (2, 24, True)
    assert not configured("--experts 4 --top-k 1").model_config.normalize_gates, "a gate of 1 could not be trained"
    assert configured("--model mixtral-8x7b --top-k 1").model_config.normalize_gates, "as the preset says"
