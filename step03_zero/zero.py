"""ZeRO by hand: data parallelism in which every rank keeps 1/N of what all of them used to keep.

  stage 1  the optimizer's state (and master weights): gradients are reduce-scattered, each rank updates its shard of
           the parameters, and an all-gather brings the shards together again
  stage 2  also the gradients: a bucket is reduce-scattered during the backward, and freed before the next one is sent
  stage 3  also the parameters: a layer is gathered right before it is used and freed right after
           (Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 5; Zhao et al., "PyTorch FSDP", arXiv:2304.11277)
  stage 0  none of them: the sums of step 2

It is step 2 with other collectives. Weights are stored in flat units (unit.py) and gradients in step 2's buckets. This
file gathers all units once per step, which is what stages 0 to 2 need; by_layer.py adds stage 3's comings and goings. A
shard is 1/N of a unit, wherever that cuts a matrix, so every collective moves one contiguous buffer. The optimizer sees
pieces of shards, one for each parameter that a shard touches. The spec of a piece says which elements of which
parameter it holds, and that is all that weight decay, the gradient norm and checkpoints need.

Here is one step of one micro-batch with three units, numbered in the order in which the backward completes them:

                                stage 1                  stage 2
    at the start                begin to gather 2, 1, 0, the order in which the forward needs them
    before a region's forward   wait for the units that hold its weights
    0's last gradient           begin to reduce 0        begin to reduce 0
    1's last gradient           begin to reduce 1        wait for 0, free its bucket, begin to reduce 1
    2's last gradient           begin to reduce 2        wait for 1, free its bucket, begin to reduce 2
    at the end                  wait for 0, 1 and 2      wait for 2, free its bucket

(If 0 arrives earlier, stage 2 frees its bucket at the next gradient. Over gloo, where a reduce-scatter needs a buffer
for what it receives, two are in flight at most: stage 1, too, waits for 0 before it begins to reduce 2.)

With replicas (hybrid sharding; MiCS, Zhang et al., arXiv:2205.00119) each `shard` group holds one copy of the model,
and the summed shards are then summed over the `replica` group as well.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from common.parameter import attach_specs
from common.process_groups import Mesh
from common.weights.initialisation import InitialValues, allocate_parameters
from step01_single_gpu.mixed_precision import Add, take_gradients
from step02_data_parallel.data_parallel import fill_buckets
from step03_zero.unit import Unit


class Region:
    """A part of the model that runs in one go, and the units that it needs.

    modules: in the order in which they run. The last one returns one tensor, where the next region begins.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        self.first, self.last = modules[0], modules[-1]
        self.parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
        # An embedding only needs to know the rows that it has used
        self.backward_reads_weights = not all(isinstance(module, nn.Embedding) for module in modules)
        self.units: list[Unit] = []  # whose weights it needs
        self.owned: list[Unit] = []  # those that no earlier region needs, in the order of their launch


