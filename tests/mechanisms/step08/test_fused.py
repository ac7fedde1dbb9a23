"""Runs with the kernels of step 8, in Triton's interpreter, and with gradients that products add up, train the same."""

import dataclasses
import itertools
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from common.errors import UsageError
from common.launching.command_line import parse
from common.launching.run_mesh import mesh_of
from common.measure.saved_tensors import SavedTensors
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.cost import saved_activations
from step01_single_gpu.data.batches import load_batches
from step01_single_gpu.mixed_precision import LossScaler
from step01_single_gpu.recompute import apply_recompute
from step05_pipeline.apply_pipeline import build_stages
from step05_pipeline.config import schedule_of
from step05_pipeline.weight_gradients import WeightGradStore
from step06_context_parallel.context_parallel import apply_context_parallel
from step07_expert_parallel.apply_experts import apply_experts
from step08_5d import fused, fused_adamw, train, weight_sums
from step08_5d.kernels import linear_cross_entropy
from tests.harness.cuda_rules import cuda_rules
from tests.harness.product_sums import sums_in_products
from tests.mechanisms.step08.kernels.compare import DEVICE, HAS_TRITON, launches
from tests.parity import runs
from tests.parity.runs import ADAMW, SMALL, Result, assemble, assert_parity, reference, train_case, training_of

in_interpreter = pytest.mark.skipif(
    not HAS_TRITON or DEVICE.type == "cuda",
    reason="needs Triton's interpreter; `python -m tests.gpu_check` has the GPU",
)
TINY = "--layers 1 --hidden 16 --heads 2 --kv-heads 1 --ffn 24 --seq-len 8 --global-batch 4 --micro-batch 4 --steps 2"
EXPERTS = "--experts 4 --expert-ffn 12 --shared-experts 1"


@contextmanager
def with_kernels() -> Iterator[None]:
    """In this block, kernels run on the CPU, too, in Triton's interpreter."""
    with ExitStack() as stack:
        for module in (fused, fused_adamw):
            stack.enter_context(mock.patch.object(module, "launches_kernels", lambda config, device: config.fused))
        stack.enter_context(mock.patch.object(linear_cross_entropy, "FEW_BYTES", 0))  # several chunks here, too
        yield


def train_with_kernels(cases: list[str], mutants: list[str | None] | None = None) -> list[dict]:
    """On a rank, or alone."""
    with with_kernels():
        return [train_case(8, *case) for case in zip(cases, mutants or [None] * len(cases), strict=True)]


# How often a step of one layer launches each kernel; 32 tokens are two chunks of the head and the loss
LAUNCHES = {
    **{"rms_norm._forward_kernel": 3, "rms_norm._backward_kernel": 3, "rotary._rotary_kernel": 2},
    **{"swiglu._forward_kernel": 1, "swiglu._backward_kernel": 1},
    **{"cross_entropy._statistics_kernel": 2, "cross_entropy._gradient_kernel": 2},
}
ATTENTION = {f"flash_attention_backward._{kind}_gradient_kernel": 1 for kind in ("query", "key")}
ATTENTION["flash_attention._forward_kernel"] = 1
# With experts, and one that all tokens share, in a layer that is computed twice
TWICE = LAUNCHES | {"rms_norm._forward_kernel": 5, "rotary._rotary_kernel": 3, "flash_attention._forward_kernel": 2}
TWICE |= {"swiglu._forward_kernel": 4, "swiglu._backward_kernel": 2}
TWICE |= {"grouped_matmul._multiply_kernel": 9, "grouped_matmul._multiply_transposed_kernel": 3}


@in_interpreter
@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--own-attention", LAUNCHES | ATTENTION | {"adamw._adamw_kernel": 12}),
        (f"{EXPERTS} --recompute full --own-attention", ATTENTION | TWICE | {"adamw._adamw_kernel": 16}),
        ("--optimizer sgd", LAUNCHES),
    ],
)
def test_kernels_train_the_same(flags, expected):
    case = f"{TINY} {ADAMW} {flags}"
    with launches() as found:
        result = train_with_kernels([case])
    assert {name: count / 2 for name, count in found.items()} == expected  # two steps
    with launches() as none:
        assert_parity(assemble(result), assemble([train_case(7, case.replace(" --own-attention", ""))]), case)
    assert not none


@in_interpreter
def test_kernels_and_other_dimensions():
    cases = [f"{TINY} {ADAMW} --tp 2 --vocab 257"]  # of which one rank has 129 rows, the other 128 and padding
    cases += [f"{TINY} {ADAMW} {EXPERTS} --dp 2 --ep 2 --zero 3 --micro-batch 2 --tie-embeddings"]
    if os.environ.get("TEST_ALL"):
        cases += [f"{TINY} {ADAMW} --layers 2 --pp 2 --schedule zb-h1 --micro-batch 2 --vocab 257"]
        cases += [f"{TINY} {ADAMW} --cp 2 --mask-documents"]
    for case, result in zip(cases, runs.results_of(2, train_with_kernels, cases), strict=True):
        assert_parity(result, reference(training_of(case, 4), 7), case)


