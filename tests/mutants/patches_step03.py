"""Known-wrong variants of ZeRO: what each gets wrong, and then how.

Those of the first half train another model. Those of the second train the right one, but hold, send or wait for more
than they should: no curve shows it.
"""

from dataclasses import replace
from unittest import mock

import torch

from common import collectives
from common.parameter import ParameterSpec
from common.process_groups import Group
from step01_single_gpu.mixed_precision import Optimizer
from step02_data_parallel import data_parallel
from step03_zero import train
from step03_zero.by_layer import ZeroByLayer
from step03_zero.unit import Unit
from step03_zero.zero import Zero
from tests.mutants import Mutants

MUTANTS = Mutants()
free, complete, start_over, make_bucket = Unit.free, Unit.complete, Unit.start_over, Unit.make_bucket
initialise, gather, finish, backward = Zero.__init__, Zero.gather, Zero.finish, Zero.backward
prefetch, after_forward = ZeroByLayer._prefetch, ZeroByLayer._after_forward
before_backward = ZeroByLayer._before_backward
complete_in_flight, launch = Zero._complete, Zero._launch
all_reduce, norm, decay = collectives.all_reduce, train.gradient_norm, ParameterSpec.decay.fget
update = Optimizer.step


# ---- wrong numbers ---------------------------------------------------------------------------------------------------


@MUTANTS.replaces("weights of the step before", Zero, "finish")
@MUTANTS.replaces("last unit of the step before", Zero, "finish")
def _(self):
    """Stages 1 and 2: what was gathered once is taken for the weights of the next step as well."""
    gathered = [unit.gathering for unit in self.units]
    gradients = finish(self)
    for unit, gathering in zip(self.units, gathered, strict=True):
        unit.gathering = gathering
    return gradients


@MUTANTS.replaces("last unit of the step before", Unit, "free")
def _(self):
    """Stage 3: the unit that stays between forward and backward stays over the update, too."""
    if all(parameter.spec.name != "norm.weight" for parameter in self.parameters):
        free(self)


# A flat shard mixes matrices and gains, so everything decays; or no tensor has two axes any more, so nothing does
MUTANTS.replaces("decay on norms", ParameterSpec, "decay")(property(lambda self: True))
no_decay = property(lambda self: self.flat_range is None and decay(self))
MUTANTS.replaces("no decay of flat shards", ParameterSpec, "decay")(no_decay)


@MUTANTS.replaces("norm of the local shard", train, "gradient_norm")
def _(tensors, gradients, world):
    """Each rank clips by the norm of what it holds."""
    return norm(tensors, gradients, Group("alone", (0,), 0))


@MUTANTS.replaces("norm counts replicas", train, "gradient_norm")
def norm_of_everything(tensors, gradients, world):
    """Hybrid sharding: the squares of each copy of a shard are added."""
    total = torch.stack(torch._foreach_norm(gradients)).square().sum()
    collectives.all_reduce(total, world)
    return total.sqrt()


reduced = []  # of all units in this step


@MUTANTS.replaces("norm counts padding", train, "gradient_norm")
def _(tensors, gradients, world):
    """The norm of the flat buffers, with whatever is behind the last parameter."""
    return norm_of_everything(tensors, reduced, world)


@MUTANTS.replaces("norm counts padding", Zero, "finish")
def _(self):
    reduced.clear()

    def note(unit):
        reduced.append(unit.reduced)
        start_over(unit)

    with mock.patch.object(Unit, "start_over", note):
        return finish(self)


@MUTANTS.replaces("norm counts padding", Unit, "make_bucket")
def _(self):
    if self.bucket is None:
        make_bucket(self).flat.fill_(1e-3)  # as memory may be
    return self.bucket


@MUTANTS.replaces("only the last micro-batch in the shard", Unit, "complete")
def _(self):
    """Each reduce-scatter overwrites the shard's sum instead of adding to it."""
    self.reduced = None
    complete(self)


@MUTANTS.replaces("no sum over replicas", collectives, "all_reduce")
def _(tensor, group, *rest, **options):
    """Hybrid sharding: each group of shards trains on its own samples."""
    return collectives.Work() if group.name == "replica" else all_reduce(tensor, group, *rest, **options)


@MUTANTS.replaces("summed over replicas each micro-batch", Zero, "_complete")
def _(self):
    """Hybrid sharding: sums that are over the replicas already are added to and summed again."""
    units, last, self.last_micro_batch = self.in_flight, self.last_micro_batch, True
    complete_in_flight(self)
    self.last_micro_batch = last
    for unit in units:
        unit.summing.wait()


# Gradients are added up and reduced in the type of the weights
MUTANTS.replaces("sums in bfloat16", data_parallel, "at_least_float32")(lambda dtype: dtype)
MUTANTS.replaces("sums in bfloat16", Zero, "finish")(lambda self: [gradient.float() for gradient in finish(self)])


@MUTANTS.replaces("updates in bfloat16", Optimizer, "step")
def _(self, *arguments, **options):
    """There are no master weights: an update smaller than half a step of bfloat16 is lost."""
    update(self, *arguments, **options)
    with torch.no_grad():
        for master in self.masters:
            master.copy_(master.bfloat16())