class Zero:
    """Gives a model its initial values, sharded over ranks, and sums its gradients.

    Args:
        model: any; its parameters are replaced, so it may be on the meta device.
        regions: lists of modules, see `Region`, in the order of the forward. Together they hold all parameters.
        values: fills the shards with the initial values that their specs describe.
        mesh: `device`, and the groups that the specs' `shard_groups` name: by default `shard`, whose ranks hold a copy
            of the model together, and `replica`, whose ranks hold the same shard of different copies.
        stage: 0 to 3, see above.
        dtype: of the weights; by default the one that they have in `model`.
        mode, bucket_mb: those of step 2.
        each_micro_batch: reduce-scatter the gradients of each micro-batch, in stages 2 and 3; else their sum.

    Raises ValueError for a parameter that is frozen or in no region.

    A step calls `gather`, for each micro-batch the forward and, in `backward`, the backward, and then `finish`. Weights
    are gathered once per step and kept until the update, in stage 3 too; `ZeroByLayer` frees them layer by layer. An
    exception in a backward leaves half-summed gradients behind.

    shards            what this rank updates: one-dimensional pieces of parameters, with specs
    units             in the order in which they are reduced, the reverse of the forward's
    regions           in the order of the forward; between them weights are gathered and freed

    State within a step, besides that of the units:
    synchronising     units may be launched in this backward, which starts their reduce-scatter
    last_micro_batch  units that have been reduced within the shard group are now summed over the replicas
    next_unit         index of the next unit to launch: all before it have been launched in this backward
    in_flight         units whose reduce-scatter is in flight: in stages 2 and 3 one at a time, as each needs memory
    """

    def __init__(
        self,
        model: nn.Module,
        regions: Sequence[Sequence[nn.Module]],
        values: InitialValues,
        mesh: Mesh,
        stage: int,
        *,
        dtype: torch.dtype | None = None,
        mode: str = "bucket",
        bucket_mb: float = 25.0,
        each_micro_batch: bool = False,
    ):
        self.stage, self.mode, self.each_micro_batch = stage, mode, each_micro_batch and stage >= 2
        self.synchronising = self.last_micro_batch = True
        self.next_unit, self.in_flight = 0, []
        attach_specs(model)
        dtype = dtype or next((each.dtype for each in model.parameters()), torch.float32)
        like = torch.empty((), dtype=dtype, device=mesh.device)
        allocate_parameters(model, lambda each: like.expand(each.shape))  # one element each; units bring the memory
        self.regions = [Region(modules) for modules in regions]
        held = {parameter for region in self.regions for parameter in region.parameters}
        if lost := [parameter.spec.name for parameter in model.parameters() if parameter not in held]:
            raise ValueError(f"{lost[0]} is in no region, whose modules bring their weights: nothing would gather it")
        self.units = [self._unit(some, mesh) for some in self._parameters_of_units(model, bucket_mb, mesh)]
        self.shards = [piece for unit in self.units for _, piece in unit.pieces]
        values(self.shards)
        self.index_of = {parameter: index for index, unit in enumerate(self.units) for parameter in unit.parameters}
        self._assign_units()
        take_gradients(list(model.parameters()), self)
        for index in range(len(self.regions)):
            self._add_hooks(index)

    # ---- construction: regions, units, and which region needs which unit ---------------------------------------------

    def _parameters_of_units(self, model: nn.Module, bucket_mb: float, mesh: Mesh) -> list[list[nn.Parameter]]:
        """The parameters of each unit: those of a bucket of step 2 or, in stage 3, of a region."""
        if self.stage < 3:
            return fill_all_buckets(list(model.parameters()), self.mode, bucket_mb, mesh)
        found, seen = [], set()
        for region in self.regions:
            own = [parameter for parameter in region.parameters if parameter not in seen]  # tied: the first region's
            found[:0] = fill_all_buckets(own, "bucket", math.inf)
            seen.update(own)
        return found

    def _unit(self, parameters: list[nn.Parameter], mesh: Mesh) -> Unit:
        shard, replica = (getattr(mesh, name) for name in parameters[0].spec.shard_groups)
        for parameter in parameters:
            parameter.spec.owner &= replica.rank == 0  # of the copies, the first one counts and saves it
        return Unit(parameters, self.stage, shard, replica)

    def _assign_units(self) -> None:
        taken: set[Unit] = set()
        for region in self.regions:
            region.units = list(dict.fromkeys(self.units[self.index_of[each]] for each in region.parameters))
            region.owned = [unit for unit in self.units if unit in region.units and unit not in taken]
            taken.update(region.units)

    def _add_hooks(self, index: int) -> None:
        self.regions[index].first.register_forward_pre_hook(partial(self._before_forward, index))

    # ---- forward: weights are gathered before they are needed --------------------------------------------------------

    def gather(self) -> None:
        """Start a step: begin to gather the weights. The forward waits for them."""
        for unit in reversed(self.units):  # in the order of the forward
            unit.fetch()

    def _before_forward(self, index: int, *_) -> None:
        for unit in self.regions[index].units:
            unit.fetch().wait()  # later units arrive while this region computes

    # ---- backward: gradients are added up, and reduced into shards ---------------------------------------------------

    @contextmanager
    def backward(self, last: bool, complete: bool = True) -> Iterator[None]:
        """Around a micro-batch's backward, in which gradients are added up and, when they are due, reduced.

        Args:
            last: of this step. Before it, gradients are only added up, as in `no_sync` of PyTorch's DDP. (If each
                micro-batch is reduce-scattered, only the sum over replicas waits for the last one.)
            complete: whether these are all of the micro-batch's gradients. If more of them follow, as after the first
                half of a backward that is split, nothing is launched.
        """
        self.last_micro_batch = last
        self.synchronising = complete and (last or self.each_micro_batch)
        yield
        if complete and self.each_micro_batch:
            self._end_of_backward()
        self.synchronising = self.last_micro_batch = True

    def accumulate(self, parameter: nn.Parameter, gradient: torch.Tensor | Add, whole: bool = True) -> None:
        """See step 1's `TakesGradients`. This may launch reduce-scatters."""
        index = self.index_of[parameter]
        if index < self.next_unit:  # two forwards in one backward, say: a gradient would be lost
            why = "do the regions run once each, in their order, and is there one forward per backward?"
            raise RuntimeError(f"{parameter.spec.name}: a gradient came after its bucket was launched; {why}")
        bucket = self.units[index].make_bucket()
        bucket.add(parameter, gradient)
        if self.synchronising and whole:
            bucket.missing.discard(parameter)
            self._launch_complete()
        # Free early what has already been summed. Not with replicas: that launches an all-reduce over them, in an order
        # that would depend on each rank's timing.
        if self.stage >= 2 and self.in_flight:
            (unit,) = self.in_flight
            if unit.replicas.size == 1 and unit.scattering.is_completed():
                self._complete()

    def _launch_complete(self) -> None:
        """Launch, in order, every next unit whose gradients have all been computed. (`naive`: none before the end.)"""
        for unit in self.units[self.next_unit :] if self.mode != "naive" else ():
            if unit.bucket is None or unit.bucket.missing:
                break
            self._launch(unit)

    def _launch(self, unit: Unit) -> None:
        if self.stage >= 2 or unit.replicas.size > 1:
            self._complete()  # before the next one needs memory, and so that the sum over replicas begins
        unit.reduce_scatter()
        self.in_flight.append(unit)
        self.next_unit += 1
        if unit.group.size == 1:  # it is complete already
            self._complete()

    def _complete(self) -> None:
        """Wait for the reduce-scatters in flight, and start the sums over replicas when they are due."""
        units, self.in_flight = self.in_flight, []
        for unit in units:
            unit.complete()
            if self.last_micro_batch:
                unit.sum_over_replicas(async_op=self.mode != "naive")

    def launch_rest(self) -> None:
        """Launch the units that no gradient and no hook has launched, without waiting for them. `finish` does so too:
        call this earlier if the rank has other parts of the model to work on meanwhile.
        """
        for unit in self.units[self.next_unit :]:
            self._launch(unit)

    def _end_of_backward(self) -> None:
        """Launch what is left, wait for all reduce-scatters, and be ready for another micro-batch."""
        self.launch_rest()
        self._complete()
        self.next_unit = 0

    # ---- after the last backward -------------------------------------------------------------------------------------

    def finish(self) -> list[torch.Tensor]:
        """Return the summed gradients, one for each of `shards`. Only the returned list keeps them alive."""
        if not self.each_micro_batch:
            self._end_of_backward()
        gradients = []
        for unit in self.units:
            unit.summing.wait()
            gradients += [unit.reduced[where] for where, _ in unit.pieces]
            unit.start_over()
        return gradients


def fill_all_buckets(
    parameters: list[nn.Parameter], mode: str, bucket_mb: float, mesh: Mesh | None = None
) -> list[list[nn.Parameter]]:
    """The buckets of step 2, if some gradients are summed over other groups of ranks: these never share a bucket.

    A parameter with `own_bucket` in its spec is alone: ranks with other layers hold it too, and all must cut it into
    the same shards. Parameters whose groups in `mesh` have one rank are alone, too: nothing is sent, and a gradient
    takes memory when it is computed, not when the first one of a large bucket is. Buckets are in the order in which the
    backward begins them.
    """
    alike: dict[tuple, list[nn.Parameter]] = {}
    for parameter in parameters:
        spec = parameter.spec
        alike.setdefault((spec.shard_groups, spec.name if spec.own_bucket else None), []).append(parameter)
    buckets = []
    for (groups, _), some in alike.items():
        alone = mesh is not None and all(getattr(mesh, name).size == 1 for name in groups)
        buckets += fill_buckets(some, "overlap" if alone else mode, bucket_mb)
    place = {parameter: index for index, parameter in enumerate(reversed(parameters))}
    return sorted(buckets, key=lambda bucket: place[bucket[0]])
