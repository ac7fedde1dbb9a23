"""Known-wrong variants of tensor and sequence parallelism, as small patches. The suite must reject every one of them.

The first train something else; those below train the same, and send, keep or wait for more than they have to.
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

import step04_tensor_parallel.train as step04
from common import collectives, initialisation
from common.model import cross_entropy_sum
from step04_tensor_parallel import operators, ring, tensor_parallel, vocab_parallel
from step04_tensor_parallel.tensor_parallel import Split


def swap(stack, owner, name: str, wrong) -> None:
    stack.enter_context(mock.patch.object(owner, name, wrong))


# ---- wrong results ---------------------------------------------------------------------------------------------------


def without_group(stack, step, group: str):
    """The train.py `step` does not sum over this group."""
    real = step.sum_extra_groups

    def wrong(parameters, gradients, mesh):
        kept = [(p, g) for p, g in zip(parameters, gradients, strict=True) if group not in p.spec.extra_groups]
        real([p for p, _ in kept], [g for _, g in kept], mesh)

    swap(stack, step, "sum_extra_groups", wrong)


def _norms_not_summed(stack):
    """Under sequence parallelism each rank updates its norms by the gradient of its own part of the sequence."""
    without_group(stack, step04, "tp")


def _kv_replicas_drift(stack):
    """Ranks that share a K/V head update their copies by the gradients of their own queries."""
    without_group(stack, step04, "kv_replica")


def _embedding_off_by_one(stack):
    """The last row of every rank is taken for one of the next rank."""

    def wrong(embedding, tokens, first):
        local = tokens - first
        elsewhere = (local < 0) | (local >= embedding.weight.shape[0] - 1)
        rows = F.embedding(local.masked_fill(elsewhere, 0), embedding.weight)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)

    swap(stack, tensor_parallel, "embed", wrong)


def _f_and_f_star_swapped(stack):
    """The all-reduce of the backward happens in the forward, and the other way round."""
    swap(stack, tensor_parallel, "f", operators.f_star)
    swap(stack, tensor_parallel, "f_star", operators.f)


def _loss_averaged(stack):
    """All ranks have the same loss, so it is averaged over them: a right value, and gradients tp times too small."""
    real = step04.vocab_parallel_cross_entropy_sum

    def wrong(logits, targets, vocab, group):
        total = real(logits, targets, vocab, group)
        return total / group.size + (total - total / group.size).detach()

    swap(stack, step04, "vocab_parallel_cross_entropy_sum", wrong)


def _g_takes_its_slice(stack):
    """The backward of the all-gather forgets that every rank has used the whole sequence."""

    def wrong(ctx, gradient):
        return gradient.chunk(ctx.group.size, 1)[ctx.group.rank].contiguous(), None

    swap(stack, operators._G, "backward", staticmethod(wrong))


def _same_weights_everywhere(stack):
    """Every rank draws its part as if it were the first: shards are equal, and stay so."""
    real = initialisation.random_box

    def wrong(spec, *rest):
        return real(replace(spec, box=tuple((0, stop - start) for start, stop in spec.box)), *rest)

    swap(stack, initialisation, "random_box", wrong)


def _padding_not_masked(stack):
    """Columns that pad the vocabulary have logits of zero, and a part of the probability."""
    real = step04.vocab_parallel_cross_entropy_sum

    def wrong(logits, targets, vocab, group):
        return real(logits, targets, logits.shape[-1] * group.size, group)

    swap(stack, step04, "vocab_parallel_cross_entropy_sum", wrong)


def _replicas_counted(stack):
    """Norms, which all ranks hold, are counted tp times in the gradient norm."""
    real = step04.gradient_norm

    def wrong(parameters, gradients, world):
        owned = [SimpleNamespace(spec=replace(p.spec, owner=p.spec.owner or not p.spec.decay)) for p in parameters]
        return real(owned, gradients, world)

    swap(stack, step04, "gradient_norm", wrong)


def _sequences_mixed(stack):
    """Gathered parts are joined without looking at the batch, which is the axis before the sequence."""

    def wrong(parts):
        return parts.reshape(parts.shape[1], -1, parts.shape[3])

    swap(stack, operators, "join_sequence", wrong)
    swap(stack, tensor_parallel, "join_sequence", wrong)


def _no_f_before_the_head(stack):
    """The head is cut as well, but its input's gradient is not summed: all below sees the columns of one rank."""
    real = Split.column

    def wrong(self, x, linears):
        return real(self, x, linears) if len(linears) > 1 else [F.linear(x, linears[0].weight)]

    swap(stack, Split, "column", wrong)


