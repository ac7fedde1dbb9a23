"""Known-wrong variants of ZeRO, as small patches: what each gets wrong, and then how.

Those of the first half train another model. Those of the second train the right one, but hold, send or wait for more
than they should: no curve shows it.
"""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import torch

import step03_zero.train
from common import collectives
from common.parameter import ParameterSpec
from common.process_groups import Group
from step03_zero import zero
from step03_zero.zero import Unit, Zero


def _patch(stack: ExitStack, owner, name: str, function) -> None:
    stack.enter_context(mock.patch.object(owner, name, function))


# ---- wrong numbers ---------------------------------------------------------------------------------------------------


def _stale_weights(stack):
    """Stages 1 and 2: what was gathered once is taken for the weights of the next step as well."""

    _patch(stack, Zero, "finish", _finish_that_keeps_weights())


def _finish_that_keeps_weights():
    """Zero.finish, but what is gathered counts as gathered after the update too."""
    finish = Zero.finish

    def wrong(self):
        gathered = [unit.gathering for unit in self.buckets]
        gradients = finish(self)
        for unit, gathering in zip(self.buckets, gathered, strict=True):
            unit.gathering = gathering
        return gradients

    return wrong


def _stale_last_unit(stack):
    """Stage 3: the unit that stays between forward and backward stays over the update, too."""
    free = Zero._free

    def wrong(self, index):
        if index < len(self.regions) - 1:
            free(self, index)

    _patch(stack, Zero, "_free", wrong)
    _patch(stack, Zero, "finish", _finish_that_keeps_weights())


def _decay_on_norms(stack):
    """A flat shard mixes matrices and gains, so everything decays."""
    _patch(stack, ParameterSpec, "decay", property(lambda self: True))


def _no_decay_of_flat_shards(stack):
    """Decay for tensors of two axes, of which there are none any more."""
    decay = ParameterSpec.decay.fget
    _patch(stack, ParameterSpec, "decay", property(lambda self: self.flat_range is None and decay(self)))


def _norm_of_the_local_shard(stack):
    """Each rank clips by the norm of what it holds."""
    norm = step03_zero.train.gradient_norm
    alone = Group("alone", (0,), 0)
    _patch(stack, step03_zero.train, "gradient_norm", lambda tensors, gradients, world: norm(tensors, gradients, alone))


def _norm_counts_replicas(stack):
    """Hybrid sharding: the squares of each copy of a shard are added."""

    def norm(tensors, gradients, world):
        total = torch.stack(torch._foreach_norm(gradients)).square().sum()
        collectives.all_reduce(total, world)
        return total.sqrt()

    _patch(stack, step03_zero.train, "gradient_norm", norm)


def _norm_counts_padding(stack):
    """The norm of the flat buffers, with whatever lies behind the last parameter."""
    allocate, finish, flat = Unit.allocate_gradient, Zero.finish, []

    def allocate_dirty(self):
        allocate(self)
        self.gradient.fill_(1e-3)  # as memory may be

    def keep(self):
        sums, free = {}, Unit.free_gradient

        def note_first(unit):
            sums[unit] = unit.reduced
            free(unit)

        with mock.patch.object(Unit, "free_gradient", note_first):
            gradients = finish(self)
        flat[:] = [sums[unit] for unit in self.buckets]
        return gradients

    def norm(tensors, gradients, world):
        total = torch.stack(torch._foreach_norm(flat)).square().sum()
        collectives.all_reduce(total, world)
        return total.sqrt()

    _patch(stack, Unit, "allocate_gradient", allocate_dirty)
    _patch(stack, Zero, "finish", keep)
    _patch(stack, step03_zero.train, "gradient_norm", norm)


def _only_last_micro_batch(stack):
    """Each reduce-scatter overwrites the shard's sum instead of adding to it."""
    complete = Unit.complete

    def wrong(self):
        self.reduced = None
        complete(self)

    _patch(stack, Unit, "complete", wrong)


def _no_sum_over_replicas(stack):
    """Hybrid sharding: each group of shards trains on its own samples."""
    all_reduce = collectives.all_reduce

    def wrong(tensor, group, *rest, **options):
        return collectives.Work() if group.name == "replica" else all_reduce(tensor, group, *rest, **options)

    _patch(stack, collectives, "all_reduce", wrong)


def _summed_over_replicas_each_micro_batch(stack):
    """Hybrid sharding: sums that are over the replicas already are added to and summed again."""
    complete = Zero._complete

    def wrong(self):
        last, self.last_micro_batch = self.last_micro_batch, True
        unit = self.in_flight[0]
        complete(self)
        unit.work.wait()
        if not last:
            unit.work = None
        self.last_micro_batch = last

    _patch(stack, Zero, "_complete", wrong)


def _sums_in_bfloat16(stack):
    """Gradients are added up and reduced in the type of the weights."""
    finish = Zero.finish
    _patch(stack, zero, "wide", lambda dtype: dtype)
    _patch(stack, Zero, "finish", lambda self: [gradient.float() for gradient in finish(self)])


# ---- right numbers, wrong structure ----------------------------------------------------------------------------------


