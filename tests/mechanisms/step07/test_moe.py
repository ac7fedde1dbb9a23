"""The layer with experts against the formulas written out, token by token; and what balances their loads."""

import itertools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import TrainConfig
from common.model import Decoder
from common.model_config import ModelConfig
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.mixed_precision import LossScaler
from step05_pipeline.weight_gradients import defer_weight_gradients
from step07_expert_parallel import experts as module
from step07_expert_parallel.apply_experts import apply_experts, routing_of
from step07_expert_parallel.balancing import Balancing
from step07_expert_parallel.capacity import SequenceParts, capacity
from step07_expert_parallel.experiments import routing
from step07_expert_parallel.experts import Counts, Experts
from step07_expert_parallel.moe import MoE
from step07_expert_parallel.router import Router, Routing
from tests.harness.observing import configure, mesh_of

BASE = (
    "--layers 1 --hidden 16 --heads 2 --kv-heads 1 --ffn 24 --vocab 64 --seq-len 12 --global-batch 8 --data synthetic"
)
BASE += " --device cpu --dtype float64"
CASES = {
    "mixtral": "--experts 6 --top-k 2",
    "one expert per token": "--experts 6 --top-k 1 --balance none",
    "all experts": "--experts 3 --top-k 3 --gate sigmoid",
    "deepseek": "--experts 8 --top-k 3 --gate sigmoid --shared-experts 2 --expert-ffn 10 --aux-coef 0.3",
    "node-limited": "--experts 8 --top-k 3 --gate sigmoid --expert-groups 4 --node-limit 2 --z-coef 0.2",
    "groups of one": "--experts 4 --top-k 2 --expert-groups 4 --node-limit 2",
    "capacity": "--experts 6 --top-k 2 --capacity-factor 0.8 --aux-coef 0.3 --z-coef 0.2",
    "tight capacity": "--experts 4 --top-k 2 --gate sigmoid --capacity-factor 0.3 --shared-experts 1",
}


def configured(flags: str, world: int = 1) -> TrainConfig:
    return configure(7, f"{BASE} {flags}", world)


def test_from_probabilities_to_gates():
    """Switch's figure: the best expert's output times 0.65 or 0.8. Of two experts, gates are divided by their sum."""
    assert routing.routed(1, normalize=False)[:2] == [([1], [pytest.approx(0.65)]), ([0], [pytest.approx(0.8)])]
    [chosen, gates], *_ = routing.routed(2, normalize=True)
    assert chosen == [1, 2] and gates == pytest.approx([0.65 / 0.85, 0.2 / 0.85])


def layer_of(config: TrainConfig, lively: float = 20.0) -> MoE:
    """The only layer's experts, with weights so large that tokens differ in what they choose."""
    model = Decoder(config.model_config)
    apply_experts(model, config, mesh_of(config), LossScaler(config.torch_dtype))
    materialise(model, config.torch_dtype, torch.device("cpu"), random_values(1))
    for parameter in model.parameters():
        parameter.data.mul_(lively)
    return model.layers["0"].mlp


def router_of(config: TrainConfig) -> Router:
    """A router alone, of one rank."""
    mesh = mesh_of(config)
    parts, dtype = SequenceParts(mesh.cp, mesh.tp, config.cp_split), config.torch_dtype
    return Router(config.model_config.hidden, routing_of(config), parts, config.global_batch, LossScaler(dtype), dtype)


def inputs_of(config: TrainConfig, batch: int = 3, seq: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, seq, config.model_config.hidden, generator=generator, dtype=torch.float64)
    return x.to(config.torch_dtype).requires_grad_()


def choice_of(scores: list[float], bias: list[float], shape: ModelConfig) -> list[int]:
    """The experts that a token with these scores chooses."""
    ranked = [score + more for score, more in zip(scores, bias, strict=True)]
    size = shape.experts // shape.expert_groups
    groups = [range(start, start + size) for start in range(0, shape.experts, size)]
    groups.sort(key=lambda group: -sum(sorted((ranked[i] for i in group), reverse=True)[:2]))
    allowed = [index for group in groups[: shape.groups_per_token] for index in group]
    return sorted(allowed, key=lambda index: (-ranked[index], index))[: shape.top_k]


def written_out(moe: MoE, x: Tensor, config: TrainConfig) -> tuple[Tensor, Tensor, list[int], int]:
    """The output, the auxiliary losses, the load of each expert and how many choices were dropped, by the formulas.

    Every expert works on every token, and its output is multiplied by a gate, which is usually 0.
    """
    shape, experts = config.model_config, moe.experts
    logits = x @ moe.router.weight.T  # (batch, seq, experts), as all that follows
    scores = logits.softmax(-1) if shape.gate == "softmax" else 1 / (1 + (-logits).exp())
    chosen = torch.zeros_like(scores)
    for row, marks in zip(scores.flatten(0, 1).tolist(), chosen.flatten(0, 1)):
        marks[choice_of(row, moe.router.bias.tolist(), shape)] = 1
    gates = scores * chosen
    gates = gates / (gates.sum(-1, keepdim=True) if shape.normalize_gates else 1) * shape.gate_scale
    equal = shape.top_k * x.shape[1] / shape.experts
    limit = math.ceil(config.capacity_factor * equal) if config.capacity_factor else math.inf
    dropped = chosen * (chosen.cumsum(1) > limit)
    hidden = F.silu(torch.einsum("bsh,efh->bsef", x, experts.gate_proj))
    hidden = hidden * torch.einsum("bsh,efh->bsef", x, experts.up_proj)
    output = torch.einsum("bse,ehf,bsef->bsh", gates * (1 - dropped), experts.down_proj, hidden)
    probabilities = (scores / scores.sum(-1, keepdim=True)).mean(1)
    balance = (chosen.sum(1) / equal * probabilities).sum() * (config.aux_coef if config.balance == "aux" else 0)
    z = config.z_coef * logits.exp().sum(-1).log().square().mean(1).sum()
    output = output + (moe.shared(x) if moe.shared else 0)
    return output, (balance + z) / config.global_batch, chosen.sum((0, 1)).int().tolist(), int(dropped.sum())


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
    out, auxiliary, load, dropped = written_out(moe, x, config)
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
        router = router_of(configured(f"--experts 8 --top-k 3 {flags}"))
        assert router.choose(scores).tolist() == [[0, 1, 2]]
        assert router.choose(scores.index_fill(1, torch.tensor(5), 1)).tolist() == [[5, 0, 1]]
    assert router.weigh(scores, torch.tensor([[0, 1, 2]])).isfinite().all(), "sigmoids may all be 0"


