"""The parameters of a rank of a pipeline, before ZeRO divides them, and how large the sums of their gradients are when.

Nobody lists them: step 8's own functions build one layer of each sort on the meta device, which takes no memory, and
divide it over tensor ranks and over ranks of experts.
"""

import math
from bisect import bisect_right
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from types import SimpleNamespace
from typing import NamedTuple

import torch

from common.config import TrainConfig
from common.costs.vocabulary import WIDTHS
from common.group import Group
from common.model import Decoder, fused_attention
from common.model_config import ModelConfig
from step01_single_gpu.mixed_precision import LossScaler
from step02_data_parallel.data_parallel import pack
from step04_tensor_parallel.apply_tensor_parallel import apply_tensor_parallel
from step07_expert_parallel.apply_experts import apply_experts
from step08_5d.cost import Layout
from step08_5d.multi_token import add_block
from step08_5d.planning.memory.sizes import splits_backward
from step08_5d.planning.stages import ranges_of_rank

BUCKET = 1e6 * TrainConfig.bucket_mb  # bytes of gradients
NEVER_LATE = ("embedding.", "norm.", "router.")  # parts of names: parameters that no schedule puts off
# Parts of names: what the block of multi-token prediction has behind its layer (1), in front (-1), and before that (-2)
TURNS = {"shared_head.": 1, "eh_proj.": -1, "hnorm.": -1, "enorm.": -1}


class Parameter(NamedTuple):
    """A parameter of a rank."""

    size: float  # elements that a rank has before ZeRO
    region: int  # of the forward: embedding, each layer of the rank, last norm and head
    expert: bool = False
    late: bool = False  # whether its gradient comes in W, the second half of a backward (a matrix of a linear layer)
    turn: int = 0  # in the backward of a region, those with more come first


