"""Known-wrong variants of tensor and sequence parallelism, as small patches. The suite must reject every one of them.

The first train something else; those below train the same, and send, keep or wait for more than they have to.
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

import step04_tensor_parallel.train as step04
from common import collectives, initialisation, weight_gradients
from common.model import cross_entropy_sum
from step04_tensor_parallel import operators, ring, tensor_parallel, vocab_parallel
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear
from step04_tensor_parallel.vocab_parallel import VocabParallelEmbedding, _VocabParallelCrossEntropy

LOSS = "vocab_parallel_cross_entropy_sum"


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


def _norm_gradients_not_summed(stack):
    """Under sequence parallelism each rank updates its norms by the gradient of its own part of the sequence."""
    without_group(stack, step04, "tp")


def _kv_replicas_drift(stack):
    """Ranks that share a K/V head update their copies by the gradients of their own queries."""
    without_group(stack, step04, "kv_replica")


def _embedding_mask_off_by_one(stack):
    """The last row of every rank is taken for one of the next rank."""
    real = VocabParallelEmbedding.forward

    def wrong(self, tokens):
        with mock.patch.object(self, "num_embeddings", self.num_embeddings - 1):
            return real(self, tokens)

    swap(stack, VocabParallelEmbedding, "forward", wrong)


def _f_and_f_star_swapped(stack):
    """The all-reduce of the backward happens in the forward, and the other way round."""
    copy_to_ranks, sum_over_ranks = operators.copy_to_ranks, operators.sum_over_ranks
    swap(stack, operators, "copy_to_ranks", sum_over_ranks)
    swap(stack, operators, "sum_over_ranks", copy_to_ranks)


def _loss_averaged_over_tp(stack):
    """All ranks have the same loss, so it is averaged over them: a right value, and gradients tp times too small."""
    real = step04.vocab_parallel_cross_entropy_sum

    def wrong(logits, targets, vocab, group):
        total = real(logits, targets, vocab, group)
        return total / group.size + (total - total / group.size).detach()

    swap(stack, step04, LOSS, wrong)


def _g_takes_its_slice_in_the_backward(stack):
    """The backward of the all-gather forgets that every rank has used the whole sequence."""

    def wrong(gradient, group):
        return gradient.chunk(group.size, 1)[group.rank].contiguous()

    swap(stack, operators, "gather_sequence", operators._operator(operators._all_gather, wrong))


def _same_weights_on_all_ranks(stack):
    """Every rank draws its part as if it were the first: shards are equal, and stay so."""
    real = initialisation.random_box

    def wrong(spec, *rest):
        return real(replace(spec, box=tuple((0, stop - start) for start, stop in spec.box)), *rest)

    swap(stack, initialisation, "random_box", wrong)


def _padding_not_masked(stack):
    """Columns that pad the vocabulary have logits of zero, and a part of the probability."""
    real = step04.vocab_parallel_cross_entropy_sum
    swap(stack, step04, LOSS, lambda z, targets, vocab, group: real(z, targets, z.shape[-1] * group.size, group))


def _norms_counted_on_every_rank(stack):
    """Norms, which all ranks hold, are counted tp times in the gradient norm."""
    real = step04.gradient_norm

    def wrong(parameters, gradients, world):
        owned = [SimpleNamespace(spec=replace(p.spec, owner=p.spec.owner or not p.spec.decay)) for p in parameters]
        return real(owned, gradients, world)

    swap(stack, step04, "gradient_norm", wrong)


def _sequences_of_a_batch_mixed(stack):
    """Gathered parts are joined without looking at the batch, which is the axis before the sequence."""
    for module in (operators, tensor_parallel):
        swap(stack, module, "join_sequence", lambda parts: parts.reshape(parts.shape[1], -1, parts.shape[3]))


def _no_f_before_the_head(stack):
    """The head is divided as well, but its input's gradient is not summed: all below sees the columns of one rank."""
    swap(stack, ColumnParallelLinear, "forward", lambda self, x: F.linear(x, self.weight))


