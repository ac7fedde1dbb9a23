"""Known-wrong variants of tensor and sequence parallelism. The suite must reject every one of them.

The first train something else; those below train the same, and send, keep or wait for more than they have to.
"""

from dataclasses import replace

import torch

import step04_tensor_parallel.train as step04
from common import collectives
from common.model import cross_entropy_sum
from common.weights import initialisation
from step04_tensor_parallel import operators, tensor_parallel, vocab_parallel
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear, _OverlappedColumnLinears
from step04_tensor_parallel.vocab_parallel import VocabParallelEmbedding, _VocabParallelCrossEntropy
from tests.mutants import Mutants

MUTANTS = Mutants()
edits, replaces = MUTANTS.edits, MUTANTS.replaces
random_box = initialisation.random_box
LOSS, OWNED = "vocab_parallel_cross_entropy_sum", "if parameter.spec.owner]"


def without_group(group: str) -> tuple[str, str]:
    """A change of `sum_extra_groups`, which does not sum over this group any more."""
    return "in parameter.spec.extra_groups})", f'in parameter.spec.extra_groups}} - {{"{group}"}})'


def counted_twice(group: str) -> tuple[str, str]:
    """A change of `gradient_norm`, to which all ranks of this group contribute what they have in common."""
    return OWNED, f'if parameter.spec.owner or "{group}" in parameter.spec.extra_groups]'


# ---- wrong results ---------------------------------------------------------------------------------------------------

# Each rank updates its norms by the gradient of its own part of the sequence, or its copies of a K/V head by that of
# its own queries
edits("norm gradients not summed", step04, "sum_extra_groups", without_group("tp"))
edits("K/V replicas drift", step04, "sum_extra_groups", without_group("kv_replica"))
# The last row of every rank is taken for one of the next rank
off_by_one = "self.num_embeddings)", "self.num_embeddings - 1)"
edits("embedding mask off by one", VocabParallelEmbedding, "forward", off_by_one)
# The all-reduce of the backward happens in the forward, and the other way round
copy_to_ranks, sum_over_ranks = operators.copy_to_ranks, operators.sum_over_ranks
replaces("f and f* swapped", operators, "copy_to_ranks")(sum_over_ranks)
replaces("f and f* swapped", operators, "sum_over_ranks")(copy_to_ranks)
# All ranks have the same loss, so it is averaged over them: a right value, and gradients tp times too small
small = "flat = (logits / group.size + (logits - logits / group.size).detach()).flatten(0, 1)"
edits("loss averaged over tp", step04, LOSS, ("flat = logits.flatten(0, 1)", small))


def my_part(gradient, group):
    """The backward of the all-gather forgets that every rank has used the whole sequence."""
    return gradient.chunk(group.size, 1)[group.rank].contiguous()


wrong_gather = operators.make_operator("WrongGather", operators._all_gather, my_part)
replaces("g takes its slice in the backward", operators, "gather_sequence")(wrong_gather)


@replaces("same weights on all ranks", initialisation, "random_box")
def _(spec, *rest):
    """Every rank draws its part as if it were the first: shards are equal, and stay so."""
    return random_box(replace(spec, box=tuple((0, stop - start) for start, stop in spec.box)), *rest)


# Columns that pad the vocabulary have logits of zero, and a part of the probability
padding = "scores[:, max(0, vocab - first) :] = -math.inf"
edits("padding not masked", _VocabParallelCrossEntropy, "forward", (padding, "pass"))
# Norms, which all ranks hold, are counted tp times in the gradient norm
norms = OWNED, "if parameter.spec.owner or not parameter.spec.decay]"
edits("norms counted on every rank", step04, "gradient_norm", norms)
# Gathered parts are joined without looking at the batch, which is the axis before the sequence
mixed = "parts.transpose(0, 1).flatten(1, 2)", "parts.reshape(parts.shape[1], -1, parts.shape[3])"
edits("sequences of a batch mixed", operators, "join_sequence", mixed)
edits("sequences of a batch mixed", tensor_parallel, "join_sequence", mixed)
# The head is divided as well, but its input's gradient is not summed: all below sees the columns of one rank
no_f = "apply_column_parallel(x, [self])[0]", "F.linear(x, self.weight)"
edits("no f before the head", ColumnParallelLinear, "forward", no_f)
# Every rank subtracts the largest of its own logits before the sums of exponentials are added up
largest = 'collectives.all_reduce(largest, group, op="max")'
edits("own largest logit", _VocabParallelCrossEntropy, "forward", (largest, "pass"))

# ---- right results at a higher price ---------------------------------------------------------------------------------

# q, k, v, gate and up gather, or sum, each their own input: five collectives where two would do
together = "return _OverlappedColumnLinears.apply(x, split, *weights)"
alone = "return [_OverlappedColumnLinears.apply(x, split, each)[0] for each in weights]"
edits("each matrix communicates for itself", tensor_parallel, "apply_column_parallel", (together, alone))
# Mode overlap saves the second gather, and keeps tp times as much for it
as_plain = 'if split.mode == "plain":', "if True:"
edits("gathered inputs kept", tensor_parallel, "apply_column_parallel", as_plain)
# The sum of the input's gradient is complete before that of the weight begins
in_flight = "# dx is in flight", "reducing.wait()"
edits("input gradient waited for", _OverlappedColumnLinears, "backward", in_flight)
# The next chunk has arrived before this one is multiplied: a slower gather
for function in ("gather_and_multiply", "multiply_and_scatter"):
    edits("rings wait before they multiply", tensor_parallel, function, ("group, async_op=True", "group"))


def gather_columns(x, group):
    parts = x.new_empty((group.size, *x.shape))
    collectives.all_gather(parts, x.contiguous(), group)
    return torch.cat(list(parts), -1)


# The loss is computed on every rank, so the backward takes a slice
all_columns = operators.make_operator(
    "AllColumns", gather_columns, lambda gradient, group: gradient.chunk(group.size, -1)[group.rank]
)


@replaces("full logits on every rank", vocab_parallel, LOSS)
@replaces("full logits on every rank", step04, LOSS)
def _(logits, targets, vocab, group):
    """Every rank gathers the logits of the whole vocabulary, as codes without a vocabulary-parallel loss do."""
    return cross_entropy_sum(all_columns(logits, group)[..., :vocab], targets)


# The loss holds on to the logits until the backward, which does not need them
held = "ctx.dtype = logits.dtype", "ctx.dtype, ctx.logits = logits.dtype, logits"
edits("logits kept by the loss", _VocabParallelCrossEntropy, "forward", held)
# The gradient of the logits is a new tensor beside the probabilities
copied = "probabilities.to(ctx.dtype)", "probabilities.to(ctx.dtype).clone()"
edits("gradient of the logits copied", _VocabParallelCrossEntropy, "backward", copied)
