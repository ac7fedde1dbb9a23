"""The two ends of the model, divided along the vocabulary: no rank ever holds the whole embedding or all logits.

Every rank holds vocabulary / tp rows of the embedding and of the head. A vocabulary that tp does not divide is padded:
rows beyond it belong to no token, their logits count as -inf, and they are neither saved nor counted.

For example, 7 tokens of vocabulary on 2 ranks, and the loss of one position whose target is token 5:

    logits          rank 0: 1 0 2 1    rank 1: 0 3 1 --    -- is padding
    largest         rank 0: 2          rank 1: 3           all-reduced with max: 3
    sum of exp      rank 0: 0.69       rank 1: 1.19        all-reduced: 1.87 (of the logits minus 3)
    target's logit  rank 0: 0          rank 1: 3 - 3 = 0   all-reduced: 0; rank 0 does not hold token 5
    loss            log 1.87 - 0 = 0.63 on both
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common import collectives
from common.group import Group
from common.layers import at_least_float32
from step04_tensor_parallel.operators import Split


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which this rank holds the rows from `first` on; what the ranks look up is added.

    Input: token ids (batch, seq). Output: (batch, seq/tp, hidden), without sequence parallelism (batch, seq, hidden).
    """

    def __init__(self, weight: nn.Parameter, first: int, split: Split):
        super().__init__(*weight.shape, _weight=weight)
        self.weight, self.first, self.split = weight, first, split

    def forward(self, tokens):
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.split.end_sublayer(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target], where every rank holds vocabulary / tp columns of the logits.

    Three numbers per token are exchanged: its largest logit, and then in one message its sum of exponentials and its
    target's logit (Shoeybi et al., section 3). All that follows the one copy of the logits happens in place, also in
    the backward: there is no larger tensor.
    """

    @staticmethod
    def forward(ctx, logits, targets, first, vocab, group):  # (tokens, vocab/tp), (tokens,)
        # --- write this yourself ---
        scores = logits.to(at_least_float32(logits.dtype), copy=True)
        scores[:, max(0, vocab - first) :] = -math.inf  # columns that pad the vocabulary
        largest = scores.amax(-1)  # (tokens,)
        collectives.all_reduce(largest, group, op="max")
        scores.sub_(largest.unsqueeze(-1))
        local = targets - first
        elsewhere = (local < 0) | (local >= scores.shape[1])
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        target_score = scores.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0)
        exponentials = scores.exp_()  # in place: the scores are no longer needed
        sums = torch.stack((exponentials.sum(-1), target_score))  # (2, tokens)
        collectives.all_reduce(sums, group)
        probabilities = exponentials.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, elsewhere)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]  # (tokens,)
        # --- until here ---

    @staticmethod
    def backward(ctx, gradient):  # the probabilities, minus one at the target
        # --- write this yourself ---
        probabilities, local, elsewhere = ctx.saved_tensors
        found_here = (~elsewhere).to(probabilities.dtype).unsqueeze(-1)  # 1 where this rank holds the target, or 0
        probabilities.scatter_add_(-1, local, -found_here).mul_(gradient.unsqueeze(-1))
        return probabilities.to(ctx.dtype), None, None, None, None
        # --- until here ---


def vocab_parallel_cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor, vocab: int, group: Group):
    """Return the sum over tokens of -log p(target), the same on all ranks of the group: see below."""
    return vocab_parallel_cross_entropy(logits, targets, vocab, group).sum()


def vocab_parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, vocab: int, group: Group):
    """Return -log p(target) of each token, (batch * seq,), the same on all ranks of the group.

    Args:
        logits: (batch, seq, padded vocabulary / tp), this rank's columns.
        targets: (batch, seq).
        vocab: size of the whole vocabulary, without padding.
    """
    flat = logits.flatten(0, 1)
    return _VocabParallelCrossEntropy.apply(flat, targets.flatten(), group.rank * flat.shape[1], vocab, group)
