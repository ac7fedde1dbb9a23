"""Known-wrong variants of tensor and sequence parallelism. The suite must reject every one of them.

The first train something else; those below train the same, and send, keep or wait for more than they have to.
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

import step04_tensor_parallel.train as step04
from common import collectives
from common.model import cross_entropy_sum
from common.weights import initialisation
from step04_tensor_parallel import operators, ring, tensor_parallel, vocab_parallel
from step04_tensor_parallel.linear import linear
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear
from step04_tensor_parallel.vocab_parallel import VocabParallelEmbedding, _VocabParallelCrossEntropy
from tests.mutants import Mutants

MUTANTS = Mutants()
embed, lose, norm, random_box = (
    *(VocabParallelEmbedding.forward, step04.vocab_parallel_cross_entropy_sum, step04.gradient_norm),
    initialisation.random_box,
)
copy_to_ranks, sum_over_ranks = operators.copy_to_ranks, operators.sum_over_ranks
apply_column_parallel, start_reduce_scatter = tensor_parallel.apply_column_parallel, operators.start_reduce_scatter
loss_forward, loss_backward = _VocabParallelCrossEntropy.forward, _VocabParallelCrossEntropy.backward
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


# Each rank updates its norms by the gradient of its own part of the sequence, or its copies of a K/V head by that of
# its own queries
MUTANTS["norm gradients not summed"] = lambda stack: without_group(stack, step04, "tp")
MUTANTS["K/V replicas drift"] = lambda stack: without_group(stack, step04, "kv_replica")


@MUTANTS.replaces("embedding mask off by one", VocabParallelEmbedding, "forward")
def _(self, tokens):
    """The last row of every rank is taken for one of the next rank."""
    with mock.patch.object(self, "num_embeddings", self.num_embeddings - 1):
        return embed(self, tokens)


# The all-reduce of the backward happens in the forward, and the other way round
MUTANTS.replaces("f and f* swapped", operators, "copy_to_ranks")(sum_over_ranks)
MUTANTS.replaces("f and f* swapped", operators, "sum_over_ranks")(copy_to_ranks)


@MUTANTS.replaces("loss averaged over tp", step04, LOSS)
def _(logits, targets, vocab, group):
    """All ranks have the same loss, so it is averaged over them: a right value, and gradients tp times too small."""
    total = lose(logits, targets, vocab, group)
    return total / group.size + (total - total / group.size).detach()


def my_part(gradient, group):
    """The backward of the all-gather forgets that every rank has used the whole sequence."""
    return gradient.chunk(group.size, 1)[group.rank].contiguous()


wrong_gather = operators.make_operator("WrongGather", operators._all_gather, my_part)
MUTANTS.replaces("g takes its slice in the backward", operators, "gather_sequence")(wrong_gather)


@MUTANTS.replaces("same weights on all ranks", initialisation, "random_box")
def _(spec, *rest):
    """Every rank draws its part as if it were the first: shards are equal, and stay so."""
    return random_box(replace(spec, box=tuple((0, stop - start) for start, stop in spec.box)), *rest)


@MUTANTS.replaces("padding not masked", step04, LOSS)
def _(logits, targets, vocab, group):
    """Columns that pad the vocabulary have logits of zero, and a part of the probability."""
    return lose(logits, targets, logits.shape[-1] * group.size, group)


@MUTANTS.replaces("norms counted on every rank", step04, "gradient_norm")
def _(parameters, gradients, world):
    """Norms, which all ranks hold, are counted tp times in the gradient norm."""
    owned = [SimpleNamespace(spec=replace(p.spec, owner=p.spec.owner or not p.spec.decay)) for p in parameters]
    return norm(owned, gradients, world)


@MUTANTS.replaces("sequences of a batch mixed", operators, "join_sequence")
@MUTANTS.replaces("sequences of a batch mixed", tensor_parallel, "join_sequence")
def _(parts):
    """Gathered parts are joined without looking at the batch, which is the axis before the sequence."""
    return parts.reshape(parts.shape[1], -1, parts.shape[3])


@MUTANTS.replaces("no f before the head", ColumnParallelLinear, "forward")
def _(self, x):
    """The head is divided as well, but its input's gradient is not summed: all below sees the columns of one rank."""
    return F.linear(x, self.weight)


def without_maximum(tensor, group, op="sum"):
    """Every rank subtracts the largest of its own logits before the sums of exponentials are added up."""
    return None if op == "max" else collectives.all_reduce(tensor, group)


MUTANTS.replaces("own largest logit", vocab_parallel, "collectives")(SimpleNamespace(all_reduce=without_maximum))

# ---- right results at a higher price ---------------------------------------------------------------------------------


@MUTANTS.replaces("each matrix communicates for itself", tensor_parallel, "apply_column_parallel")
def _(x, linears):
    """q, k, v, gate and up gather, or sum, each their own input: five collectives where two would do."""
    return [apply_column_parallel(x, [each])[0] for each in linears]


@MUTANTS.replaces("gathered inputs kept", tensor_parallel, "apply_column_parallel")
def _(x, linears):
    """Mode overlap saves the second gather, and keeps tp times as much for it."""
    x = linears[0].split.begin_sublayer(x)
    return [linear(x, each.weight) for each in linears]


@MUTANTS.replaces("input gradient waited for", tensor_parallel, "start_reduce_scatter")
def _(x, group):
    """The sum of the input's gradient is complete before that of the weight begins."""
    mine, work = start_reduce_scatter(x, group)
    work.wait()
    return mine, work


all_reduce_at_once = SimpleNamespace(all_reduce=lambda x, group, async_op=False: collectives.all_reduce(x, group))
MUTANTS.replaces("input gradient waited for", tensor_parallel, "collectives")(all_reduce_at_once)

# The next chunk has arrived before this one is multiplied: a slower gather
exchange_at_once = SimpleNamespace(exchange=lambda out, into, group, async_op: collectives.exchange(out, into, group))
MUTANTS.replaces("rings wait before they multiply", ring, "collectives")(exchange_at_once)


def gather_columns(x, group):
    parts = x.new_empty((group.size, *x.shape))
    collectives.all_gather(parts, x.contiguous(), group)
    return torch.cat(list(parts), -1)


# The loss is computed on every rank, so the backward takes a slice
all_columns = operators.make_operator(
    "AllColumns", gather_columns, lambda gradient, group: gradient.chunk(group.size, -1)[group.rank]
)


@MUTANTS.replaces("full logits on every rank", vocab_parallel, LOSS)
@MUTANTS.replaces("full logits on every rank", step04, LOSS)
def _(logits, targets, vocab, group):
    """Every rank gathers the logits of the whole vocabulary, as codes without a vocabulary-parallel loss do."""
    return cross_entropy_sum(all_columns(logits, group)[..., :vocab], targets)


@MUTANTS.replaces("logits kept by the loss", _VocabParallelCrossEntropy, "forward")
@staticmethod
def _(ctx, logits, *rest):
    """The loss holds on to the logits until the backward, which does not need them."""
    ctx.logits = logits
    return loss_forward(ctx, logits, *rest)


@MUTANTS.replaces("gradient of the logits copied", _VocabParallelCrossEntropy, "backward")
@staticmethod
def _(ctx, gradient):
    """The gradient of the logits is a new tensor beside the probabilities."""
    return loss_backward(ctx, gradient)[0].clone(), None, None, None, None