@lru_cache(maxsize=256)
def parameters_by_part(model: ModelConfig, tp: int, ep: int) -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of the first of tp (and of ep) ranks, in the order of a forward.

    The parts are embedding, dense (a layer), experts (a layer), second (the block of multi-token prediction, but for
    its embedding) and end (last norm and head, even if that is tied).
    Where tp does not divide the heads, as in some published runs, whatever a divisor of both divides is cut further.
    """
    if 1 < (fits := math.gcd(model.heads, tp)) < tp <= model.kv_heads:
        whole, cut = (parameters_by_part(model, ranks, ep) for ranks in (1, fits))
        return {
            part: tuple(
                own._replace(size=own.size * fits / tp) if own.size < all_of_it.size else own
                for own, all_of_it in zip(cut[part], whole[part], strict=True)
            )
            for part in cut
        }
    sorts = 2 if model.experts else 1
    model = replace(model, layers=sorts, dense_layers=1, tie_embeddings=False)  # a layer of each sort
    config = TrainConfig(dtype="float32")
    config.model_config = model
    names = {"tp": tp, "ep": ep, "cp": 1, "dp_cp": 1, "kv_replica": tp}
    groups = {name: Group(name, tuple(range(ranks)), 0) for name, ranks in names.items()}
    decoder = Decoder(model)
    if model.mtp:
        add_block(decoder, fused_attention)
    mesh = SimpleNamespace(device=torch.device("cpu"), **groups)
    apply_tensor_parallel(decoder, config, mesh)
    apply_experts(decoder, config, mesh, LossScaler(torch.float32))
    result: dict[str, list[Parameter]] = {}
    parts = {"embedding": "embedding", "layers.0": "dense", "norm": "end", "head": "end"}
    parts |= {f"layers.{sorts - 1}": "experts"} if model.experts else {}
    parts |= {f"layers.{sorts}": "second"} if model.mtp else {}
    for name, parameter in decoder.named_parameters():
        part = next(part for start, part in parts.items() if name.startswith(f"{start}."))
        expert, late = "expert" in parameter.spec.shard_groups[0], not any(each in name for each in NEVER_LATE)
        turn = next((turn for start, turn in TURNS.items() if start in name), 0)
        result.setdefault(part, []).append(Parameter(parameter.numel(), 0, expert, late, turn))
    return {part: tuple(some) for part, some in result.items()}


class SummedTogether(NamedTuple):
    """Parameters whose gradients are summed together: a bucket or, in ZeRO-3, a region."""

    size: float
    begun: int  # how many gradients of the rank have been stored when its first one is
    complete: int  # and when its last one is
    ranks: int  # over which stages 2 and 3 of ZeRO divide it


class RankParameters:
    """What a rank has: `parameters` in the order of the forward, `units` in the order in which the backward sends them.

    shards      elements of parameters beyond experts, and of experts
    stages      the layers [first, last) of each stage of the rank
    starts      the region of the first layer of each stage
    second      the region of the block of multi-token prediction; None: it has no such block
    """

    def __init__(self, model: ModelConfig, layout: Layout, rank: int):
        self.zero, self.by_layer = layout.zero, layout.zero == 3 and layout.pp == 1
        self.split = splits_backward(layout.schedule)
        self.stages = ranges_of_rank(model, layout, rank)
        self.is_first, self.is_last = rank == 0, rank == layout.pp - 1
        sizes = (last - first for first, last in self.stages)
        *self.starts, self.end = accumulate(sizes, initial=int(self.is_first))
        self.ties, self.is_whole = model.tie_embeddings, layout.is_whole
        self.second = self.end - 1 if self.is_last and model.mtp else None
        self.parameters = self._listed(model, layout)
        self.shards = tuple(sum(each.size for each in self.parameters if each.expert == one) for one in (False, True))
        self.regions: dict[int, list[Parameter]] = {}
        for each in self.parameters:
            self.regions.setdefault(each.region, []).append(each)
        self.early = sum(not each.late for each in self.parameters)
        self.units = self._units(layout, WIDTHS[layout.dtype][1])

    def _listed(self, model: ModelConfig, layout: Layout) -> list[Parameter]:
        parts = parameters_by_part(model, layout.tp, layout.ep)
        layers = [index for stage in self.stages for index in range(*stage)]
        regions = [parts["embedding"]] if self.is_first else []
        regions += [
            parts["experts" if model.has_experts(index) else "dense"] for index in layers if index < model.layers
        ]
        end = parts["end"][:1] if self.ties and self.is_whole else parts["end"]
        if self.second:
            looked_up = [] if self.is_whole else [each._replace(turn=-2) for each in parts["embedding"]]
            regions.append([*parts["second"], *looked_up])
            end = end[:1] if self.ties else end  # its matrix is that embedding
        if self.is_last:
            regions.append(end)
        return [
            Parameter(each.size, region, each.expert, each.late and self.split, each.turn)
            for region, some in enumerate(regions)
            for each in some
        ]

    def _units(self, layout: Layout, wide: int) -> list[SummedTogether]:
        result = []
        backward = sorted(range(len(self.parameters)), key=self._turn)
        place = {number: index for index, number in enumerate(backward, 1)}  # in the order in which they are stored
        for expert, holders in ((False, layout.copies), (True, layout.edp)):
            ranks = layout.sharing(expert)[0] if self.zero > 1 else holders
            numbers = [number for number, each in enumerate(self.parameters) if each.expert == expert]
            if self.zero == 3:
                buckets: dict[int, list[int]] = {}
                for number in reversed(numbers):
                    buckets.setdefault(self.parameters[number].region, []).append(number)
                groups = list(buckets.values())
            else:
                groups = []
                for _, own in groupby(numbers, key=self._stage):  # each stage has buckets of its own
                    some = list(own)
                    sizes = [wide * self.parameters[number].size for number in some]
                    filled = pack(sizes, BUCKET if holders > 1 else 0.0)  # nothing is sent: one for each parameter
                    groups += [[some[index] for index in bucket] for bucket in filled]
            for group in groups:
                size = sum(self.parameters[number].size for number in group)
                places = [place[number] for number in group]
                result.append(SummedTogether(size, min(places), max(places), ranks))
        return sorted(result, key=lambda unit: unit.begun)

    def _stage(self, number: int) -> int:
        """Which of the rank's stages has a parameter."""
        return bisect_right(self.starts[1:], self.parameters[number].region)

    def _turn(self, number: int) -> tuple:
        """What sorts the numbers of parameters into the order in which their gradients come.

        That is the reverse order of the forward, in which shared experts compute before those that tokens travel to.
        """
        one = self.parameters[number]
        return one.late, -one.region, -one.turn, not one.expert, -number

    # ---- gradients ---------------------------------------------------------------------------------------------------

    @cached_property
    def _sent_at(self) -> list[int]:
        """How many gradients have been stored when each unit is sent: in order, layer by layer only between layers."""
        ends = list(accumulate(len(each) for each in reversed(self.regions.values())))
        complete = [unit.complete for unit in self.units]
        if self.by_layer:
            complete = [min(end for end in ends if end >= each) for each in complete]
        return list(accumulate(complete, max))

    @cached_property
    def _sums(self) -> tuple[list[int], list[float], list[float]]:
        """When units are begun; the elements of the first 0, 1, 2, ... of them; those of a rank's shards of these."""
        sizes = list(accumulate((unit.size for unit in self.units), initial=0.0))
        shards = list(accumulate((unit.size / unit.ranks for unit in self.units), initial=0.0))
        return [unit.begun for unit in self.units], sizes, shards

    def gradients(self, stored: int, summed: int | None) -> float:
        """Return the elements of gradients when those of `stored` parameters have been added up in a backward.

        Stages 0 and 1 keep every bucket that has been begun. Stages 2 and 3 keep a rank's shards of what has been
        summed, the units that have been begun and not yet sent, and the last one that was, which is in flight.

        Args:
            summed: the first of the rank's stages that has gradients of earlier backwards; None if that is above.
        """
        begun_at, sizes, shards = self._sums
        begun, before = bisect_right(begun_at, stored), 0 if summed is None else self._begun_with[summed]
        if self.zero < 2:
            return sizes[max(begun, before)]
        sent = bisect_right(self._sent_at, stored)
        flying = bool(sent) and self.units[sent - 1].ranks > 1
        return sizes[begun] - sizes[sent - flying] + shards[max(sent - flying, before)]

    @cached_property
    def most_gradients(self) -> float:
        """The most elements of gradients at any time. They change when a unit is begun, or sent."""
        return max(self.gradients(stored, 0) for stored in {0, *self._sums[0], *self._sent_at})

    @cached_property
    def _begun_with(self) -> list[int]:
        """How many units have been begun when each stage of the rank has had a backward."""
        stored = [len(self.parameters), *(self.stored_before(start - 1) for start in self.starts[1:])]
        return [bisect_right(self._sums[0], each) for each in stored]

    # ---- weights -----------------------------------------------------------------------------------------------------

    def gathered(self, region: int, prefetch: bool = True) -> float:
        """Return the elements of ZeRO-3's gathered weights in the backward of a region.

        A pipeline gathers all that a rank has for a whole step. Else they are those of the region and of the one before
        it, which comes next; not those of an embedding, whose backward reads none.
        """
        if self.zero < 3:
            return 0.0
        if not self.by_layer:
            return sum(self.shards)
        wanted = {region, region - prefetch} - {0}
        others = {self.end} if self.ties and self.is_whole else set()  # which use the embedding, too
        others |= {self.second} if self.second and self.is_whole else set()
        head = self.parameters[0].size if others & wanted else 0.0
        return head + sum(each.size for index in wanted for each in self.regions.get(index, ()))

    def waiting(self, region: int) -> int:
        """How many matrices wait, when the backward of a region begins, for gradients of their other uses.

        A head that is the embedding, too, and the second use of an embedding, in multi-token prediction.
        """
        if region == self.second:
            return int(self.ties)
        return int(self.is_whole and (self.ties or self.second is not None))

    def stored_before(self, region: int) -> int:
        """How many gradients have been stored when the backward of a region (or the first half of it) begins."""
        return self.early - self._early_up_to[region]

    @cached_property
    def _early_up_to(self) -> list[int]:
        regions = range(max(self.regions) + 1)
        return list(accumulate(sum(not each.late for each in self.regions.get(region, ())) for region in regions))


@lru_cache(maxsize=4096)
def _parameters_of_rank(model: ModelConfig, layout: Layout, rank: int) -> RankParameters:
    return RankParameters(model, layout, rank)


def parameters_of_rank(model: ModelConfig, layout: Layout, rank: int) -> RankParameters:
    """Return the parameters of a rank, found once for all layouts that differ in what makes no difference to them."""
    return _parameters_of_rank(model, _of_weights(layout), rank)


@lru_cache(maxsize=16)  # all ranks of a layout ask for it
def _of_weights(layout: Layout) -> Layout:
    same = {"dp": layout.copies, "cp": 1, "micro_batch": 1, "micro_batches": 1, "recompute": "none"}
    same |= {"zero": 1, "zero_replicas": 1} if layout.zero < 2 else {}
    return layout._replace(**same)
