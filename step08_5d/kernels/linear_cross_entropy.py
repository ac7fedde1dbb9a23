"""The head and the loss in one function that never has all logits: some tokens at a time.

With v tokens in the vocabulary and hidden states of width h, logits take v / h times the memory of hidden states (63
times in Llama 3.2 1B), and all they are good for is one number per token. So for each chunk of tokens we compute the
logits, the loss, and at once the gradients of the chunk's hidden states and of the head. The next chunk's logits take
the same memory. (Liger Kernel, Hsu et al., arXiv:2410.10989, section 3.2.) That is possible because the loss comes
last: all that the backward adds is a factor, the gradient of the loss itself. It is plain PyTorch around
`cross_entropy.py`, for any device.

For n tokens of width h and v columns of the vocabulary on this rank, in numbers of e bytes:
  FLOPs   6 n h v, as in any linear layer: nothing is computed twice
  bytes   in every chunk, the head is read twice, and its gradient, in float32, is written and, from the second chunk
          on, read before. The backward reads it, and adds its multiple to the step's sum: 12 bytes more per element
  memory  logits of one chunk, c v e for c tokens, instead of n v e and the copies that the loss makes of them. The
          gradients of the hidden states, n h e, and of the head, 4 h v, exist from the forward on, not from the
          backward on; in return the hidden states themselves need not be kept. Where nobody takes the head's gradient
          in float32 (`weight_sums.py` does), autograd rounds it to e bytes, as any gradient on its way to step 3's
          buckets: for a moment there are 4 + e bytes for each number
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.group import Group
from common.layers import at_least_float32
from step04_tensor_parallel.linear import weight_gradient
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum
from step08_5d.kernels.cross_entropy import (
    IGNORED,
    logits_to_gradient,
    logits_to_gradient_reference,
    token_losses,
)

# Logits of a chunk are at least as large. Between processes on CPUs, smaller chunks take longer: `--only head` of the
# experiments measures it. On GPUs, with a wide model and a large vocabulary, chunks are larger anyway
FEW_BYTES = 2 * 2**20
RATIO = 0.25  # and as large as this part of the head's gradient, where the logits are copied in float32


def linear_cross_entropy_reference(x: Tensor, weight: Tensor, targets: Tensor, vocab: int, group: Group) -> Tensor:
    """The same with all logits: the head, and step 4's loss."""
    return vocab_parallel_cross_entropy_sum(F.linear(x, weight), targets, vocab, group)


def chunk_length(weight: Tensor, fused: bool) -> int:
    """Return how many tokens have logits of the memory of the head's gradient in at least float32, or a quarter of it.

    Both are as long as the rank's part of the vocabulary, so the length does not depend on it. Shorter chunks save
    little, since that gradient stays, and read and write it more often. The kernels (`fused`) need no memory beside the
    logits: with a wide model, a micro-batch is often a single chunk. The reference copies them in float32, so that even
    a quarter takes as much, and more. Of a small vocabulary's logits a chunk has at least FEW_BYTES: there is
    little to save, and each chunk costs two messages. All ranks agree, since their parts of the vocabulary are of one
    size.
    """
    ratio, wide = 1.0 if fused else RATIO, at_least_float32(weight.dtype).itemsize
    length = int(ratio * weight.shape[1] * wide / weight.element_size()) // 16 * 16
    return max(16, length, FEW_BYTES // (len(weight) * weight.element_size()))


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total += a' b, and for the `first` one total = a' b; `total` is at least float32, the others may be narrower."""
    kept = 0 if first else 1  # of `total`; times 0, even NaN is nothing
    if total.dtype == a.dtype:
        total.addmm_(a.T, b, beta=kept)
    elif total.is_cuda:  # the sum is never rounded to the narrow type
        torch.addmm(total, a.T, b, out_dtype=total.dtype, beta=kept, out=total)
    elif first:
        total.copy_(a.T @ b)
    else:
        total += a.T @ b


class Scaled:
    """A head's `products`, of step 4's seam: its gradient is complete after the loss, but for the loss's own."""

    @staticmethod
    def weight_gradient(dw: Tensor, factor: Tensor) -> Tensor:
        """dw times a number, in place of dw."""
        return dw.mul_(factor)


def add_scaled(total: Tensor, dw: Tensor, factor: Tensor, first: bool) -> None:
    """total += factor * dw, and for the `first` one total = factor * dw, in one pass."""
    if first:
        torch.mul(dw, factor, out=total)
    else:
        total.addcmul_(dw, factor)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, factors, vocab, group, fused, length, with_gradients):  # x (tokens, hidden)
        in_place = logits_to_gradient if fused else logits_to_gradient_reference
        factors = (targets != IGNORED).to(at_least_float32(x.dtype)) if factors is None else factors
        loss, losses = factors.new_zeros(()), torch.empty_like(factors)
        dx = dw = None
        if with_gradients:
            dx, dw = torch.empty_like(x), torch.empty_like(weight, dtype=loss.dtype)
        memory = x.new_empty(min(length, len(x)), len(weight))
        for first in range(0, max(1, len(x)), length):  # without tokens an empty chunk, whose gradients are zero
            chunk = slice(first, first + length)
            logits = torch.mm(x[chunk], weight.T, out=memory[: len(x[chunk])])  # (length, vocab/tp)
            losses[chunk], statistics = token_losses(logits, targets[chunk], vocab, group, fused)
            loss += (losses[chunk] * factors[chunk]).sum()
            if with_gradients:
                in_place(logits, *statistics, factors[chunk])
                torch.mm(logits, weight, out=dx[chunk])
                add_product(dw, logits, x[chunk], first == 0)
        ctx.save_for_backward(dx, dw)
        ctx.weight = weight
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)  # no zeros for them
        return loss, losses

    @staticmethod
    def backward(ctx, gradient, _):
        dx, dw = ctx.saved_tensors
        dw = weight_gradient(ctx.weight, dw, gradient, default=Scaled)
        return dx.mul_(gradient), dw, *(None,) * 7  # both in place, and so a second backward is an error


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocab: int, group: Group, fused: bool, length: int | None = None
) -> Tensor:
    """Return the sum over tokens of -log p(target), the same on all ranks of the group: see below."""
    return weighted_linear_cross_entropy(x, weight, targets, None, vocab, group, fused, length)[0]


def weighted_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    factors: Tensor | None,
    vocab: int,
    group: Group,
    fused: bool,
    length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum over tokens of -log p(target) times a factor, the same on all ranks of the group; and, (tokens,),
    what was multiplied by the factors, through which no gradient flows.

    With several ranks, each gradient of `x` is that of the rank's own columns: they have yet to be added up.

    Args:
        x: (batch, seq, hidden), what the head multiplies: with sequence parallelism, the gathered sequence.
        weight: (padded vocabulary / tp, hidden), this rank's rows of the head.
        targets: (batch, seq), in the whole vocabulary; IGNORED ones count for nothing.
        factors: (tokens,), in at least float32; 0 for those that are IGNORED. None: 1 for all others.
        vocab: size of the whole vocabulary, without padding.
        fused: compute the loss in Triton.
        length: tokens of a chunk, by default `chunk_length`.
    """
    length = length or chunk_length(weight, fused)
    settings = vocab, group, fused, length, torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), factors, *settings)