# ---- right numbers, wrong structure ----------------------------------------------------------------------------------


@MUTANTS.replaces("all-reduce poses as reduce-scatter", collectives, "reduce_scatter")
def _(output, input, group, async_op=False):
    """A reduce-scatter that is an all-reduce of which each rank takes its part: twice the bytes."""
    collectives.all_reduce(input, group)
    output.copy_(input[group.rank * output.numel() :][: output.numel()])
    return collectives.Work()


@MUTANTS.replaces("gloo's own reduce-scatter", collectives.gloo, "reduce_scatter")
def _(work, output, input, group):
    """The log calls it a reduce-scatter, but inside it is an all-reduce."""
    work.launch(collectives._reduce_scatter, output, input.clone(), group=group.handle, async_op=True)


@MUTANTS.replaces("unsharded optimizer", Zero, "__init__")
def _(self, model, config, mesh):
    """Every rank gets all sums, holds all moments and updates all weights."""
    initialise(self, model, config, mesh)
    self.gather()
    for unit in self.units:
        unit.fetch().wait()
    self.parameters = list(model.parameters())
    self.shards = [parameter.data.view(-1) for parameter in self.parameters]
    for parameter, shard in zip(self.parameters, self.shards, strict=True):
        owner = parameter.spec.owner and mesh.shard.rank == 0
        shard.spec = replace(parameter.spec, flat_range=(0, shard.numel()), owner=owner)


@MUTANTS.replaces("unsharded optimizer", Zero, "finish")
def _(self):
    views = {}

    def gather_first(unit):
        collectives.all_gather(unit.bucket.flat, unit.reduced, unit.group)
        views.update(unit.bucket.views)
        start_over(unit)

    with mock.patch.object(Unit, "start_over", gather_first):
        finish(self)
    return [views[parameter].view(-1) for parameter in self.parameters]


@MUTANTS.replaces("whole model at first", Zero, "__init__")
def _(self, model, config, mesh):
    """All weights are drawn, and then all but a shard are thrown away."""
    whole = [torch.zeros(parameter.shape, dtype=config.torch_dtype) for parameter in model.parameters()]
    initialise(self, model, config, mesh)
    del whole


# Stage 3 gathers and keeps the memory; or it gathers a layer when it needs it, and waits
MUTANTS.replaces("parameters never freed", Unit, "free")(lambda self: setattr(self, "gathering", None))
MUTANTS.replaces("no prefetch", ZeroByLayer, "_prefetch")(lambda self, region: None)


@MUTANTS.replaces("prefetch of two", ZeroByLayer, "_prefetch")
def _(self, region):
    """Stage 3 gathers two layers ahead, so that three are there at once."""
    index = self.regions.index(region)
    for each in self.regions[max(0, index - 1) : index + 2]:  # of its neighbours, one is the region that computes
        prefetch(self, each)


@MUTANTS.replaces("last unit freed and gathered again", ZeroByLayer, "_after_forward")
def _(self, index, *rest):
    """Stage 3 frees the last unit after the forward, and gathers it again at once."""
    after_forward(self, index, *rest)
    for unit in self.regions[index].units:
        unit.free()


@MUTANTS.replaces("waits for all gathers", Zero, "gather")
def _(self):
    """Stages 1 and 2: no layer runs before all weights are there."""
    gather(self)
    for unit in self.units:
        unit.fetch().wait()


@MUTANTS.replaces("gathers beside a reduction", ZeroByLayer, "_before_backward")
def _(self, index):
    """Stage 3 gathers the next layer while a bucket that is being reduced still needs memory."""
    not_the_first = iter([lambda self: None])
    with mock.patch.object(Zero, "_complete", lambda self: next(not_the_first, complete_in_flight)(self)):
        before_backward(self, index)


# Shown where the network is slow: what has arrived already is freed anyway
MUTANTS.replaces("gathers beside a reduction", collectives.Work, "is_completed")(lambda self: False)


@MUTANTS.replaces("stage 1 waits for the previous bucket", Zero, "_launch")
def _(self, unit):
    complete_in_flight(self)
    launch(self, unit)


# Every reduce-scatter begins when the backward is over; or no backward counts as the last one of a step
MUTANTS.replaces("reduced after the backward", Zero, "_launch_complete")(lambda self: None)
MUTANTS.replaces("last backward of ZeRO missed", Zero, "backward")(lambda self, last: backward(self, last=False))


@MUTANTS.replaces("one launch per gradient of ZeRO", Zero, "_launch_complete")
def _(self):
    """Of several units that one gradient completes, only the first is launched."""
    unit = self.units[self.next_unit] if self.next_unit < len(self.units) else None
    if unit and unit.bucket and not unit.bucket.missing:
        self._launch(unit)


@MUTANTS.replaces("gradients kept", Unit, "complete")
def _(self):
    """Stage 2 keeps the memory of whole gradients."""
    stage, self.stage = self.stage, 1
    complete(self)
    self.stage = stage


kept = []


@MUTANTS.replaces("buckets kept elsewhere", Unit, "complete")
def _(self):
    """A bucket is reduced and forgotten, but something still holds that much memory."""
    kept.append(self.bucket.flat.clone())
    complete(self)
