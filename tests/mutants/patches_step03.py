"""Known-wrong variants of ZeRO: what each gets wrong, and then how.

Those of the first half train another model. Those of the second train the right one, but hold, send or wait for more
than they should: no curve shows it.
"""

from dataclasses import replace
from unittest import mock

import torch

from common import collectives
from common.parameter import ParameterSpec
from step01_single_gpu.mixed_precision import Optimizer
from step02_data_parallel import data_parallel
from step03_zero import train
from step03_zero.by_layer import ZeroByLayer
from step03_zero.unit import Unit
from step03_zero.zero import Zero
from tests.mutants import Mutants

MUTANTS = Mutants()
edits, replaces = MUTANTS.edits, MUTANTS.replaces
initialise, finish, start_over, make_bucket = Zero.__init__, Zero.finish, Unit.start_over, Unit.make_bucket
backward, decay = Zero.backward, ParameterSpec.decay.fget
OWNED, REPLICAS = "if parameter.spec.owner]", "collectives.all_reduce(self.reduced, self.replicas, async_op=async_op)"
SUM_REPLICAS, GIVEN_BACK = 'unit.sum_over_replicas(async_op=self.mode != "naive")', "untyped_storage().resize_(0)"

# ---- wrong numbers ---------------------------------------------------------------------------------------------------

# Stages 1 and 2: what was gathered once is taken for the weights of the next step as well. In stage 3 the unit that
# stays between forward and backward stays over the update, too
kept = "unit.start_over()", "kept = unit.gathering; unit.start_over(); unit.gathering = kept"
edits("weights of the step before", Zero, "finish", kept)
edits("last unit of the step before", Zero, "finish", kept)
stays = "if any(parameter.spec.name == 'norm.weight' for parameter in self.parameters): return"
edits("last unit of the step before", Unit, "free", ("self.gathering = None", f"{stays}\n    self.gathering = None"))
# A flat shard mixes matrices and gains, so everything decays; or no tensor has two axes any more, so nothing does
replaces("decay on norms", ParameterSpec, "decay")(property(lambda self: True))
no_decay = property(lambda self: self.flat_range is None and decay(self))
replaces("no decay of flat shards", ParameterSpec, "decay")(no_decay)
# Each rank clips by the norm of what it holds
edits("norm of the local shard", train, "gradient_norm", ("collectives.all_reduce(total, world)", "pass"))
# Hybrid sharding: the squares of each copy of a shard are added
edits("norm counts replicas", train, "gradient_norm", (OWNED, "]"))

reduced = []  # of all units in this step


@replaces("norm counts padding", train, "gradient_norm")
def _(tensors, gradients, world):
    """The norm of the flat buffers, with whatever is behind the last parameter."""
    total = torch.stack(torch._foreach_norm(reduced)).square().sum()
    collectives.all_reduce(total, world)
    return total.sqrt()


@replaces("norm counts padding", Zero, "finish")
def _(self):
    reduced.clear()
    with mock.patch.object(Unit, "start_over", lambda unit: (reduced.append(unit.reduced), start_over(unit))):
        return finish(self)


@replaces("norm counts padding", Unit, "make_bucket")
def _(self):
    if self.bucket is None:
        make_bucket(self).flat.fill_(1e-3)  # as memory may be
    return self.bucket


# Each reduce-scatter overwrites the shard's sum instead of adding to it
overwritten = "self.reduced.add_(summed)", "summed.clone()"
edits("only the last micro-batch in the shard", Unit, "complete", overwritten)
# Hybrid sharding: each group of shards trains on its own samples
edits("no sum over replicas", Unit, "sum_over_replicas", (REPLICAS, "collectives.Work()"))
# Hybrid sharding: sums that are over the replicas already are added to and summed again
each = ("if self.last_micro_batch:", "if True:"), (SUM_REPLICAS, "unit.sum_over_replicas(async_op=False)")
edits("summed over replicas each micro-batch", Zero, "_complete", *each)
# Gradients are added up and reduced in the type of the weights
replaces("sums in bfloat16", data_parallel, "at_least_float32")(lambda dtype: dtype)
edits("sums in bfloat16", Zero, "finish", ("return gradients", "return [each.float() for each in gradients]"))
# There are no master weights: an update smaller than half a step of bfloat16 is lost
rounded = "torch._foreach_copy_(self.masters, [each.bfloat16() for each in self.masters])"
copied = "self._copy_to_parameters()"
edits("updates in bfloat16", Optimizer, "step", (copied, f"{rounded}; {copied}"))

