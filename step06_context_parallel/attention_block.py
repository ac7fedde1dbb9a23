"""One block of attention, forward and backward, and the sum of several blocks.

Attention over many keys can be computed in blocks of keys. Each block gives its own output and the logarithm of the sum
of its exponentials, and from these two numbers per query the outputs of several blocks can be combined exactly. This is
the online softmax of FlashAttention (Dao et al., arXiv:2205.14135, section 3.1), here with each block on another rank.
For example, one query and three keys, in a block of two and a block of one:

    exp(score)         1  3 | 1     the sums are 4 and 1: the log-sum-exps are log 4 and log 1, and merged log 5
    value              8  4 | 10
    output             5    | 10    (1 * 8 + 3 * 4) / 4, and 10
    weight of block    4/5  | 1/5   exp(log 4 - log 5), exp(log 1 - log 5)
    merged output      6            4/5 * 5 + 1/5 * 10, which is (1 * 8 + 3 * 4 + 1 * 10) / 5 as without blocks

PyTorch's `scaled_dot_product_attention` does not return the second result, so its kernels are called by name.

Shapes: q (batch, heads, n, d), k and v (batch, kv_heads, m, d); values may be narrower than keys. A block is
full, or causal with n = m; see `sequence_layouts`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from common.layers import at_least_float32
from step06_context_parallel.sequence_layouts import ScoreBlock

_aten = torch.ops.aten


class NaiveKernels:
    """Computes blocks, and stores their scores. Other kernels, as `FusedKernels`, compute the same.

    narrow_values: whether values may be narrower than keys. If not, they get zeros beside them.
    """

    narrow_values = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Return softmax(q k' / sqrt(d)) v (batch, heads, n, d), and the log-sum-exp of the scores (batch, heads, n).

        The log-sum-exp has at least float32.
        """
        scores = _scores(q, k, causal)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp().to(q.dtype) @ _repeated(v, q), lse

    def attend_backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's part of the gradients of q, k and v.

        `gradient`, `out` and `lse` are those of the attention over *all* keys, not of this block. With them the
        probabilities of the block come out right: exp(score - lse) is normalized over all keys.
        """
        p = (_scores(q, k, causal) - lse.unsqueeze(-1)).exp()  # (batch, heads, n, m)
        dp = (gradient @ _repeated(v, q).transpose(-2, -1)).to(p.dtype)
        delta = (gradient.to(p.dtype) * out).sum(-1, keepdim=True)  # what the softmax of a whole row subtracts
        ds = (p * (dp - delta) * q.shape[-1] ** -0.5).to(q.dtype)
        dq, dk, dv = ds @ _repeated(k, q), ds.transpose(-2, -1) @ q, p.to(q.dtype).transpose(-2, -1) @ gradient
        return dq, *(each.unflatten(1, (k.shape[1], -1)).sum(2) for each in (dk, dv))

    def merge(self, out_so_far: Tensor, lse_so_far: Tensor, out: Tensor, lse: Tensor) -> None:
        """Add a block's results to those so far, in place. Both are weighted by their shares of the exponentials."""
        total = torch.logaddexp(lse_so_far, lse)
        out_so_far.mul_((lse_so_far - total).exp().unsqueeze(-1)).add_(out * (lse - total).exp().unsqueeze(-1))
        lse_so_far.copy_(total)


class FusedKernels(NaiveKernels):
    """Computes blocks with PyTorch's kernels, which store no scores, if there are some for this type and width."""

    narrow_values = False

    def attend(self, q, k, v, causal):
        if not _has_kernel(q):
            return NaiveKernels.attend(self, q, k, v, causal)
        if q.is_cuda:
            return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

    def attend_backward(self, gradient, q, k, v, out, lse, causal):
        if not _has_kernel(q):
            return NaiveKernels.attend_backward(self, gradient, q, k, v, out, lse, causal)
        if q.is_cuda:
            none = torch.empty(0, dtype=torch.int64, device=q.device)  # sequences of equal length, and no dropout
            lengths = None, None, q.shape[2], k.shape[2]
            return _aten._scaled_dot_product_flash_attention_backward(
                gradient, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, none, none
            )
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(gradient, q, k, v, out, lse, 0.0, causal)


KERNELS = {"naive": NaiveKernels(), "fused": FusedKernels()}  # by --attention


def _has_kernel(q: Tensor) -> bool:
    """CUDA's FlashAttention has neither float32 nor float64, wants heads of a multiple of 8, and a GPU since Ampere."""
    if not q.is_cuda:
        return True
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = (q @ _repeated(k, q).transpose(-2, -1)).to(at_least_float32(q.dtype)) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores  # (batch, heads, n, m)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """The K/V heads, once for each query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _widened(x: Tensor, k: Tensor, kernels: NaiveKernels) -> Tensor:
    """Values, or outputs, with zeros beside them if the kernels want them as wide as keys."""
    narrower = 0 if kernels.narrow_values else k.shape[-1] - x.shape[-1]
    return F.pad(x, (0, narrower)) if narrower else x


def _narrowed(x: Tensor, width: int | None) -> Tensor:
    """So many of the last axis, or all of it."""
    return x if width in (None, x.shape[-1]) else x[..., :width]


class MergedAttention:
    """The attention of `q` to all blocks that have been added so far: `out` and `lse`, in at least float32.

    Args:
        width: of a head's values and outputs, by default that of q.
    """

    def __init__(self, q: Tensor, kernels: NaiveKernels, width: int | None = None):
        self.q, self.kernels = q, kernels
        self.out = torch.zeros_like(_narrowed(q, width), dtype=at_least_float32(q.dtype))  # in the order of q in memory
        self.lse = self.out.new_full(q.shape[:-1], -math.inf)

    def add(self, block: ScoreBlock, k: Tensor, v: Tensor) -> None:
        q, k, v = block.rows_of(self.q), block.columns_of(k), block.columns_of(v)
        out, lse = self.kernels.attend(q, k, _widened(v, k, self.kernels), block.causal)
        self.kernels.merge(block.rows_of(self.out), block.rows_of(self.lse), _narrowed(out, self.out.shape[-1]), lse)


class AttentionGradients:
    """The backward of `MergedAttention`, block by block. `dq` is the sum so far, in at least float32.

    Args:
        gradient: of the attention's output.
        out, lse: the output and the log-sum-exp of all blocks together.
    """

    def __init__(self, gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, kernels: NaiveKernels):
        self.gradient, self.q, self.out, self.lse, self.kernels = gradient, q, out, lse, kernels
        self.dq = torch.zeros_like(q, dtype=lse.dtype)

    def add(self, block: ScoreBlock, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add a block's gradients to `dq` and, in place, to `dk` and `dv`."""
        gradient, q, out, lse, dq = map(block.rows_of, (self.gradient, self.q, self.out, self.lse, self.dq))
        k, v, dk, dv = map(block.columns_of, (k, v, dk, dv))
        gradient, out, v = (_widened(each, k, self.kernels) for each in (gradient, out, v))
        parts = self.kernels.attend_backward(gradient, q, k, v, out, lse, block.causal)
        for total, part in zip((dq, dk, dv), parts, strict=True):
            total += _narrowed(part, total.shape[-1])
