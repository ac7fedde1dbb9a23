"""A rank's share of the model in a pipeline: its parameters, and how large the sums of their gradients are when."""

from bisect import bisect_right
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from common.costs.alpha_beta import fill_buckets
from common.costs.vocabulary import WIDTHS
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.stages import ranges_of_rank

BUCKET = 25e6  # bytes of gradients: the default of --bucket-mb


class Parameter(NamedTuple):
    """A parameter of a rank."""

    size: float  # elements that a rank has before ZeRO
    region: int  # of the forward: embedding, each layer of the rank, last norm and head
    expert: bool = False
    late: bool = False  # whether its gradient comes in W, the second half of a backward (a matrix of a linear layer)


class Unit(NamedTuple):
    """Parameters whose gradients are summed together: a bucket or, in ZeRO-3, a region."""

    size: float
    begun: int  # how many gradients of the rank have been stored when its first one is
    complete: int  # and when its last one is
    ranks: int  # that share it


class Share:
    """What a rank has: `parameters` in the order of the forward, `units` in the order in which the backward sends them.

    shards      elements of parameters beyond experts, and of experts
    stages      the layers [first, last) of each stage of the rank
    starts      the region of the first layer of each stage
    """

    def __init__(self, model: ModelConfig, layout: Layout, rank: int):
        self.zero, self.by_layer = layout.zero, layout.zero == 3 and layout.pp == 1
        self.split = splits_backward(layout)
        self.stages = ranges_of_rank(model, layout, rank)
        self.is_first, self.is_last = rank == 0, rank == layout.pp - 1
        sizes = (last - first for first, last in self.stages)
        *self.starts, self.end = accumulate(sizes, initial=int(self.is_first))
        self.tied = model.tie_embeddings and self.is_first and self.is_last
        self.parameters = self._listed(model, layout)
        self.shards = tuple(sum(each.size for each in self.parameters if each.expert == one) for one in (False, True))
        self.regions: dict[int, list[Parameter]] = {}
        for each in self.parameters:
            self.regions.setdefault(each.region, []).append(each)
        self.early = sum(not each.late for each in self.parameters)
        self.units = self._units(layout, WIDTHS[layout.dtype][1])

    def _listed(self, model: ModelConfig, layout: Layout) -> list[Parameter]:
        h, d, tp = model.hidden, model.head_width, layout.tp
        queries, keys = model.heads * d // tp, max(1, model.kv_heads // tp) * d
        matrix, expert = -(-model.vocab // tp) * h, model.expert_ffn * h  # the vocabulary is padded
        result = [Parameter(matrix, 0)] if self.is_first else []
        layers = (index for stage in self.stages for index in range(*stage))
        for region, index in enumerate(layers, int(self.is_first)):
            sizes = [h, queries * h, keys * h, keys * h, queries * h, h]  # norm, q, k, v, o, norm
            if has_experts(model, index):
                result += [Parameter(size, region) for size in (*sizes, model.experts * h)]
                result += [Parameter(model.experts // layout.ep * expert, region, True)] * 3
                result += [Parameter(model.shared_experts * expert, region)] * (3 if model.shared_experts else 0)
            else:
                result += [Parameter(size, region) for size in (*sizes, *[model.ffn // tp * h] * 3)]
        if self.is_last:
            result += [Parameter(h, self.end)] + [Parameter(matrix, self.end)] * (not self.tied)
        if self.split:  # all but norms, routers and the embedding
            early, embedding = (h, model.experts * h), 0 if self.is_first else -1
            result = [each._replace(late=each.size not in early and each.region != embedding) for each in result]
        return result

    def _units(self, layout: Layout, wide: int) -> list[Unit]:
        result = []
        backward = sorted(range(len(self.parameters)), key=lambda number: (self.parameters[number].late, -number))
        place = {number: index for index, number in enumerate(backward, 1)}  # in the order in which they are stored
        for expert, ranks in ((False, layout.copies), (True, layout.edp)):
            numbers = [number for number, each in enumerate(self.parameters) if each.expert == expert]
            if self.zero == 3:
                buckets: dict[int, list[int]] = {}
                for number in reversed(numbers):
                    buckets.setdefault(self.parameters[number].region, []).append(number)
                groups = list(buckets.values())
            else:
                sizes = [wide * self.parameters[number].size for number in numbers]
                filled = fill_buckets(sizes, BUCKET if ranks > 1 else 0.0)  # nothing is sent: one for each parameter
                groups = [[numbers[index] for index in bucket] for bucket in filled]
            for group in groups:
                size = sum(self.parameters[number].size for number in group)
                places = [place[number] for number in group]
                result.append(Unit(size, min(places), max(places), ranks))
        return sorted(result, key=lambda unit: unit.begun)

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
        """The most elements of gradients at any time."""
        return max(self.gradients(stored, 0) for stored in range(len(self.parameters) + 1))

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
        head = self.parameters[0].size if self.tied and max(self.regions) in wanted else 0.0
        return head + sum(each.size for index in wanted for each in self.regions.get(index, ()))

    def stored_before(self, region: int) -> int:
        """How many gradients have been stored when the backward of a region (or the first half of it) begins."""
        return self.early - self._early_up_to[region]

    @cached_property
    def _early_up_to(self) -> list[int]:
        regions = range(max(self.regions) + 1)
        return list(accumulate(sum(not each.late for each in self.regions.get(region, ())) for region in regions))


def has_experts(model: ModelConfig, index: int) -> bool:
    return bool(model.experts) and index >= model.dense_layers


def splits_backward(layout: Layout) -> bool:
    """Whether gradients of weights come in a second half of the backward."""
    return layout.schedule in ("zb-h1", "zb-h2")


@lru_cache(maxsize=4096)
def _share(model: ModelConfig, layout: Layout, rank: int) -> Share:
    return Share(model, layout, rank)


def share_of(model: ModelConfig, layout: Layout, rank: int) -> Share:
    """Return the share of a rank, made once for all layouts that differ in what makes no difference to it."""
    same = {"dp": layout.copies, "cp": 1, "micro_batch": 1, "micro_batches": 1, "recompute": "none"}
    return _share(model, layout._replace(**same), rank)