# ---- right numbers, wrong structure ----------------------------------------------------------------------------------


@replaces("all-reduce poses as reduce-scatter", collectives, "reduce_scatter")
def _(output, input, group, async_op=False):
    """A reduce-scatter that is an all-reduce of which each rank takes its part: twice the bytes."""
    collectives.all_reduce(input, group)
    output.copy_(input[group.rank * output.numel() :][: output.numel()])
    return collectives.Work()


@replaces("gloo's own reduce-scatter", collectives.gloo, "reduce_scatter")
def _(work, output, input, group):
    """The log calls it a reduce-scatter, but inside it is an all-reduce."""
    work.launch(collectives._reduce_scatter, output, input.clone(), group=group.handle, async_op=True)


@replaces("unsharded optimizer", Zero, "__init__")
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


@replaces("unsharded optimizer", Zero, "finish")
def _(self):
    views = {}

    def gather_first(unit):
        collectives.all_gather(unit.bucket.flat, unit.reduced, unit.group)
        views.update(unit.bucket.views)
        start_over(unit)

    with mock.patch.object(Unit, "start_over", gather_first):
        finish(self)
    return [views[parameter].view(-1) for parameter in self.parameters]


# All weights are drawn, and then all but a shard are thrown away
whole = "whole = [torch.zeros(each.shape, dtype=config.torch_dtype) for each in model.parameters()]"
edits("whole model at first", Zero, "__init__", ("like = torch.empty(", f"{whole}; like = torch.empty("))
# Stage 3 gathers and keeps the memory; or it gathers a layer when it needs it, and waits
edits("parameters never freed", Unit, "free", (f"self.weights.{GIVEN_BACK}", "pass"))
replaces("no prefetch", ZeroByLayer, "_prefetch")(lambda self, region: None)
# Stage 3 gathers two layers ahead, so that three are there at once
place = "self.regions.index(region)"  # of its neighbours, one is the region that computes
near = f"self.regions[max(0, {place} - 1) : {place} + 2]"
two = "in region.units:", f"in [unit for each in {near} for unit in each.units]:"
edits("prefetch of two", ZeroByLayer, "_prefetch", two)
# Stage 3 frees the last unit after the forward, and gathers it again at once
last = "if index + 1 < len(self.regions) or not output.requires_grad:", "if True:"
edits("last unit freed and gathered again", ZeroByLayer, "_after_forward", last)
# Stages 1 and 2: no layer runs before all weights are there
edits("waits for all gathers", Zero, "gather", ("unit.fetch()", "unit.fetch().wait()"))
# Stage 3 gathers the next layer while a bucket that is being reduced still needs memory. That shows where the network
# is slow: what has arrived already is freed anyway
edits("gathers beside a reduction", ZeroByLayer, "_before_backward", ("self._complete()", "pass"))
replaces("gathers beside a reduction", collectives.Work, "is_completed")(lambda self: False)
always = "if self.stage >= 2 or unit.replicas.size > 1:", "if True:"
edits("stage 1 waits for the previous bucket", Zero, "_launch", always)
# Every reduce-scatter begins when the backward is over; or no backward counts as the last one of a step
replaces("reduced after the backward", Zero, "_launch_complete")(lambda self: None)
replaces("last backward of ZeRO missed", Zero, "backward")(lambda self, last: backward(self, last=False))
# Of several units that one gradient completes, only the first is launched
first = "self.units[self.next_unit :]", "self.units[self.next_unit : self.next_unit + 1]"
edits("one launch per gradient of ZeRO", Zero, "_launch_complete", first)
# Stage 2 keeps the memory of whole gradients
bucket_kept = (f"self.bucket.flat.{GIVEN_BACK}", "pass"), ("self.bucket = None", "pass")
edits("gradients kept", Unit, "complete", *bucket_kept)
# A bucket is reduced and forgotten, but something still holds that much memory
elsewhere = "Unit.kept = [*getattr(Unit, 'kept', []), self.bucket.flat.clone()]"
wait = "self.scattering.wait()"
edits("buckets kept elsewhere", Unit, "complete", (wait, f"{elsewhere}; {wait}"))