@in_interpreter
def test_bfloat16_with_kernels():
    """Masters and moments stay float32; the update and its rounded copy are one kernel, which keeps no gradients."""
    case, update = f"{TINY} {ADAMW} --dtype bfloat16", fused_adamw.FusedAdamW.step

    def step(self, gradients, *rest, **options):
        kept = [weakref.ref(each) for each in gradients]
        update(self, gradients, *rest, **options)
        gradients.clear()  # the caller's list, which is alive until its step returns
        assert not any(each() is not None for each in kept)
        held = [*self.masters, *(each for master in self.masters for each in self.state_of(master).values())]
        assert {each.dtype for each in held} == {torch.float32}

    with mock.patch.object(fused_adamw.FusedAdamW, "step", step):
        result = train_with_kernels([case])
    assert_parity(assemble(result), reference(case, 7), case, 2e-2)


@pytest.mark.parametrize(
    "device, capability, flags, expected",
    [
        ("cuda", (8, 0), "", True),
        ("cuda", (9, 0), "--no-fused", False),
        ("cuda", (7, 5), "", False),  # a T4
        ("cpu", None, "", False),
    ],
)
def test_where_kernels_are_launched(device, capability, flags, expected):
    """And where they are not, all seams keep what PyTorch computes: of a layer, of experts, of sums, of the update."""
    config = parse(8, f"{SMALL} --global-batch 3 --micro-batch 3 --dtype float16 {EXPERTS} {flags}".split())
    config.resolve_and_check(1)
    mesh = mesh_of(config, torch.device("cpu"))
    (model,) = build_stages(config, schedule_of(config), mesh)
    apply_experts(model, config, mesh, LossScaler(config.torch_dtype))
    mesh, layer, head = dataclasses.replace(mesh, device=torch.device(device)), model.layers["0"], model.head
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert fused.launches_kernels(config, mesh.device) == expected
        assert isinstance(fused_adamw.make_optimizer([], config, mesh), fused_adamw.FusedAdamW) == expected
        fused.apply_kernels(model, config, mesh)
        assert isinstance(layer.attention_norm, fused.Norm) == expected
        for weight, products in (
            (layer.attention.q_proj.weight, weight_sums.SummingDense),
            (layer.mlp.experts.up_proj, weight_sums.SummingGrouped),
        ):
            assert (getattr(weight, "products", None) is products) == expected
            assert hasattr(weight, "gradient_sink") == expected
        assert (model.head is head) == (not config.fused)  # in chunks, on any device
        assert isinstance(model.loss, fused.HeadAndLoss) == config.fused
        if not expected:
            with pytest.raises(UsageError, match="--own-attention: our kernels run on a GPU since Ampere"):
                fused.apply_kernels(model, dataclasses.replace(config, own_attention=True), mesh)


def train_in_pieces(flags: str, mutant: str | None = None) -> tuple[Result, int]:
    """The result with the formulas that `--compile` would compile, and how many activations were computed for it."""
    activation = mock.Mock(side_effect=fused.REFERENCES.activation)

    def as_it_is(function, **_):  # which needs no C++ compiler
        return activation if function is fused.REFERENCES.activation else function

    with mock.patch.object(torch, "compile", as_it_is):
        fused.compiled_operations.cache_clear()
        result = assemble([train_case(8, f"{flags} --compile", mutant)])
    fused.compiled_operations.cache_clear()
    return result, activation.call_count


def assert_recomputes(calls: int) -> None:
    assert calls == 2 * 2 * 2, "every activation of two layers in two steps should be computed twice"


def test_what_cannot_be_compiled_is_one_line(monkeypatch):
    """Where no C++ compiler is installed, or none for the GPU. Other errors keep their traceback."""

    def no_compiler(function, **_):
        def call(*_, **__):
            if function is fused.REFERENCES.rotate:
                raise ZeroDivisionError
            raise BackendCompilerFailed("inductor", RuntimeError("No working C++ compiler found\nmore"), None)

        return call

    monkeypatch.setattr(torch, "compile", no_compiler)
    operations = fused.compiled_operations.__wrapped__()
    with pytest.raises(
        UsageError, match="^--compile: PyTorch cannot compile rms_norm [(]No working C.. compiler found[)]$"
    ):
        operations.rms_norm(torch.zeros(2))
    with pytest.raises(ZeroDivisionError):
        operations.rotate()


