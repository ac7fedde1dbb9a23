"""Known-wrong variants of tensor and sequence parallelism, and of the pipeline.

Some train something else; the others train the same, and send, keep or wait for more than they have to.
"""

import re
from dataclasses import replace

import torch

from common import collectives
from common.model import cross_entropy_sum
from common.weights import initialisation
from step01_single_gpu.mixed_precision import Optimizer
from step04_tensor_parallel import apply_tensor_parallel, operators
from step05_pipeline import apply_pipeline
from tests.mutants.patches.mutants import Mutants

TENSOR = Mutants(r"""
# ---- wrong results
@ step04_tensor_parallel.train:sum_extra_groups
# Each rank updates its norms by the gradient of its own part of the sequence, or its copies of a K/V head by that of
# its own queries
norm gradients not summed: in parameter.spec.extra_groups}) => in parameter.spec.extra_groups} - {"tp"})
K/V replicas drift: in parameter.spec.extra_groups}) => in parameter.spec.extra_groups} - {"kv_replica"})
@ step04_tensor_parallel.vocab_parallel:VocabParallelEmbedding.forward
embedding mask off by one: self.num_embeddings) => self.num_embeddings - 1)
@ step04_tensor_parallel.apply_tensor_parallel:vocab_parallel_cross_entropy_sum
# All ranks have the same loss, so it is averaged over them: a right value, and gradients tp times too small
loss averaged over tp: (logits, targets, vocab, group).sum() =>
    (logits / group.size + (logits - logits / group.size).detach(), targets, vocab, group).sum()
@ step04_tensor_parallel.vocab_parallel:_VocabParallelCrossEntropy.forward
# Columns that pad the vocabulary have logits of zero, and a part of the probability
padding not masked: scores[:, max(0, vocab - first) :] = -math.inf => pass
own largest logit: collectives.all_reduce(largest, group, op="max") => pass
@ step04_tensor_parallel.train:gradient_norm
norms counted on every rank: if parameter.spec.owner] => if parameter.spec.owner or not parameter.spec.decay]
# One kind of divided weight is taken for a copy, and counted on the first rank alone (Megatron-LM #7452, finding 8)
a divided weight counted on one rank: if parameter.spec.owner] =>
    if parameter.spec.owner and not (mesh.tp.rank and "k_proj" in parameter.spec.name)]
@ step04_tensor_parallel.operators:join_sequence, step04_tensor_parallel.tensor_parallel:join_sequence
# Gathered parts are joined without looking at the batch, which is the axis before the sequence
sequences of a batch mixed: parts.transpose(0, 1).flatten(1, 2) => parts.reshape(parts.shape[1], -1, parts.shape[3])
@ step04_tensor_parallel.tensor_parallel:ColumnParallelLinear.forward
# The head is divided as well, but its input's gradient is not summed: all below sees the columns of one rank
no f before the head: apply_column_parallel(x, [self])[0] => linear(x, self.weight)

@ step04_tensor_parallel.apply_tensor_parallel:share_the_rest
# Latent attention's down-projections are whole on every rank, but have seen only its part of the sequence
down-projections' gradients not summed: if split.sequence_parallel: =>
    if split.sequence_parallel and "_a_proj" not in parameter.spec.name:
@ common.latent_attention:LatentAttention.forward
# Without sequence parallelism the rotated key seems to need nothing. But a rank's heads are not all that read it
rotated key's gradient of a rank's heads: self.whole(torch.cat((self.kv_a_norm(latent), key), dim=-1)) =>
    torch.cat((self.whole(self.kv_a_norm(latent)), key), dim=-1)
@ common.latent_attention:pairs_to_halves
neighbors taken for halves: return x.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2) => return x

# ---- right results at a higher price
@ step04_tensor_parallel.tensor_parallel:apply_column_parallel
# q, k, v, gate and up gather, or sum, each their own input: five collectives where two would do
each matrix communicates for itself: return _OverlappedColumnLinears.apply(x, split, *weights) =>
    return [_OverlappedColumnLinears.apply(x, split, each)[0] for each in weights]
gathered inputs kept: if split.mode == "plain": => if True:
@ step04_tensor_parallel.tensor_parallel:_OverlappedColumnLinears.backward
input gradient waited for: # dx is in flight => reducing.wait()
@ step04_tensor_parallel.tensor_parallel:gather_and_multiply,
    step04_tensor_parallel.tensor_parallel:multiply_and_scatter
rings wait before they multiply: group, async_op=True => group
@ step04_tensor_parallel.vocab_parallel:_VocabParallelCrossEntropy.forward
logits kept by the loss: ctx.dtype = logits.dtype => ctx.dtype, ctx.logits = logits.dtype, logits
@ step04_tensor_parallel.vocab_parallel:_VocabParallelCrossEntropy.backward
gradient of the logits copied: probabilities.to(ctx.dtype) => probabilities.to(ctx.dtype).clone()
""")

