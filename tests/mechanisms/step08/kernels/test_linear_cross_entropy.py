"""Head and loss in chunks against all logits at once, alone and on ranks; their memory; deferred weight gradients."""

import pytest
import torch

from common.process_groups import Group
from step01_single_gpu.memory_meter import MemoryMeter
from step05_pipeline.weight_gradients import defer_weight_gradients
from step08_5d.kernels import linear_cross_entropy as module
from step08_5d.kernels.cross_entropy import IGNORED
from step08_5d.kernels.linear_cross_entropy import (
    chunk_length,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.blocks import tp_mesh
from tests.mechanisms.step08.kernels.compare import DEVICE, TOLERANCE, difference, needs_triton, random

ALONE = Group("tp", (0,), 0)
FUSED = [pytest.param(True, marks=needs_triton), False]
VOCAB, HIDDEN = 29, 12


def inputs(dtype=torch.float64, vocab: int = VOCAB, tokens: int = 14):
    x, weight = random(2, tokens // 2, HIDDEN, dtype=dtype), random(vocab, HIDDEN, dtype=dtype, seed=1)
    return x.requires_grad_(), weight.requires_grad_(), torch.arange(tokens, device=DEVICE).view(2, -1) % vocab


def loss_and_gradients(function, x, weight, targets, *settings) -> list[torch.Tensor]:
    loss = function(x, weight, targets, VOCAB, *settings)
    return [loss.detach(), *torch.autograd.grad(loss * 0.3, (x, weight))]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("length", [1, 5, 14, 100])
def test_chunks(length, fused):
    """Of one token, unequal ones, all tokens in one."""
    found = loss_and_gradients(linear_cross_entropy, *inputs(), ALONE, fused, length)
    assert max(map(difference, found, loss_and_gradients(linear_cross_entropy_reference, *inputs(), ALONE))) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype):
    """The gradient of the head is a sum over many chunks: it must not be rounded each time."""
    x, weight, targets = inputs(dtype, tokens=400)
    found = loss_and_gradients(linear_cross_entropy, x, weight, targets, ALONE, DEVICE.type == "cuda", 2)
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    exact = loss_and_gradients(linear_cross_entropy_reference, *wide, targets, ALONE)
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == dtype
    assert max(map(difference, found, exact)) < TOLERANCE[dtype]


def test_tokens_that_do_not_count():
    x, weight, targets = inputs()
    targets[0, 2:5] = IGNORED
    loss, dx, dw = loss_and_gradients(linear_cross_entropy, x, weight, targets, ALONE, False, 4)
    kept = targets.flatten() != IGNORED
    only = (x.detach().flatten(0, 1)[kept].unsqueeze(0).requires_grad_(), weight, targets.flatten()[kept].unsqueeze(0))
    expected, some_dx, some_dw = loss_and_gradients(linear_cross_entropy_reference, *only, ALONE)
    assert abs(loss - expected) < 1e-12 and difference(dw, some_dw) < 1e-14
    assert difference(dx.flatten(0, 1)[kept], some_dx[0]) < 1e-14 and not dx.flatten(0, 1)[~kept].any()


def test_without_gradients(monkeypatch):
    """None are computed."""
    monkeypatch.setattr(module, "logits_to_gradient_reference", lambda *_: pytest.fail("a gradient of the logits"))
    x, weight, targets = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets, VOCAB, ALONE, False, 4)
        assert not loss.requires_grad
        assert abs(loss - linear_cross_entropy_reference(x, weight, targets, VOCAB, ALONE)) < 1e-12


def test_deferred_weight_gradient():
    """A zero-bubble schedule takes the head's gradient later, too."""
    (x, weight, targets), (_, _, dw) = inputs(), loss_and_gradients(linear_cross_entropy_reference, *inputs(), ALONE)
    loss = linear_cross_entropy(x, weight, targets, VOCAB, ALONE, False, 4) * 0.3
    with defer_weight_gradients([weight]) as store:
        loss.backward()
    assert weight.grad is None and x.grad is not None
    ((parameter, gradient),) = store.compute()
    assert parameter is weight and difference(gradient, dw) < 1e-14