def _own_largest_logit(stack):
    """Every rank subtracts the largest of its own logits before the sums of exponentials are added up."""

    def wrong(tensor, group, op="sum"):
        return None if op == "max" else collectives.all_reduce(tensor, group)

    swap(stack, vocab_parallel, "collectives", SimpleNamespace(all_reduce=wrong))


# ---- right results at a higher price ---------------------------------------------------------------------------------


def _each_matrix_communicates_for_itself(stack):
    """q, k, v, gate and up gather, or sum, each their own input: five collectives where two would do."""
    real = tensor_parallel.apply_column_parallel
    swap(stack, tensor_parallel, "apply_column_parallel", lambda x, linears: [real(x, [each])[0] for each in linears])


def _gathered_inputs_kept(stack):
    """Mode overlap saves the second gather, and keeps tp times as much for it."""

    def wrong(x, linears):
        x = linears[0].split.begin_sublayer(x)
        return [weight_gradients.linear(x, linear.weight) for linear in linears]

    swap(stack, tensor_parallel, "apply_column_parallel", wrong)


def _input_gradient_waited_for(stack):
    """The sum of the input's gradient is complete before that of the weight begins."""
    real = tensor_parallel.start_reduce_scatter

    def scatter(x, group):
        mine, work = real(x, group)
        work.wait()
        return mine, work

    def reduce(tensor, group, async_op=False):
        return collectives.all_reduce(tensor, group)

    swap(stack, tensor_parallel, "start_reduce_scatter", scatter)
    swap(stack, tensor_parallel, "collectives", SimpleNamespace(all_reduce=reduce))


def _rings_wait_before_they_multiply(stack):
    """The next chunk has arrived before this one is multiplied: a slower gather."""
    wrong = SimpleNamespace(
        exchange=lambda sends, receives, group, async_op: collectives.exchange(sends, receives, group)
    )
    swap(stack, ring, "collectives", wrong)


def gather_columns(x, group):
    parts = x.new_empty((group.size, *x.shape))
    collectives.all_gather(parts, x.contiguous(), group)
    return torch.cat(list(parts), -1)


# The loss is computed on every rank, so the backward takes a slice
all_columns = operators._operator(gather_columns, lambda gradient, group: gradient.chunk(group.size, -1)[group.rank])


def full_logits(logits, targets, vocab, group):
    """The loss over gathered logits, as in codes without a vocabulary-parallel one."""
    return cross_entropy_sum(all_columns(logits, group)[..., :vocab], targets)


def _full_logits_on_every_rank(stack):
    """Every rank gathers the logits of the whole vocabulary."""
    swap(stack, step04, LOSS, full_logits)
    stack.enter_context(mock.patch(f"tests.mechanisms.step04.test_activations.{LOSS}", full_logits))


def _logits_kept_by_the_loss(stack):
    """The loss holds on to the logits until the backward, which does not need them."""
    real = _VocabParallelCrossEntropy.forward

    def wrong(ctx, logits, *rest):
        ctx.logits = logits
        return real(ctx, logits, *rest)

    swap(stack, _VocabParallelCrossEntropy, "forward", staticmethod(wrong))


def _gradient_of_the_logits_copied(stack):
    """The gradient of the logits is a new tensor beside the probabilities."""
    real = _VocabParallelCrossEntropy.backward
    wrong = staticmethod(lambda ctx, gradient: (real(ctx, gradient)[0].clone(), None, None, None, None))
    swap(stack, _VocabParallelCrossEntropy, "backward", wrong)


MUTANTS = {
    function.__name__[1:].replace("_", " "): function
    for function in (
        *(_norm_gradients_not_summed, _kv_replicas_drift, _embedding_mask_off_by_one, _f_and_f_star_swapped),
        *(_loss_averaged_over_tp, _g_takes_its_slice_in_the_backward, _same_weights_on_all_ranks),
        *(_padding_not_masked, _norms_counted_on_every_rank, _sequences_of_a_batch_mixed, _no_f_before_the_head),
        *(_own_largest_logit, _each_matrix_communicates_for_itself, _gathered_inputs_kept),
        *(_input_gradient_waited_for, _rings_wait_before_they_multiply, _full_logits_on_every_rank),
        *(_logits_kept_by_the_loss, _gradient_of_the_logits_copied),
    )
}