# The all-reduce of the backward happens in the forward, and the other way round
TENSOR.replaces("f and f* swapped", "step04_tensor_parallel.operators:copy_to_ranks")(operators.sum_over_ranks)
TENSOR.replaces("f and f* swapped", "step04_tensor_parallel.operators:sum_over_ranks")(operators.copy_to_ranks)


def my_part(gradient, group):
    """The backward of the all-gather forgets that every rank has used the whole sequence."""
    return gradient.chunk(group.size, 1)[group.rank].contiguous()


wrong_gather = operators.make_operator("WrongGather", operators._all_gather, my_part)
replaces = TENSOR.replaces("g takes its slice in the backward", "step04_tensor_parallel.operators:gather_sequence")
replaces(wrong_gather)
random_box = initialisation.random_box


@TENSOR.replaces("same weights on all ranks", "common.weights.initialisation:random_box")
def _(spec, *rest):
    """Every rank draws its part as if it were the first: shards are equal, and stay so."""
    return random_box(replace(spec, box=tuple((0, stop - start) for start, stop in spec.box)), *rest)


def gather_columns(x, group):
    parts = x.new_empty((group.size, *x.shape))
    collectives.all_gather(parts, x.contiguous(), group)
    return torch.cat(list(parts), -1)


# The loss is computed on every rank, so the backward takes a slice
all_columns = operators.make_operator(
    "AllColumns", gather_columns, lambda gradient, group: gradient.chunk(group.size, -1)[group.rank]
)


@TENSOR.replaces(
    "full logits on every rank", "step04_tensor_parallel.apply_tensor_parallel:vocab_parallel_cross_entropy_sum"
)
@TENSOR.replaces("full logits on every rank", "step04_tensor_parallel.vocab_parallel:vocab_parallel_cross_entropy_sum")
def _(logits, targets, vocab, group):
    """Every rank gathers the logits of the whole vocabulary, as codes without a vocabulary-parallel loss do."""
    return cross_entropy_sum(all_columns(logits, group)[..., :vocab], targets)


parallel_loss = apply_tensor_parallel.vocab_parallel_cross_entropy_sum


@TENSOR.replaces(
    "parallel loss of gathered logits", "step04_tensor_parallel.apply_tensor_parallel:vocab_parallel_cross_entropy_sum"
)
def _(logits, targets, vocab, group):
    """Every rank adds the exponentials of all columns: the loss is log(tp) too large (Megatron-LM #7452, finding 2)."""
    return parallel_loss(all_columns(logits, group), targets, vocab * group.size, group)


