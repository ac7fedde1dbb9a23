"""Known-wrong variants of data parallelism and of ZeRO.

Each is a mistake that was found in real code (teaching repositories, and bug reports of large frameworks). Some train
something else; the others train the right model but hold, send or wait for more than they should: no curve shows it.
"""

from dataclasses import replace
from unittest import mock

from common import collectives
from common.parameter import ParameterSpec
from step03_zero.unit import Unit
from step03_zero.zero import Zero
from tests.mutants.patches.mutants import Mutants

DATA_PARALLEL = Mutants(r"""
@ step02_data_parallel.data_parallel:DataParallel.accumulate
# The post-accumulate hook's argument is taken for the gradient: weights are averaged, gradients stay local
hook takes the parameter: bucket.missing.discard(parameter) =>
    collectives.all_reduce(parameter.data, self.group); parameter.data.div_(self.group.size)
# A tensor hook reduces the gradient it is given: under accumulation that is the last micro-batch's alone
only the last micro-batch reduced: bucket.add(parameter, gradient) =>
    self.synchronising and collectives.all_reduce(gradient, self.group); …
# Every backward counts as the last one: sums that were reduced already are added to and reduced again
reduced on every micro-batch: bucket.add(parameter, gradient) =>
    …; collectives.all_reduce(bucket.views[parameter], self.group)
# The three above communicate in their own way: buckets are not reduced any more
@ step02_data_parallel.data_parallel:DataParallel._launch_next
hook takes the parameter: collectives.all_reduce(bucket.flat, self.group, async_op=overlapping) =>
    collectives.Work()
only the last micro-batch reduced: collectives.all_reduce(bucket.flat, self.group, async_op=overlapping) =>
    collectives.Work()
reduced on every micro-batch: collectives.all_reduce(bucket.flat, self.group, async_op=overlapping) =>
    collectives.Work()
@ step01_single_gpu.data.batches:Batches.target_tokens
# Each rank's loss is the mean over its own tokens, and gradients are summed: they are dp times too large
missing share of the global mean: self.seq_len => … // torch.distributed.get_world_size()
@ step02_data_parallel.data_parallel:DataParallel.finish
averaged over ranks: bucket.work.wait() => …; bucket.flat.div_(self.group.size)
stale bucket: while self.next_bucket < => stale = [self.bucket_of[each].views[each].clone() for each in self.parameters]
    \n    …
stale bucket: return [self.bucket_of[parameter].views[parameter] for parameter in self.parameters] => return stale
@ step01_single_gpu.data.batches:Batches.micro_batch
# Every rank reads the samples of rank 0: curves look healthy, most of the data is never seen
same samples everywhere: first = (index * size + rank) => first = (index * size)
@ step02_data_parallel.data_parallel:DataParallel.backward
last backward missed: self.synchronising = last => self.synchronising = False
@ step02_data_parallel.data_parallel:DataParallel._launch_complete
one launch per gradient: while => if
@ step02_data_parallel.data_parallel:DataParallel._launch_next
# The question in the middle of the lesson
nothing overlaps: async_op=overlapping => async_op=False
""")