def test_experts_are_not_compiled():
    """Only the dense layer's activation and the shared expert's are: an expert has another number of rows each time."""
    case = f"{TINY} {ADAMW} {EXPERTS} --layers 2 --dense-layers 1"
    result, calls = train_in_pieces(case)
    assert calls == 2 * 2, "two activations in each of two steps"
    assert_parity(result, reference(case, 7), case)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_may_come_first(mode):
    """In any order with what replaces the core of the attention and the norms, a layer keeps what the formula says."""
    flags = f"--micro-batch 2 --attention naive --mask-documents --recompute {mode} --no-fused"
    config = parse(8, f"{SMALL} {flags}".split())
    config.resolve_and_check(1)
    mesh, shape = mesh_of(config, torch.device("cpu")), (config.model_config, 2, config.seq_len, config.torch_dtype)
    tokens, documents = torch.arange(2 * config.seq_len).view(2, -1), ((0, 5), (0,))
    apply = {
        "recompute": lambda model: apply_recompute(model, mode),
        "core": lambda model: apply_context_parallel(model, config, mesh),
        "norms": lambda model: fused.apply_operations(model, fused.REFERENCES),
    }
    kept = {}
    for order in itertools.permutations(apply):
        (model,) = build_stages(config, schedule_of(config), mesh)
        for name in order:
            apply[name](model)
        materialise(model, config.torch_dtype, mesh.device, random_values(0))
        with SavedTensors(model) as saved:
            model(tokens, None, documents)
        kept[order] = saved.bytes
    everything = saved_activations(*shape, "naive", mode)
    expected = sum(each.bytes for each in everything if each.part != "log-probabilities")
    assert kept == dict.fromkeys(kept, expected)


def test_pieces_are_recomputed():
    case = f"{TINY} {ADAMW} --layers 2 --recompute full"
    result, calls = train_in_pieces(case)
    assert_recomputes(calls)
    assert_parity(result, reference(case, 7), case)


# ---- weight gradients that products add to their sums ----------------------------------------------------------------

CASES = [
    # A tied matrix, whose bucket waits for the gradient of the embedding as well
    f"{ADAMW} --micro-batch 1 --zero 2 --tie-embeddings --bucket-mb 0.001",
    f"{ADAMW} --micro-batch 1 --zero 3 --recompute full --tie-embeddings",
    f"{ADAMW} --micro-batch 3 --tp 2",
    f"{ADAMW} --micro-batch 3 --pp 2 --schedule zb-h1 --tie-embeddings",  # in the second half of the backward
    f"{ADAMW} --micro-batch 3 --pp 2 --experts 8 --expert-ffn 20 --shared-experts 1",
]


def train_with_sums(cases: list[str]) -> list[dict]:
    with sums_in_products():
        return [train_case(8, case) for case in cases]


def test_numbers_are_the_same():
    for case, result in zip(CASES, runs.results_of(2, train_with_sums, CASES), strict=True):
        assert_parity(result, reference(training_of(case), 7), case)


def test_every_sink_multiplies_once():
    """Since a product may work in place. The one that defers does so when W computes, and not before."""
    multiply, weight, store = mock.Mock(), mock.Mock(), WeightGradStore()
    store.put(weight, mock.sentinel.gradient, mock.sentinel.x, multiply)
    assert not multiply.called
    assert list(store.compute()) == [(weight, multiply.return_value)]
    multiply.assert_called_once_with(mock.sentinel.gradient, mock.sentinel.x)
    multiply.reset_mock()
    weight_sums.add_to_sum(weight, mock.sentinel.gradient, mock.sentinel.x, multiply)
    multiply.assert_called_once_with(mock.sentinel.gradient, mock.sentinel.x)
    weight.sums.accumulate.assert_called_once_with(weight, multiply.return_value, True)


@pytest.mark.parametrize("flags, matrices", [("", 7), (EXPERTS, 10)])
def test_nothing_is_rounded_between_product_and_sum(flags, matrices):
    """Three micro-batches in bfloat16, and a sum that an earlier step has left: NaN, here."""
    config = parse(8, f"{SMALL} --global-batch 3 --micro-batch 1 --dtype bfloat16 {flags}".split())
    config.resolve_and_check(1)
    mesh, exact = mesh_of(config, torch.device("cpu")), {}
    with sums_in_products(), cuda_rules():
        pipeline, optimizer, _ = train.build(config, mesh)
        for weight in pipeline.stages[0].parameters():

            def noted(weight, dy, x, multiply, sink=weight.gradient_sink):
                total = exact.setdefault(weight.spec.name, torch.zeros_like(weight, dtype=torch.float64))
                multiply(dy.double(), x.double())(total, False)
                sink(weight, dy, x, multiply)

            weight.gradient_sink = noted
        for unit in pipeline.zero_wrappers[0].units:
            bucket = unit.make_bucket()
            bucket.zero_unused()  # one that is not sent has no memory before
            bucket.flat.fill_(torch.nan)
        batches = load_batches(config, mesh)

        def forward(stage, index, x):
            tokens, targets = batches.micro_batch(0, index, 1)
            return stage.loss(stage(tokens), targets)

        pipeline.run(forward)
        found = dict(zip((each.spec.name for each in optimizer.parameters), pipeline.finish(), strict=True))
    assert len(exact) == matrices * config.model_config.layers + 1  # and the head
    for name, total in exact.items():
        error = (found[name].view_as(total).double() - total).norm() / total.norm()
        assert error < 1e-6, f"{name}: {error}, where rounding to bfloat16 leaves 1e-3"
