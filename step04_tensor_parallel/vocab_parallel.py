"""The two ends of the model, cut along the vocabulary: no rank ever holds the whole embedding or the whole logits.

Every rank holds vocabulary/tp rows of the embedding and of the head. A vocabulary that tp does not divide is padded:
rows beyond it belong to no token, their logits are -inf, and nobody saves or counts them.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common import collectives
from common.model import at_least_float32
from common.process_groups import Group


def embed(embedding: nn.Embedding, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """This rank's summand of the embedded tokens (batch, seq, hidden): its own rows, zero for those of other ranks."""
    local = tokens - first
    elsewhere = (local < 0) | (local >= embedding.weight.shape[0])
    rows = F.embedding(local.masked_fill(elsewhere, 0), embedding.weight)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target], of which every rank holds vocab/tp columns. Three numbers a token cross the wire:
    its largest logit, and in one message its sum of exponentials and its target's logit (Shoeybi et al., section 3).
    """

    @staticmethod
    def forward(ctx, logits, targets, first, vocab, group):  # (tokens, vocab/tp), (tokens,)
        scores = logits.to(at_least_float32(logits.dtype), copy=True)
        scores[:, max(0, vocab - first) :] = -math.inf  # columns that pad the vocabulary
        largest = scores.amax(-1)  # (tokens,)
        collectives.all_reduce(largest, group, op="max")
        scores.sub_(largest.unsqueeze(-1))
        local = targets - first
        elsewhere = (local < 0) | (local >= scores.shape[1])
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        target_score = scores.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0)
        exponentials = scores.exp_()
        sums = torch.stack((exponentials.sum(-1), target_score))  # (2, tokens)
        collectives.all_reduce(sums, group)
        probabilities = exponentials.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, elsewhere)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]  # (tokens,)

    @staticmethod
    def backward(ctx, gradient):  # softmax minus one at the target
        probabilities, local, elsewhere = ctx.saved_tensors
        one = (~elsewhere).to(probabilities.dtype).unsqueeze(-1)
        # in place: it is the largest tensor there is
        probabilities.scatter_add_(-1, local, -one).mul_(gradient.unsqueeze(-1))
        return probabilities.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy_sum(logits, targets, vocab: int, group: Group):
    """Sum over tokens of -log p(target), the same on all ranks of the group.

    Args:
        logits: (batch, seq, padded vocabulary / tp), this rank's columns.
        targets: (batch, seq).
        vocab: size of the whole vocabulary, without padding.
    """
    flat = logits.flatten(0, 1)
    first = group.rank * flat.shape[1]
    return _VocabParallelCrossEntropy.apply(flat, targets.flatten(), first, vocab, group).sum()
