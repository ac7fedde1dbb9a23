"""The kernels of the divided loss against their references, step 4's loss and PyTorch's, alone and on several ranks."""

import pytest
import torch
import torch.nn.functional as F

from common.process_groups import Group
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum
from step08_5d.kernels import cross_entropy
from step08_5d.kernels.cross_entropy import (
    IGNORED,
    cross_entropy_sum,
    logits_to_gradient,
    logits_to_gradient_reference,
    row_statistics,
    row_statistics_reference,
)
from tests.harness.ranks import run_ranks
from tests.mechanisms.step04.blocks import tp_mesh
from tests.mechanisms.step08.kernels.compare import DEVICE, DTYPES, TOLERANCE, difference, needs_triton, random

ALONE = Group("tp", (0,), 0)
ROWS = 5


def shards_targets() -> torch.Tensor:
    """The column of a row's target: the first, the last, in another block, before and behind this rank's columns."""
    return torch.tensor([0, 36, 20, -3, 40], device=DEVICE)


@pytest.fixture
def small_blocks(monkeypatch):
    """Rows of several blocks."""
    wide = cross_entropy.wide_type
    monkeypatch.setattr(cross_entropy, "_blocks", lambda logits: {"BLOCK": 16, "WIDE": wide(logits.dtype)})


def assert_right(dtype=torch.float64, columns: int = 37, scale: float = 1.0) -> None:
    """37 columns of a larger matrix, of which the last may be padding."""
    logits, targets = random(ROWS, 40, dtype=dtype).mul(scale)[:, :37], shards_targets()
    wide, gradient = logits.to(torch.float64, copy=True), random(ROWS, seed=1)  # both turn into gradients in place
    found, exact = (row_statistics(logits, targets, columns), row_statistics_reference(wide, targets, columns))
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(found.isinf(), exact.isinf()), "infinite"
    found, exact = (each.nan_to_num(neginf=0) for each in (found, exact))
    precision = 4 * torch.finfo(found.dtype).eps * (1 + columns)
    assert (found - exact).abs().max() <= precision * exact.abs().max(), "statistics"
    largest, total = exact[0], exact[1] + 1  # as if other ranks had added to it
    logits_to_gradient_reference(wide, targets, columns, largest, total, gradient)
    narrow = [each.to(found.dtype) for each in (largest, total, gradient)]
    logits_to_gradient(logits, targets, columns, *narrow)
    assert difference(logits, wide) < 4 * TOLERANCE[dtype] or wide.norm() == logits.norm() == 0, "gradient"


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels(dtype, small_blocks):
    assert_right(dtype)


@needs_triton
@pytest.mark.parametrize("columns", [0, 1, 16, 33])
def test_padding(columns, small_blocks):
    """Columns that belong to no token, in the extreme all of them."""
    assert_right(columns=columns)


@needs_triton
def test_large_logits(small_blocks):
    """Their exponentials would overflow."""
    assert_right(scale=1e4)


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_triton), False])
def test_alone(fused):
    """Against PyTorch, with tokens that do not count. The gradient takes the place of the logits."""
    logits, targets = random(2, 3, 29), torch.tensor([[0, IGNORED, 28], [7, 3, IGNORED]], device=DEVICE)
    ours = logits.clone().requires_grad_()
    expected = F.cross_entropy(logits.requires_grad_().flatten(0, 1), targets.flatten(), reduction="sum")
    (theirs,) = torch.autograd.grad(expected * 0.3, logits)
    loss = cross_entropy_sum(ours, targets, 29, ALONE, fused)
    assert abs(loss - expected) < 1e-13
    (gradient,) = torch.autograd.grad(loss * 0.3, ours)
    assert difference(gradient, theirs) < 1e-15
    assert gradient.data_ptr() == ours.data_ptr(), "the gradient has memory of its own"


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_triton), False])
def test_a_second_backward_is_refused(fused):
    logits = random(1, 3, 8).requires_grad_()
    loss = cross_entropy_sum(logits, torch.tensor([[0, 1, 2]], device=DEVICE), 8, ALONE, fused)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def ranks_against_step_4(fused: bool) -> dict[tuple, float]:
    """Differences of loss and gradient, for vocabularies with padding; the last rank of three has nothing else."""
    group, found = tp_mesh().tp, {}
    for vocab, dtype in ((9, torch.float64), (4, torch.float64), (9, torch.bfloat16)):
        width = -(-vocab // group.size)
        whole = torch.randn(2, vocab, width * group.size, generator=torch.Generator().manual_seed(0))
        mine, targets = whole.to(dtype).chunk(group.size, -1)[group.rank], torch.arange(2 * vocab).view(2, -1) % vocab
        results = []
        for loss_of, settings in ((vocab_parallel_cross_entropy_sum, ()), (cross_entropy_sum, (fused,))):
            logits = mine.clone().requires_grad_()
            loss = loss_of(logits, targets, vocab, group, *settings)
            (loss * 0.3).backward()
            results.append((loss.detach(), logits.grad))
        (expected, theirs), (loss, ours) = results
        eps = torch.finfo(dtype).eps
        found[vocab, dtype, "loss"] = (loss - expected).abs().item() / expected.item() / torch.finfo(loss.dtype).eps
        found[vocab, dtype, "gradient"] = (ours - theirs).norm().item() / (theirs.norm().item() or 1) / eps
    return found


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_triton), False])
@pytest.mark.skipif(DEVICE.type == "cuda", reason="ranks of this test are on the CPU")
def test_ranks(fused):
    for found in run_ranks(3, ranks_against_step_4, fused):
        assert len(found) == 6 and max(found.values()) < 4, found
