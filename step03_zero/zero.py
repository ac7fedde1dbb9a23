"""ZeRO by hand: data parallelism in which every rank keeps 1/N of what all of them used to keep.

  stage 1  the optimizer's state (and master weights): gradients are reduce-scattered, each rank updates its shard of
           the parameters, and an all-gather brings the shards together again
  stage 2  also the gradients: a bucket is reduce-scattered during the backward, and freed before the next one leaves
  stage 3  also the parameters: a layer is gathered right before it is used and freed right after
           (Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 5; Zhao et al., "PyTorch FSDP", arXiv:2304.11277)
  stage 0  none of them: step 2

It is step 2 with other collectives. Weights lie in flat units, gradients in flat buffers of the same layout, and a
shard is 1/N of a unit, wherever that cuts a matrix: every collective moves one contiguous buffer. What the optimizer
sees are pieces of shards, one for each parameter that a shard touches: a piece's spec says which elements of which
parameter it holds, and that is all that weight decay, the gradient norm and checkpoints need.

With replicas (hybrid sharding; MiCS, Zhang et al., arXiv:2205.00119) the N ranks of a `shard` group hold the model once
and other groups hold copies of it; the summed shards are then summed over the `replica` group as well.
"""

import math
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from common import collectives
from common.config import TrainConfig
from common.initialisation import allocate_parameters, enough_memory, initial_values
from common.model import Decoder, at_least_float32
from common.process_groups import Group, Mesh
from step02_data_parallel.data_parallel import DataParallel, fill_buckets

# Reduce-scatters under way while the next bucket of stages 1 and 2 fills (those of stage 3 end where the next layer's
# backward does). Each holds memory: its bucket, which stage 2 then frees, and where a reduce-scatter is an all-to-all
# (gloo) as much again for what it receives.
IN_FLIGHT = 1