def _all_reduce_poses(stack):
    """A reduce-scatter that is an all-reduce of which each rank takes its part: twice the bytes."""

    def wrong(output, input, group, async_op=False):
        collectives.all_reduce(input, group)
        output.copy_(input[group.rank * output.numel() :][: output.numel()])
        return collectives.Work()

    _patch(stack, collectives, "reduce_scatter", wrong)


def _gloo_reduce_scatter(stack):
    """gloo's own reduce-scatter: the log calls it one, but inside it is an all-reduce."""

    def wrong(work, output, input, group):
        work.launch(collectives._reduce_scatter, output, input.clone(), group=group.handle, async_op=True)

    _patch(stack, collectives.gloo, "reduce_scatter", wrong)


def _unsharded_optimizer(stack):
    """Every rank gets all sums, holds all moments and updates all weights."""
    initialise, finish = Zero.__init__, Zero.finish

    def wrong(self, model, config, mesh):
        initialise(self, model, config, mesh)
        self.gather()
        for unit in self.buckets:
            unit.use()
        self.shards = [parameter.data.view(-1) for parameter in self.parameters]
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            owner = parameter.spec.owner and mesh.shard.rank == 0
            shard.spec = replace(parameter.spec, flat_range=(0, shard.numel()), owner=owner)

    def whole(self):
        views, free = {}, Unit.free_gradient

        def gather_first(unit):
            collectives.all_gather(unit.gradient, unit.reduced, unit.group)
            views.update(unit.views)
            free(unit)

        with mock.patch.object(Unit, "free_gradient", gather_first):
            finish(self)
        return [views[parameter].view(-1) for parameter in self.parameters]

    _patch(stack, Zero, "__init__", wrong)
    _patch(stack, Zero, "finish", whole)


def _whole_model_at_first(stack):
    """All weights are drawn, and then all but a shard are thrown away."""
    initialise = Zero.__init__

    def wrong(self, model, config, mesh):
        whole = [torch.zeros(p.shape, dtype=config.torch_dtype) for p in model.parameters()]
        initialise(self, model, config, mesh)
        del whole

    _patch(stack, Zero, "__init__", wrong)


def _never_freed(stack):
    """Stage 3 gathers, and keeps the memory."""
    _patch(stack, Unit, "free", lambda self: setattr(self, "gathering", None))


def _no_prefetch(stack):
    """Stage 3 gathers a layer when it needs it, and waits."""
    _patch(stack, Zero, "_fetch", lambda self, index, backward=False: None)


def _prefetch_of_two(stack):
    """Stage 3 gathers two layers ahead: three are there at once."""
    fetch = Zero._fetch

    def wrong(self, index, backward=False):
        fetch(self, index, backward)
        fetch(self, index + (-1 if backward else 1), backward)

    _patch(stack, Zero, "_fetch", wrong)


def _last_unit_freed(stack):
    """Stage 3 frees the last unit after the forward, and gathers it again at once."""
    after_forward = Zero._after_forward

    def wrong(self, index, output):
        after_forward(self, index, output)
        self._free(index)

    _patch(stack, Zero, "_after_forward", wrong)


def _waits_for_all_gathers(stack):
    """Stages 1 and 2: no layer runs before all weights are there."""
    gather = Zero.gather

    def wrong(self):
        gather(self)
        for unit in self.buckets:
            unit.use()

    _patch(stack, Zero, "gather", wrong)


def _reduced_after_the_backward(stack):
    """Every reduce-scatter begins when the backward is over."""
    _patch(stack, Zero, "_launch_complete", lambda self: None)


def _gradients_kept(stack):
    """Stage 2 keeps the memory of whole gradients."""
    complete = Unit.complete

    def wrong(self):
        stage, self.stage = self.stage, 1
        complete(self)
        self.stage = stage

    _patch(stack, Unit, "complete", wrong)


MUTANTS = {
    "weights of the step before": _stale_weights,
    "last unit of the step before": _stale_last_unit,
    "decay on norms": _decay_on_norms,
    "no decay of flat shards": _no_decay_of_flat_shards,
    "norm of the local shard": _norm_of_the_local_shard,
    "norm counts replicas": _norm_counts_replicas,
    "norm counts padding": _norm_counts_padding,
    "only the last micro-batch in the shard": _only_last_micro_batch,
    "no sum over replicas": _no_sum_over_replicas,
    "summed over replicas each micro-batch": _summed_over_replicas_each_micro_batch,
    "sums in bfloat16": _sums_in_bfloat16,
    "all-reduce poses as reduce-scatter": _all_reduce_poses,
    "gloo's own reduce-scatter": _gloo_reduce_scatter,
    "unsharded optimizer": _unsharded_optimizer,
    "whole model at first": _whole_model_at_first,
    "parameters never freed": _never_freed,
    "no prefetch": _no_prefetch,
    "prefetch of two": _prefetch_of_two,
    "last unit freed and gathered again": _last_unit_freed,
    "waits for all gathers": _waits_for_all_gathers,
    "reduced after the backward": _reduced_after_the_backward,
    "gradients kept": _gradients_kept,
}