PIPELINE = Mutants(r"""
# ---- wrong numbers
@ step05_pipeline.train:train_step
# Every micro-batch's loss is the mean over its own tokens: gradients are as many times too large as there are
# micro-batches. The loss is reported right, and AdamW divides the factor away
missing share of micro-batches: return share * scaler.scale => … * config.accumulation_steps
targets of another micro-batch: y = stage( =>
    _, targets = batches.micro_batch(step, index ^ 1, config.micro_batch, mesh.dp); …
# Under sequence parallelism, later stages count positions over their input: a part of the sequence
positions of the slice: else x, positions => … % (tokens if x is None else x).shape[1]
loss of one rank: collectives.all_reduce(loss, mesh.pp_forward) => pass
# Gradients are reduced with the first micro-batch, and not after the last one: those of later ones stay on their rank
@ step05_pipeline.pipeline:Pipeline._gradients_complete
reduced before the last micro-batch: with zero.backward(last): => with zero.backward(last=False):
reduced before the last micro-batch: if last and not zero.each_micro_batch:\n        zero.launch_rest() =>
    [collectives.all_reduce(each.bucket.flat, each.replicas) for each in zero.units if action.micro_batch == 0]
@ step03_zero.unit:Unit.sum_over_replicas
reduced before the last micro-batch: collectives.all_reduce(self.reduced, self.replicas, async_op=async_op) =>
    collectives.Work()
@ step05_pipeline.pipeline:Pipeline._weight_gradients
# W runs a micro-batch too early: it finds what the previous I has deferred, and the last I's is never computed
W before its I: action.micro_batch)) => action.micro_batch - 1), WeightGradStore())
@ step04_tensor_parallel.linear:hand_over
# A layer keeps its input for W in one buffer, which the next micro-batch overwrites
W with the input of another micro-batch: (weight, gradient, x.detach(), multiply) =>
    (weight, gradient, weight.__dict__.setdefault('buffer', torch.empty_like(x)).copy_(x), multiply)
# Where backwards are split, W computes the gradients of the linear layers, and nobody those of the rest
@ step03_zero.zero:Zero.backward
norms forgotten by split backwards: self.last_micro_batch = last\n =>
    self.last_micro_batch, self.complete = last, complete\n
@ step03_zero.zero:Zero.accumulate
norms forgotten by split backwards: index = self.index_of[parameter] => if not self.complete: return\n    …
@ step05_pipeline.train:sum_extra_groups
# A matrix that is embedding and head is updated on either end by that end's gradient alone
stale tied gradient: in parameter.spec.extra_groups}) => in parameter.spec.extra_groups} - {"embed"})
two copies drift apart: in parameter.spec.extra_groups}) => in parameter.spec.extra_groups} - {"mirror"})
@ step05_pipeline.train:gradient_norm
# Both ends count the matrix that they share in the gradient norm; or both copies of the model are counted
tied matrix counted twice: spec.owner] => spec.owner or "embed" in parameter.spec.extra_groups]
two copies counted twice: spec.owner] => spec.owner or "mirror" in parameter.spec.extra_groups]
@ step05_pipeline.pipeline:Pipeline._backward
# Gradients arrive in the order of the micro-batches, and a stage takes its graphs from a stack
gradients of another micro-batch: kept.pop(key) => kept.pop(key if output_gradient is None
    else max(each for each in self.step.kept if each[0] == action.chunk))
@ step05_pipeline.pipeline:Pipeline._receive
# Every message arrives in the same memory, also while an earlier one is kept for its backward
one receive buffer: self.like.new_empty(self.like.shape) =>
    self.__dict__.setdefault(transfer.output.direction, …)
# Stage 3 gathers the weights for all micro-batches, and keeps them over the update as well
@ step03_zero.unit:Unit.start_over
weights of the first step: self.gathering = => self.gathering = getattr(self, 'gathering', None);
@ step03_zero.unit:Unit.free
weights of the first step: self.gathering = None => if self.gathering: return\n    …

# ---- right numbers at a higher price
@ step05_pipeline.pipeline:Pipeline._complete_send
sent outputs kept: if self.free_sent: => if False:
@ step05_pipeline.pipeline:Pipeline._backward
# I retains the graph, as splitting by two calls of autograd does: activations live until W
graph kept until W: as store:\n            torch.autograd.backward(y, output_gradient) =>
    as store:\n            torch.autograd.backward(y, output_gradient, retain_graph=True)
graph kept until W: self.step.deferred[key] = store => …; store.graph = x, y
@ step05_pipeline.pipeline:Pipeline._weight_gradients
operands of weight gradients kept: with self._gradients_complete(action): =>
    self.kept = [*getattr(self, 'kept', []), *store]\n    …
@ step05_pipeline.pipeline:Pipeline._gradients_complete
reduced at the end: with zero.backward(last): => with zero.backward(last=False):
reduced at the end: if last and => if False and
@ step05_pipeline.train:train_step
data read by every stage: if stage.has_embedding or stage.has_head: => if True:
@ step05_pipeline.pipeline:Pipeline._forward
gathered for each micro-batch: y = self.step.forward( =>
    [(unit.fetch().wait(), unit.free()) for unit in self.zero_wrappers[action.chunk].units]; …
@ step03_zero.unit:Unit.start_over
weights kept after the step: self.gathering = self.bucket => built = hasattr(self, 'bucket'); …
weights kept after the step: if self.stage == 3: => if self.stage == 3 and not built:
@ step05_pipeline.pipeline:Pipeline.__init__
# Activations and their gradients share a communicator, where an early receive of the one delays the other
one communicator for both directions: "backward": gradients} =>
    "backward": __import__('dataclasses').replace(gradients, handle=activations.handle)}
@ step05_pipeline.pipeline:Pipeline.run
received when needed: self._receive(item) => self.__dict__.setdefault('asked', {})[item.output] = item
@ step05_pipeline.pipeline:Pipeline._wait_for_input
received when needed: if needed not in =>
    if needed in getattr(self, 'asked', {}): self._receive(self.asked.pop(needed))\n    …
wait counted as work: work.wait() => with self.step.tracer.phase('forward', action=str(action)): …
@ step05_pipeline.pipeline:Pipeline._send
sends waited for: self.step.pending_sends[direction] = tensor, work => …; self._complete_send(direction)
""")
decoder, first_layer = apply_pipeline.Decoder, [0]  # of the stage that was built last


@PIPELINE.replaces("layers counted from zero on every stage", "step05_pipeline.apply_pipeline:Decoder")
def _(config, core, first, last):
    """Every stage draws its layers as if they were the first ones of the model."""
    first_layer[0] = first
    return decoder(config, core, first, last)


@PIPELINE.replaces("layers counted from zero on every stage", "common.weights.initialisation:random_box")
def _(spec, *rest):
    name = re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) - first_layer[0]}", spec.name)
    return random_box(replace(spec, name=name), *rest)


slices = Optimizer.slices


@PIPELINE.replaces("layers counted from zero in a checkpoint", "step01_single_gpu.mixed_precision:Optimizer.slices")
def _(self):
    """Each stage saves its layers under the numbers that they have in it (Megatron-LM #7452, finding 12)."""
    found = slices(self)
    layers = [int(number) for box in found for number in re.findall(r"layers\.(\d+)", box.name)]

    def counted_here(number: re.Match) -> str:
        return f"layers.{int(number[1]) - min(layers)}"

    return [replace(box, name=re.sub(r"layers\.(\d+)", counted_here, box.name)) for box in found]


STEPS = {4: TENSOR, 5: PIPELINE}