def test_a_second_backward_is_refused():
    loss = linear_cross_entropy(*inputs(), VOCAB, ALONE, False, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def ranks_against_the_whole(fused: bool) -> list[float]:
    """Differences of the loss, of this rank's rows of the head's gradient, and of the sum of the inputs' gradients."""
    group = tp_mesh().tp
    x, weight, targets = inputs()
    loss, dx, dw = loss_and_gradients(linear_cross_entropy_reference, x, weight, targets, ALONE)
    rows = -(-VOCAB // group.size)
    padded = torch.full((rows * group.size, HIDDEN), 1e3, dtype=torch.float64)  # rubbish behind the vocabulary
    padded[:VOCAB] = weight.detach()
    mine = padded.chunk(group.size)[group.rank].clone().requires_grad_()
    ours, partial, gradient = loss_and_gradients(linear_cross_entropy, x, mine, targets, group, fused, 5)
    torch.distributed.all_reduce(partial)
    padded.zero_()[:VOCAB] = dw
    return [difference(ours, loss), difference(partial, dx), difference(gradient, padded.chunk(group.size)[group.rank])]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.skipif(DEVICE.type == "cuda", reason="ranks of this test are on the CPU")
def test_ranks(fused):
    assert max(max(found) for found in run_ranks(2, ranks_against_the_whole, fused)) < 1e-14


def test_chunk_length():
    """A quarter of the memory of the head's gradient in float32, but at least 2 MiB of logits."""
    with torch.device("meta"):
        assert chunk_length(torch.empty(128_256, 2048, dtype=torch.bfloat16)) == 1024
        assert chunk_length(torch.empty(16_032, 2048)) == 512
        assert chunk_length(torch.empty(256, 256)) == 2048 == 2 * chunk_length(torch.empty(512, 256))
        assert chunk_length(torch.empty(128_256, 8)) == 16


def test_memory():
    """As the docstring says: never all logits, and from the forward to the backward nothing but gradients."""
    tokens, hidden, vocab, length = 512, 32, 1000, 32
    x = torch.randn(1, tokens, hidden, device=DEVICE).requires_grad_()
    weight = torch.randn(vocab, hidden, device=DEVICE).requires_grad_()
    targets, peaks = torch.arange(tokens, device=DEVICE).unsqueeze(0), {}
    for function, settings in (
        (linear_cross_entropy_reference, ()),
        (linear_cross_entropy, (DEVICE.type == "cuda", length)),
    ):
        with MemoryMeter(DEVICE).measure() as measured:
            loss = function(x, weight, targets, vocab, ALONE, *settings)
            torch.autograd.grad(loss, (x, weight))
        peaks[function] = measured.peak_bytes - measured.baseline_bytes
        del loss
    loss = linear_cross_entropy(x, weight, targets, vocab, ALONE, *settings)
    with MemoryMeter(DEVICE).measure() as backward:
        torch.autograd.grad(loss, (x, weight))
    assert backward.peak_bytes - backward.baseline_bytes < 1024, "the backward multiplies gradients in place"
    logits, chunk = 4 * tokens * vocab, 4 * length * vocab
    gradients = 4 * hidden * (vocab + tokens)
    assert peaks[linear_cross_entropy_reference] > 2 * logits  # and step 4's copy of them
    # One chunk, on the CPU with what the reference of the kernels computes from it, and small numbers for each token
    assert gradients + chunk <= peaks[linear_cross_entropy] < gradients + 3 * chunk < logits / 2


@needs_triton
def test_one_chunk_at_a_time():
    """The kernels need no copy of the logits, and the next chunk's take the same memory."""
    x, weight, targets = inputs(torch.float32, vocab=290, tokens=64)
    with MemoryMeter(DEVICE).measure() as measured:
        torch.autograd.grad(linear_cross_entropy(x, weight, targets, 290, ALONE, True, 32), (x, weight))
    gradients, chunk = 4 * (x.numel() + weight.numel()), 4 * 32 * 290
    assert gradients + chunk <= measured.peak_bytes - measured.baseline_bytes < gradients + 1.5 * chunk
