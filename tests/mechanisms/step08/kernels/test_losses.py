"""The loss, and the head with the loss in chunks, beyond `test_kernels`: on ranks, memory, and more."""

import pytest
import torch

from step01_single_gpu.running.memory_meter import MemoryMeter
from step08_5d.kernels.linear_cross_entropy import (
    add_scaled,
    chunk_length,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.test_activations import tp_mesh
from tests.mechanisms.step08.kernels.case import DEVICE, Maker
from tests.mechanisms.step08.kernels.cases import ALONE, KERNELS
from tests.mechanisms.step08.kernels.compare import (
    TOLERANCE,
    assert_same,
    difference,
    needs_triton,
    on_cpu,
    random,
    use_tiles,
)

FUSED = [pytest.param(True, marks=needs_triton), False]
VOCAB, HIDDEN = 29, 12


@needs_triton
def test_large_logits(monkeypatch):
    """Their exponentials would overflow."""
    use_tiles(monkeypatch)
    assert_same(KERNELS["row statistics and gradient of the loss"].case(Maker(torch.float64), 37, 1e4))


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_memory_is_used_again(name, fused):
    """The gradient takes the place of the logits, or of the sum; so a second backward is refused."""
    case = KERNELS[name].case(Maker(torch.float64), 2, 3, *[HIDDEN] * ("linear" in name), VOCAB, fused)
    inputs = [each.requires_grad_() for each in case.inputs]
    value = case.ours(*inputs, *case.settings)
    gradient, *_ = torch.autograd.grad(value, inputs, retain_graph=True)
    assert name != "cross_entropy" or gradient.data_ptr() == inputs[0].data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def inputs(dtype=torch.float64, vocab: int = VOCAB, tokens: int = 14):
    x, weight = random(2, tokens // 2, HIDDEN, dtype=dtype), random(vocab, HIDDEN, dtype=dtype, seed=1)
    return x.requires_grad_(), weight.requires_grad_(), torch.arange(tokens, device=DEVICE).view(2, -1) % vocab


def loss_and_gradients(function, x, weight, targets, *settings) -> list[torch.Tensor]:
    loss = function(x, weight, targets, *settings)
    return [loss.detach(), *torch.autograd.grad(loss * 0.3, (x, weight))]


def ranks_against_the_whole(fused: bool) -> list[float]:
    """Errors of the loss, of the sum of the inputs' gradients, and of this rank's rows of the head's.

    Of three ranks the last one has some padding or, with a vocabulary of 4, nothing else.
    """
    group, found = tp_mesh().tp, []
    for vocab, dtype in ((VOCAB, torch.float64), (4, torch.float64), (VOCAB, torch.bfloat16)):
        x, weight, targets = inputs(dtype, vocab)
        loss, dx, dw = loss_and_gradients(linear_cross_entropy_reference, x, weight, targets, vocab, ALONE)
        rows = -(-vocab // group.size)
        padded = torch.full((rows * group.size, HIDDEN), 1e3, dtype=dtype)  # rubbish behind the vocabulary
        padded[:vocab] = weight.detach()
        mine = padded.chunk(group.size)[group.rank].clone().requires_grad_()
        results = loss_and_gradients(linear_cross_entropy, x, mine, targets, vocab, group, fused, 5)
        torch.distributed.all_reduce(results[1])
        padded.zero_()[:vocab] = dw
        exact = loss, dx, padded.chunk(group.size)[group.rank]
        found += [difference(*pair) / TOLERANCE[dtype] for pair in zip(results, exact, strict=True)]
    return found


@on_cpu
@pytest.mark.parametrize("fused", FUSED)
def test_ranks(fused):
    for found in run_ranks(3, ranks_against_the_whole, fused):
        assert len(found) == 9 and max(found) < 2, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_sum_over_many_chunks_is_not_rounded(dtype):
    case = KERNELS["linear_cross_entropy"].case(Maker(dtype), 2, 200, HIDDEN, VOCAB, DEVICE.type == "cuda", 2)
    case.slack = 1
    assert_same(case)
    assert linear_cross_entropy(*inputs(dtype), VOCAB, ALONE, False).dtype == torch.float32


@pytest.mark.parametrize("first", [True, False])
def test_the_head_s_gradient_is_added_to_a_sum(first):
    """In float32, by whoever takes it; a first one replaces what was there."""
    x, weight, targets = inputs(torch.bfloat16)
    taken = []
    weight.gradient_sink = lambda *operands: taken.append(operands)
    (linear_cross_entropy(x, weight, targets, VOCAB, ALONE, False, 5) * 0.3).backward()
    ((owner, dw, factor, multiply),) = taken
    assert owner is weight and weight.grad is None
    total = random(VOCAB, HIDDEN, dtype=torch.float32, seed=2)
    before, exact = 0 if first else total.double(), dw.double() * 0.3
    add_scaled(total.fill_(torch.nan) if first else total, dw, factor, first)
    assert difference(total, before + exact) < 1e-7
    assert difference(multiply(dw, factor), exact) < 1e-7


def test_chunk_length():
    """The memory of the head's gradient in float32, without kernels a quarter, but at least 2 MiB of logits."""
    with torch.device("meta"):
        for fused, length in ((True, 4096), (False, 1024)):
            assert chunk_length(torch.empty(128_256, 2048, dtype=torch.bfloat16), fused) == length
            assert chunk_length(torch.empty(16_032, 2048), fused) == length // 2
            assert chunk_length(torch.empty(256, 256), fused) == 2048 == 2 * chunk_length(torch.empty(512, 256), fused)
            assert chunk_length(torch.empty(128_256, 8), fused) == 16


def memory_of(call) -> tuple[int, object]:
    """The most bytes that a call has beyond what there was before, and what it returns."""
    with MemoryMeter(DEVICE).measure() as measured:
        result = call()
    return measured.peak_bytes - measured.baseline_bytes, result


@pytest.mark.parametrize("fused", FUSED)
def test_memory(fused):
    """As the docstring says: never all logits, and from the forward to the backward nothing but gradients.

    The kernels need no copy of a chunk's logits; their reference on the CPU has several.
    """
    tokens, hidden, vocab, length = 256, 32, 1000, 16
    x, weight = random(1, tokens, hidden, dtype=torch.float32), random(vocab, hidden, dtype=torch.float32)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    targets = torch.arange(tokens, device=DEVICE).unsqueeze(0)
    logits, chunk, gradients = 4 * tokens * vocab, 4 * length * vocab, 4 * hidden * (vocab + tokens)

    def whole() -> None:
        torch.autograd.grad(linear_cross_entropy_reference(x, weight, targets, vocab, ALONE), (x, weight))

    forward, loss = memory_of(lambda: linear_cross_entropy(x, weight, targets, vocab, ALONE, fused, length))
    backward, _ = memory_of(lambda: torch.autograd.grad(loss, (x, weight)))
    with torch.no_grad():  # no gradients are computed
        assert memory_of(lambda: linear_cross_entropy(x, weight, targets, vocab, ALONE, fused, length))[0] < 3 * chunk
    assert backward < 1024, "the backward multiplies gradients in place"
    assert gradients + chunk <= forward < gradients + (1.5 if fused else 3) * chunk < logits / 2
    assert memory_of(whole)[0] > 2 * logits  # and step 4's copy of them
