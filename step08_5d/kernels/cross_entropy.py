"""Cross-entropy of logits whose columns, the vocabulary, are divided among ranks: step 4's loss in two kernels.

    -log softmax(logits)[target] = log(sum of exp(logit - largest)) - (target's logit - largest)

PyTorch makes a float32 copy of the logits for it and passes over that again and again. Here one kernel reads the logits
once and leaves three numbers per token: the largest, the sum of exponentials relative to it, and the target's. The
ranks exchange these, as in step 4 (Shoeybi et al., arXiv:1909.08053, section 3). A second kernel turns the logits into
their gradient, in place: there is never a second tensor of that size. (Both are found in Liger Kernel, Hsu et al.,
arXiv:2410.10989, for logits that are not divided.)

For n tokens and v columns of e bytes:
  FLOPs   about 4 n v in the forward and as many in the backward: a GPU waits for the bytes alone
  bytes   n v e in the forward, which reads, and 2 n v e in the backward, which reads and writes
"""

import math

import torch
from torch import Tensor

from common import collectives
from common.group import Group
from common.layers import at_least_float32
from step08_5d.kernels.launching import next_power_of_two, tl, triton, warps_for, wide_type

IGNORED = -100  # a target that does not count, as in PyTorch


def row_statistics_reference(logits: Tensor, targets: Tensor, columns: int) -> Tensor:
    """Return for each row its largest logit, the sum of exponentials relative to it, and its target's logit: (3, rows).

    Args:
        logits: (rows, v), of which only the first `columns` belong to tokens. If there are none, the largest logit is
            -inf and the sum 0.
        targets: (rows,), the column of each row's target; if that is not among `columns`, its logit counts as 0.
    """
    scores = logits[:, :columns].to(at_least_float32(logits.dtype))
    found = (targets >= 0) & (targets < columns)
    if not columns:
        return torch.stack([scores.new_full(targets.shape, each) for each in (-math.inf, 0, 0)])
    largest = scores.amax(-1)
    chosen = scores.gather(-1, targets.masked_fill(~found, 0).unsqueeze(-1)).squeeze(-1).masked_fill(~found, 0)
    return torch.stack((largest, (scores - largest.unsqueeze(-1)).exp_().sum(-1), chosen))


def logits_to_gradient_reference(
    logits: Tensor, targets: Tensor, columns: int, largest: Tensor, total: Tensor, gradient: Tensor
) -> None:
    """Replace logits by their gradient: (softmax - 1 at the target) times the gradient of the row's loss.

    Args:
        logits, targets, columns: as above; columns that belong to no token have no gradient.
        largest, total: (rows,), the largest logit and the sum of exponentials over the columns of all ranks.
        gradient: (rows,), of each row's loss; 0 for a row that does not count.
    """
    p = (logits[:, :columns].to(total.dtype) - largest.unsqueeze(-1)).exp_().div_(total.unsqueeze(-1))
    found = (targets >= 0) & (targets < columns)
    if columns:
        p.scatter_add_(-1, targets.masked_fill(~found, 0).unsqueeze(-1), -found.to(p.dtype).unsqueeze(-1))
    logits[:, :columns] = p.mul_(gradient.unsqueeze(-1))
    logits[:, columns:] = 0


@triton.jit
def rescaling(before, now):
    """What turns a sum relative to the largest logit `before` into one relative to `now`."""
    return tl.exp(before - now)


@triton.jit
def _statistics_kernel(logits, targets, statistics, stride, columns, rows, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """A program reads one row, a block of columns after the other: online softmax, as in FlashAttention."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride  # tokens times vocabulary exceeds 2^31
    largest = tl.full((), -float("inf"), WIDE)
    total = tl.full((), 0.0, WIDE)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        score = tl.load(logits + column, mask=column < columns, other=-float("inf")).to(WIDE)
        now = tl.maximum(largest, tl.max(score, 0))
        total = total * rescaling(largest, now) + tl.sum(tl.exp(score - now), 0)
        largest = now
    target = tl.load(targets + row)
    found = (target >= 0) & (target < columns)
    tl.store(statistics + row, largest)
    tl.store(statistics + rows + row, total)
    tl.store(statistics + 2 * rows + row, tl.load(logits + target, mask=found, other=0.0).to(WIDE))


@triton.jit
def _gradient_kernel(
    logits, targets, largest, total, gradient, stride, columns, width, BLOCK: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    target = tl.load(targets + row)
    target = tl.where(target < columns, target, -1)  # none of ours
    largest = tl.load(largest + row)
    scale = tl.load(gradient + row).to(WIDE)
    probability_scale = scale / tl.load(total + row)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        score = tl.load(logits + column, mask=column < columns, other=-float("inf")).to(WIDE)  # exp(-inf) is 0
        d = tl.exp(score - largest) * probability_scale - tl.where(column == target, scale, 0.0)
        tl.store(logits + column, d.to(logits.dtype.element_ty), mask=column < width)


def _blocks(logits: Tensor) -> dict:
    """Whole rows if they are short. Longer blocks would not load faster, and need more registers."""
    block = min(4096, next_power_of_two(logits.shape[1]))
    return {"BLOCK": block, "num_warps": warps_for(block), "WIDE": wide_type(logits.dtype)}


def row_statistics(logits: Tensor, targets: Tensor, columns: int) -> Tensor:
    """`row_statistics_reference` in one pass over the logits, whose rows are dense."""
    rows = len(logits)
    statistics = torch.empty(3, rows, dtype=at_least_float32(logits.dtype), device=logits.device)
    _statistics_kernel[rows,](logits, targets, statistics, logits.stride(0), columns, rows, **_blocks(logits))
    return statistics


def logits_to_gradient(
    logits: Tensor, targets: Tensor, columns: int, largest: Tensor, total: Tensor, gradient: Tensor
) -> None:
    """`logits_to_gradient_reference` in one pass over the logits, whose rows are dense."""
    (rows, width), stride = logits.shape, logits.stride(0)
    _gradient_kernel[rows,](logits, targets, largest, total, gradient, stride, columns, width, **_blocks(logits))


def token_losses(
    logits: Tensor, targets: Tensor, vocab: int, group: Group, fused: bool
) -> tuple[Tensor, tuple[Tensor, int, Tensor, Tensor]]:
    """Return the loss of each token, (tokens,), and what `logits_to_gradient` needs, beside the losses' gradients.

    Args:
        logits: (tokens, padded vocabulary / tp), this rank's columns.
        targets: (tokens,), in the whole vocabulary, or IGNORED.
        vocab: size of the whole vocabulary, without padding.
        fused: use the kernels.
    """
    first = group.rank * logits.shape[1]
    columns = min(max(vocab - first, 0), logits.shape[1])
    local = targets - first
    largest, total, chosen = (row_statistics if fused else row_statistics_reference)(logits, local, columns)
    own_largest = largest.clone()
    collectives.all_reduce(largest, group, op="max")
    here = (local >= 0) & (local < columns)
    sums = torch.stack((total * (own_largest - largest).exp(), (chosen - largest) * here))  # (2, tokens)
    collectives.all_reduce(sums, group)
    losses = (sums[0].log() - sums[1]) * (targets != IGNORED)
    return losses, (local, columns, largest, sums[0])