class Unit:
    """Parameters that are gathered, reduced and freed together, flat and padded to N equal shards.

    weights   all of them; in stage 3 without memory, except between `fetch` and `free`
    shard     this rank's 1/N of them: a part of `weights`, or in stage 3 a tensor of its own
    gradient  all of it, in at least float32, from the first gradient on; stages 2 and 3 free it when it is reduced
    reduced   this rank's 1/N of its sum: a part of `gradient`, or in stages 2 and 3 a tensor of its own
    """

    def __init__(self, parameters: list[nn.Parameter], stage: int, group: Group):
        self.parameters, self.stage, self.group = parameters, stage, group
        share = -(-sum(parameter.numel() for parameter in parameters) // group.size)
        self.mine = slice(group.rank * share, (group.rank + 1) * share)
        self.weights = parameters[0].data.new_empty(share * group.size)
        self.shard = self.weights[self.mine] if stage < 3 else self.weights.new_empty(share)
        self.ranges, self.pieces, start = {}, [], 0
        for parameter in parameters:
            stop = start + parameter.numel()
            parameter.data = self.weights[start:stop].view(parameter.shape)
            self.ranges[parameter] = slice(start, stop)
            low, high = max(start, self.mine.start), min(stop, self.mine.stop)
            if low < high:  # (where in the shard, of which parameter, which elements of it)
                where = slice(low - self.mine.start, high - self.mine.start)
                self.pieces.append((where, parameter, (low - start, high - start)))
            start = stop
        self.gathering = None  # the all-gather under way or done; None: `weights` are not there
        self.gradient, self.views, self.reduced = None, {}, None
        self.missing = set(parameters)  # whose gradient has not come yet (stages 0 to 2 launch when none is)
        self.work = None  # the reduction under way
        self.launched = False  # in this backward
        if stage == 3:
            self.free()

    # ---- weights ----

    def fetch(self) -> None:
        """Begin to gather the weights, unless that has happened."""
        if self.gathering is None:
            if self.stage == 3:
                self.weights.untyped_storage().resize_(self.weights.numel() * self.weights.element_size())
            self.gathering = collectives.all_gather(self.weights, self.shard, self.group, async_op=True)

    def use(self) -> None:
        """The weights are there when this returns."""
        self.fetch()
        self.gathering.wait()

    def free(self) -> None:
        """Stage 3: give the memory back. Parameters, and what autograd saved, are views that `fetch` refills."""
        self.gathering = None
        self.weights.untyped_storage().resize_(0)

    # ---- gradients ----

    def allocate_gradient(self) -> None:
        self.gradient = torch.empty_like(self.weights, dtype=at_least_float32(self.weights.dtype))
        self.views = {p: self.gradient[where].view(p.shape) for p, where in self.ranges.items()}

    def free_gradient(self) -> None:
        self.gradient, self.views = None, {}

    def reduce_scatter(self) -> None:
        """Begin to sum the gradient over the group: this rank's shard of it becomes that of the sum."""
        self.work = collectives.reduce_scatter(self.gradient[self.mine], self.gradient, self.group, async_op=True)

    def complete(self) -> None:
        """Wait for the reduce-scatter; stages 2 and 3 keep the shard of the sum and free the rest."""
        self.work.wait()
        self.work, summed = None, self.gradient[self.mine]
        if self.stage < 2:
            self.reduced = summed
        else:
            self.reduced = summed.clone() if self.reduced is None else self.reduced.add_(summed)
            # now, whoever refers to it: gloo's thread does so a moment longer
            self.gradient.untyped_storage().resize_(0)
            self.free_gradient()


@dataclass
class Region:
    """A part of the model that runs in one go, from its `first` to its `last` module, and the units that it needs."""

    first: nn.Module
    last: nn.Module
    units: list[Unit] = field(default_factory=list)

    @property
    def parameters(self) -> list[nn.Parameter]:
        modules = dict.fromkeys((self.first, self.last))
        return [parameter for module in modules for parameter in module.parameters()]

    @property
    def backward_reads_weights(self) -> bool:
        """An embedding's does not: it knows rows by their indices."""
        return not isinstance(self.first, nn.Embedding)


class Zero(DataParallel):
    """Gives a model on the meta device its initial values, sharded as `config.zero` says, and its gradients their sum.

    `shards` are the tensors that this rank updates: one-dimensional pieces of parameters, with specs as those have.
    Of the attributes of step 2, `buckets` are units here, and `group` is the replica group: one rank, and so nothing to
    do, except in hybrid sharding and in stage 0, where it is all ranks.

    With `keep_gathered`, stage 3 gathers all weights once a step and keeps them until the update, instead of gathering
    and freeing them layer by layer in every micro-batch.

    An exception in the middle of a backward leaves it with half-summed gradients: end the run, or make a new one.
    """

    def __init__(self, model: Decoder, config: TrainConfig, mesh: Mesh, keep_gathered: bool = False):
        self.stage = config.zero
        self.by_layer = self.stage == 3 and not keep_gathered
        self.each_micro_batch = self.stage >= 2 and config.zero_reduce == "micro-batch"
        self.last_micro_batch, self.in_flight = True, deque()
        with enough_memory(model, mesh.device):
            like = torch.empty((), dtype=config.torch_dtype, device=mesh.device)
            allocate_parameters(model, lambda each: like.expand(each.shape))  # shapes without memory: units bring it
            self.regions = [Region(model.embedding, model.embedding)] if model.has_embedding else []
            self.regions += [Region(layer, layer) for layer in model.layers.values()]
            self.regions += [Region(model.norm, model.head)] if model.has_head else []
            parameters = list(model.parameters())
            if self.stage == 3:  # a unit for each region
                groups, seen = [], set()
                for region in self.regions:
                    own = [parameter for parameter in region.parameters if parameter not in seen]  # tied: the first's
                    groups[:0] = fill_buckets(own, "bucket", math.inf)
                    seen.update(own)
            else:
                groups = fill_buckets(parameters, config.dp_mode, config.bucket_mb)
            units = [Unit(group, self.stage, mesh.shard) for group in groups]
            super().__init__(parameters, mesh.replica, config.dp_mode, buckets=units)
            for index, region in enumerate(self.regions):
                region.units = list(dict.fromkeys(self.bucket_of[parameter] for parameter in region.parameters))
                self._watch(region, index)
            self.shards = []
            for unit in units:
                for where, parameter, piece in unit.pieces:
                    self.shards.append(unit.shard[where])
                    self.shards[-1].spec = replace(parameter.spec, flat_range=piece)
            initial_values(config)(self.shards)

    # ---- weights: gathered when they are needed ----------------------------------------------------------------------

    def gather(self) -> None:
        """At the start of a step: stages 1 and 2 begin to gather all shards, stage 3 those of the first region. The
        forward waits for them region by region, so that later ones arrive while earlier ones run.
        """
        for unit in () if self.by_layer else reversed(self.buckets):  # in the order of the forward
            unit.fetch()
        self._fetch(0)

    def _watch(self, region: Region, index: int) -> None:
        region.first.register_forward_pre_hook(lambda module, inputs: self._before_forward(index, inputs[0]))
        if self.by_layer:
            region.last.register_forward_hook(lambda module, inputs, output: self._after_forward(index, output))

    def _before_forward(self, index: int, x: torch.Tensor) -> None:
        for unit in self.regions[index].units:
            unit.use()
        self._fetch(index + 1)  # prefetch: the next one arrives while this one computes

    def _after_forward(self, index: int, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._between_backwards(index + 1))
        if index + 1 < len(self.regions) or not output.requires_grad:  # the backward begins with the last one: it stays
            self._free(index)

    def _between_backwards(self, index: int) -> None:
        """The backward of region `index` is over, that of `index - 1` begins (with its recomputation, if any)."""
        if index < len(self.regions):
            self._free(index)
        while self.in_flight:  # the gather below needs memory
            self._complete()
        if index > 0 and self.regions[index - 1].backward_reads_weights:
            for unit in self.regions[index - 1].units:
                unit.use()
            self._fetch(index - 2, backward=True)
        if index < len(self.regions) and self.synchronising:
            # Not when the last gradient came, as in stages 1 and 2: a rank on which some weight is not used would issue
            # this among other gathers than its peers.
            # Units lie in the reverse order of regions: these are the ones of region `index` and above. The embedding's
            # comes last, in `_end_of_backward`: there is no border below it.
            for unit in self.buckets[self.launched : len(self.regions) - index]:
                self._launch(unit)

    def _fetch(self, index: int, backward: bool = False) -> None:
        if self.by_layer and 0 <= index < len(self.regions):
            if self.regions[index].backward_reads_weights or not backward:
                for unit in self.regions[index].units:
                    unit.fetch()

    def _free(self, index: int) -> None:
        for unit in self.regions[index].units:
            unit.free()

    # ---- gradients: summed into shards -------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, active: bool = True):
        """As in step 2, while `active` gradients only accumulate; but where each micro-batch is reduce-scattered,
        `active` only tells that this is not the last one.
        """
        self.last_micro_batch = not active
        with super().no_sync(active and not self.each_micro_batch):
            yield
            if self.each_micro_batch:
                self._end_of_backward()
        self.last_micro_batch = True

    def only_accumulate(self):
        """Backward passes in here add up gradients and start no communication, because the rest of this micro-batch's
        gradients will be added later.
        """
        return super().no_sync()

    def accumulate(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add one micro-batch's gradient of one parameter; this may launch reduce-scatters."""
        unit = self.bucket_of[parameter]
        if unit.launched:  # two forwards in one backward, say: a gradient would be lost
            raise RuntimeError(f"{parameter.spec.name}: a gradient came after its bucket was launched")
        if unit.gradient is None:
            unit.allocate_gradient()
        super().accumulate(parameter, gradient)
        # Free what has been sent. Not where that sends more: all ranks must do so in one order, and time is not one.
        while self.in_flight and self.group.size == 1 and self.in_flight[0].work.is_completed():
            self._complete()

    def _launch_complete(self) -> None:
        if not self.by_layer:
            super()._launch_complete()

    def _launch(self, unit: Unit) -> None:
        if unit.gradient is None:  # not used on this rank in this micro-batch
            unit.allocate_gradient()
        for parameter in unit.views.keys() - self.filled:
            unit.views[parameter].zero_()
        while len(self.in_flight) >= IN_FLIGHT:  # before the next one needs memory
            self._complete()
        unit.reduce_scatter()
        unit.launched = True
        self.in_flight.append(unit)
        self.launched += 1
        if unit.group.size == 1:  # it is complete already
            self._complete()

    def _complete(self) -> None:
        unit = self.in_flight.popleft()
        unit.complete()
        if self.last_micro_batch:  # and then the sum over replicas; in stage 0 it is the whole sum, that of step 2
            unit.work = collectives.all_reduce(unit.reduced, self.group, async_op=self.mode != "naive")

    def launch_rest(self) -> None:
        """Launch what no hook has launched."""
        for unit in self.buckets[self.launched :]:
            self._launch(unit)

    def _end_of_backward(self) -> None:
        """Launch what is left, wait for all, and be ready for another micro-batch."""
        self.launch_rest()
        while self.in_flight:
            self._complete()
        for unit in self.buckets:
            unit.missing, unit.launched = set(unit.parameters), False
        self.filled.clear()
        self.launched = 0

    def finish(self) -> list[torch.Tensor]:
        """After the last backward: the summed gradients, one for each of `shards`."""
        if not self.each_micro_batch:
            self._end_of_backward()
        gradients = []
        for unit in self.buckets:
            unit.work.wait()
            unit.work = None
            gradients += [unit.reduced[where] for where, _, _ in unit.pieces]
            unit.gathering = None  # the optimizer is about to change the shards
            if self.stage == 3 and not self.by_layer:
                unit.free()
            unit.free_gradient()
            unit.reduced = None  # the list is the last that holds it, until the optimizer has used it
        return gradients