def test_sigmoids_that_underflow():
    """The first token's scores are all 0 in float32. The loss and its gradient are those of float64, where none is."""
    config = configured("--experts 4 --gate sigmoid --balance aux --dtype float32")
    router, found = router_of(config), []
    counts = torch.tensor([[3, 2, 1, 0]])
    for dtype in (torch.float32, torch.float64):
        rows = [[-200.0, -201, -202, -203], [-60, -61, -62, -63], [1, 2, 0, -1]]
        logits = torch.tensor([rows], dtype=dtype)
        scores = logits.requires_grad_().sigmoid()
        loss = router.auxiliary_loss(logits, scores, counts)
        found.append((loss, *torch.autograd.grad(loss, logits)))
        probabilities = scores / scores.sum(-1, keepdim=True)
    f, p = counts.double() * 4 / (2 * 3), probabilities.sum(1) / 3
    expected = 0.01 / 8 * (f * p).sum()
    assert found[1][0].item() == pytest.approx(expected.item(), rel=1e-12) and found[1][1].ne(0).all()
    torch.testing.assert_close(found[0], tuple(each.float() for each in found[1]))


def test_the_capacity_is_the_product_of_the_decimal_numbers():
    """In floating point 1.1 * 50 and 2.2 * 50 exceed 55 and 110, and 0.07 * 100 exceeds 7."""
    shares = {50: (4, 2, 100), 100: (4, 1, 400)}  # experts, of a token, tokens
    cases = [(1.1, 50, 55), (2.2, 50, 100), (1.1, 100, 110), (2.2, 100, 220), (0.07, 100, 7), (1.11, 50, 56)]
    for factor, share, expected in cases:
        assert capacity(factor, *shares[share]) == expected, (factor, share)
    assert capacity(1.75, 7, 2, 12) == 6  # 24 / 7 * 7 / 4


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
            for has_kernel in (module.has_kernel, lambda *_: False):
                with mock.patch.object(module, "has_kernel", has_kernel):
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
        assert module.has_kernel(torch.empty(4, 16, dtype=torch.bfloat16).as_subclass(OnCuda)) == taken
        assert not module.has_kernel(torch.empty(4, 16, dtype=torch.float16).as_subclass(OnCuda))


def test_biases_move_against_the_load():
    config = configured("--experts 4")
    router, other = router_of(config), router_of(config)
    balancing = Balancing([(1, router), (2, other)], range(1, 3), 4, 0.25, mesh_of(config).world)
    assert [each is of.bias for each, of in zip(balancing.buffers, (router, other), strict=True)] == [True, True]
    for load, skip, expected in (
        ((5, 3, 4, 4), None, [-0.25, 0.25, 0, 0]),
        ((0, 0, 0, 4), torch.tensor(1.0), [-0.25, 0.25, 0, 0]),  # a skipped step
        ((0, 0, 0, 4), torch.tensor(0.0), [0, 0.5, 0.25, -0.25]),
    ):
        router.load, other.load, router.dropped = torch.tensor(load), torch.tensor([7, 1, 4, 4]), torch.tensor(3)
        figures = balancing.finish(skip)
        assert router.bias.tolist() == expected and router.load.sum() == router.dropped == 0
        assert figures["imbalance"] == (max(load) * 4 / sum(load) + 1.75) / 2 and figures["dropped"] == 3


def test_a_bias_that_has_become_narrow_is_refused():
    """Added to a bias near 0.5 in bfloat16, 0.001 is lost."""
    config = configured("--experts 4")
    router = router_of(config).bfloat16()
    Balancing([(0, router)], range(1), 4, 0.0, mesh_of(config).world)  # moves none
    with pytest.raises(ValueError, match="has become torch.bfloat16"):
        Balancing([(0, router)], range(1), 4, 0.001, mesh_of(config).world)


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"gate": "Softmax"}, "gate 'Softmax' is none of softmax, sigmoid"),
        ({"groups": 3}, "1 of 3 groups of 8 experts"),
        ({"groups": 2, "groups_per_token": 4}, "4 of 2 groups of 8 experts"),
        ({"groups": 4, "top_k": 3}, "top_k 3 exceeds the 2 experts that a token may choose from"),
    ],
)
def test_what_routing_cannot_be(settings, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        Routing(**{"experts": 8, "top_k": 2} | settings)


def test_narrow_tokens_get_scores_in_float32():
    config = configured("--experts 8 --top-k 2 --dtype bfloat16")
    router, x = layer_of(config, lively=4.0).router, inputs_of(config)
    for found, expected in zip(router.score(x), router.double().score(x.double())):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