def _own_largest_logit(stack):
    """Every rank subtracts the largest of its own logits before the sums of exponentials are added up."""

    def wrong(tensor, group, op="sum"):
        return None if op == "max" else collectives.all_reduce(tensor, group)

    swap(stack, vocab_parallel, "collectives", SimpleNamespace(all_reduce=wrong))


# ---- right results at a higher price ---------------------------------------------------------------------------------


def _each_matrix_communicates(stack):
    """q, k, v, gate and up gather, or sum, each their own input: five collectives where two would do."""
    real = Split.column

    def wrong(self, x, linears):
        return [real(self, x, [each])[0] for each in linears]

    swap(stack, Split, "column", wrong)


def _gathered_inputs_kept(stack):
    """Mode overlap saves the second gather, and keeps tp times as much for it."""
    real = Split.column

    def wrong(self, x, linears):
        return real(replace(self, mode="plain") if self.sequence_parallel else self, x, linears)

    swap(stack, Split, "column", wrong)


def _input_gradient_waited_for(stack):
    """The sum of the input's gradient is complete before that of the weight begins."""
    real = tensor_parallel.reduce_scatter_sequence

    def scatter(x, group):
        mine, work = real(x, group)
        work.wait()
        return mine, work

    def reduce(tensor, group, async_op=False):
        return collectives.all_reduce(tensor, group)

    swap(stack, tensor_parallel, "reduce_scatter_sequence", scatter)
    swap(stack, tensor_parallel, "collectives", SimpleNamespace(all_reduce=reduce))


def _rings_wait(stack):
    """The next chunk is there before this one is multiplied: a slower gather."""

    def wrong(sends, receives, group, async_op=False):
        return collectives.exchange(sends, receives, group)

    swap(stack, ring, "collectives", SimpleNamespace(exchange=wrong))


class _GatherColumns(torch.autograd.Function):
    """(..., columns / tp) -> (..., columns); the loss is computed on every rank, so the backward takes a slice."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = x.new_empty((group.size, *x.shape))
        collectives.all_gather(parts, x.contiguous(), group)
        return torch.cat(list(parts), -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.group.size, -1)[ctx.group.rank], None


def full_logits(logits, targets, vocab, group):
    """The loss over gathered logits, as in codes without a vocabulary-parallel one."""
    return cross_entropy_sum(_GatherColumns.apply(logits, group)[..., :vocab], targets)


def _full_logits(stack):
    """Every rank gathers the logits of the whole vocabulary."""
    swap(stack, step04, "vocab_parallel_cross_entropy_sum", full_logits)
    for module in ("tests.mechanisms.step04.test_activations", "tests.mechanisms.step04.test_operators"):
        stack.enter_context(mock.patch(f"{module}.vocab_parallel_cross_entropy_sum", full_logits))


MUTANTS = {
    "norm gradients not summed": _norms_not_summed,
    "K/V replicas drift": _kv_replicas_drift,
    "embedding mask off by one": _embedding_off_by_one,
    "f and f* swapped": _f_and_f_star_swapped,
    "loss averaged over tp": _loss_averaged,
    "g takes its slice in the backward": _g_takes_its_slice,
    "same weights on all ranks": _same_weights_everywhere,
    "padding not masked": _padding_not_masked,
    "norms counted on every rank": _replicas_counted,
    "sequences of a batch mixed": _sequences_mixed,
    "no f before the head": _no_f_before_the_head,
    "own largest logit": _own_largest_logit,
    "each matrix communicates for itself": _each_matrix_communicates,
    "gathered inputs kept": _gathered_inputs_kept,
    "input gradient waited for": _input_gradient_waited_for,
    "rings wait before they multiply": _rings_wait,
    "full logits on every rank": _full_logits,
}