ZERO = Mutants(r"""
# ---- wrong numbers
@ step03_zero.zero:Zero.finish
# Stages 1 and 2: what was gathered once is taken for the weights of the next step as well. In stage 3 the unit that
# stays between forward and backward stays over the update, too
weights of the step before: unit.start_over() => kept = unit.gathering; …; unit.gathering = kept
last unit of the step before: unit.start_over() => kept = unit.gathering; …; unit.gathering = kept
@ step03_zero.unit:Unit.free
last unit of the step before: self.gathering = None =>
    if any(parameter.spec.name == 'norm.weight' for parameter in self.parameters): return\n    …
@ step03_zero.train:gradient_norm
norm of the local shard: collectives.all_reduce(total, mesh.world) => pass
norm counts replicas: if parameter.spec.owner] => ]
@ step03_zero.unit:Unit.complete
only the last micro-batch in the shard: self.reduced.add_(summed) => summed.clone()
@ step03_zero.unit:Unit.sum_over_replicas
no sum over replicas: collectives.all_reduce(self.reduced, self.replicas, async_op=async_op) => collectives.Work()
# Each rank's loss is the mean over its own tokens, and sums are divided by the shards alone (torchtitan #2318)
divided by shards and not by replicas: collectives.all_reduce(self.reduced, self.replicas, async_op=async_op) =>
    (self.reduced.mul_(self.replicas.size), …)[1]
@ step03_zero.zero:Zero._complete
# Hybrid sharding: sums that are over the replicas already are added to and summed again
summed over replicas each micro-batch: if self.last_micro_batch: => if True:
summed over replicas each micro-batch: async_op=self.mode != "naive" => async_op=False
@ step03_zero.zero:Zero.finish
# Gradients are added up and reduced in the type of the weights (see below)
sums in bfloat16: return gradients => return [each.float() for each in gradients]
@ step01_single_gpu.mixed_precision:Optimizer.step
# There are no master weights: an update smaller than half a step of bfloat16 is lost
updates in bfloat16: self._copy_to_parameters() =>
    torch._foreach_copy_(self.masters, [each.bfloat16() for each in self.masters]); …

# Each bucket has whatever was in memory behind the last parameter, and the norm is that of the whole buckets
@ step03_zero.unit:Unit.make_bucket
norm counts padding: self.bucket = self.bucket or Bucket(self.parameters, self.weights.numel()) =>
    if not self.bucket: …; self.bucket.flat.fill_(1e-3)
@ step03_zero.zero:Zero.finish
norm counts padding: gradients = [] => gradients, Zero.buckets = [], []
norm counts padding: unit.start_over() => Zero.buckets.append(unit.reduced); …
@ step03_zero.train:gradient_norm
norm counts padding: norms = torch.cat => from step03_zero.zero import Zero; owned = Zero.buckets; …

# ---- right numbers, wrong structure
@ common.collectives:reduce_scatter
all-reduce poses as reduce-scatter: if group.size == 1: => all_reduce(input, group);
    output.copy_(input[group.rank * output.numel() :][: output.numel()]); return Work()\n    …
@ step03_zero.zero:Zero.__init__
whole model at first: like = torch.empty( =>
    whole = [torch.zeros(each.shape, dtype=dtype) for each in model.parameters()]; …
@ step03_zero.unit:Unit.free
# Stage 3 gathers and keeps the memory; or (no prefetch, below) it gathers a layer when it needs it, and waits
parameters never freed: self.weights.untyped_storage().resize_(0) => pass
@ step03_zero.by_layer:ZeroByLayer._prefetch
prefetch of two: in region.units: => in [unit for each in self.regions[max(0, self.regions.index(region) - 1) :
    self.regions.index(region) + 2] for unit in each.units]:
@ step03_zero.by_layer:ZeroByLayer._before_backward
# The question in the middle of the lesson
no prefetch in the backward: if index > 0 and => if False and
@ step03_zero.by_layer:ZeroByLayer._after_forward
last unit freed and gathered again: if index + 1 < len(self.regions) or not output.requires_grad: => if True:
@ step03_zero.zero:Zero.gather
waits for all gathers: unit.fetch() => unit.fetch().wait()
@ step03_zero.by_layer:ZeroByLayer._before_backward
# Stage 3 gathers the next layer while a bucket that is being reduced still needs memory. That shows where the network
# is slow (below): what has arrived already is freed anyway
gathers beside a reduction: self._complete() => pass
@ step03_zero.zero:Zero._launch
stage 1 waits for the previous bucket: if self.stage >= 2 or unit.replicas.size > 1: => if True:
@ common.gloo:make_room
all buckets in flight: while len(in_flight) >= REDUCING: => while False:
@ step03_zero.zero:Zero._launch_complete
one launch per gradient of ZeRO: self.units[self.next_unit :] => self.units[self.next_unit : self.next_unit + 1]
@ step03_zero.unit:Unit.complete
gradients kept: self.bucket.flat.untyped_storage().resize_(0) => pass
gradients kept: self.bucket = None => pass
buckets kept elsewhere: self.scattering.wait() =>
    Unit.kept = [*getattr(Unit, 'kept', []), self.bucket.flat.clone()]; …
""")

replaces = ZERO.replaces
initialise, finish, start_over = Zero.__init__, Zero.finish, Unit.start_over
backward, decay = Zero.backward, ParameterSpec.decay.fget
replaces("sums in bfloat16", "step02_data_parallel.data_parallel:at_least_float32")(lambda dtype: dtype)
replaces("no prefetch", "step03_zero.by_layer:ZeroByLayer._prefetch")(lambda self, region: None)
replaces("gathers beside a reduction", "common.collectives:Work.is_completed")(lambda self: False)
# Every reduce-scatter begins when the backward is over; or no backward counts as the last one of a step
replaces("reduced after the backward", "step03_zero.zero:Zero._launch_complete")(lambda self: None)
replaces("last backward of ZeRO missed", "step03_zero.zero:Zero.backward")(lambda self, last: backward(self, False))
# A flat shard mixes matrices and gains, so everything decays; or no tensor has two axes any more, so nothing does
replaces("decay on norms", "common.parameter:ParameterSpec.decay")(property(lambda self: True))
no_decay = property(lambda self: self.flat_range is None and decay(self))
replaces("no decay of flat shards", "common.parameter:ParameterSpec.decay")(no_decay)


@replaces("gloo's own reduce-scatter", "common.collectives:gloo.reduce_scatter")
def _(work, output, input, group):
    """The log calls it a reduce-scatter, but inside it is an all-reduce."""
    work.launch(collectives._reduce_scatter, output, input.clone(), group=group.handle, async_op=True)


@replaces("unsharded optimizer", "step03_zero.zero:Zero.__init__")
def _(self, model, regions, values, mesh, stage, **options):
    """Every rank gets all sums, holds all moments and updates all weights."""
    initialise(self, model, regions, values, mesh, stage, **options)
    self.gather()
    for unit in self.units:
        unit.fetch().wait()
    self.parameters = list(model.parameters())
    self.shards = [parameter.data.view(-1) for parameter in self.parameters]
    for parameter, shard in zip(self.parameters, self.shards, strict=True):
        owner = parameter.spec.owner and mesh.shard.rank == 0
        shard.spec = replace(parameter.spec, flat_range=(0, shard.numel()), owner=owner)


@replaces("unsharded optimizer", "step03_zero.zero:Zero.finish")
def _(self):
    views = {}

    def gather_first(unit):
        collectives.all_gather(unit.bucket.flat, unit.reduced, unit.group)
        views.update(unit.bucket.views)
        start_over(unit)

    with mock.patch.object(Unit, "start_over", gather_first):
        finish(self)
    return [views[parameter].view(-1) for parameter in self.parameters]


STEPS = {2: DATA_PARALLEL, 3: ZERO}
