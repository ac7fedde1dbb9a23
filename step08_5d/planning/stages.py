"""What each rank of a pipeline holds: its layers, and of how many micro-batches; and for how long it waits.

The schedule is 1F1B, or interleaved where a rank has several stages. Layers are divided as step 5 divides them: the
last stage also has the head and holds fewer, and no number of stages has to divide the layers.
"""

from functools import cache
from itertools import accumulate
from typing import NamedTuple

from common.model_config import ModelConfig
from step05_pipeline.schedules.whole_backward import forwards_ahead
from step05_pipeline.stages import split_layers
from step08_5d.cost import Layout


@cache  # a search asks for a few hundred of them, and often
def stage_sizes(model: ModelConfig, stages: int, seq: int) -> tuple[int, ...]:
    """Return how many layers each stage of the model has."""
    return tuple(last - first for first, last in split_layers(model, stages, seq))


def layers_of_ranks(model: ModelConfig, layout: Layout) -> tuple[float, ...]:
    """Return how many layers each rank of the pipeline has, in all of its stages."""
    if layout.equal_stages:
        return (model.layers / layout.pp,) * layout.pp
    return _summed(stage_sizes(model, layout.pp * layout.stages, layout.seq), layout.pp)


@cache
def _summed(sizes: tuple[int, ...], p: int) -> tuple[int, ...]:
    return tuple(sum(sizes[rank::p]) for rank in range(p))


# ---- memory ----------------------------------------------------------------------------------------------------------


def fullest_ranks(model: ModelConfig, layout: Layout) -> list[int]:
    """Return ranks of which one holds the most: both ends, and the first one in between with each number of layers.

    A later one with as many layers keeps the activations of fewer micro-batches.
    """
    first_with = {}
    for rank, layers in enumerate(layers_of_ranks(model, layout)[1:-1], 1):
        first_with.setdefault(layers, rank)
    return sorted({0, layout.pp - 1, *first_with.values()})


def in_flight(model: ModelConfig, layout: Layout, rank: int) -> float:
    """Return of how many micro-batches a rank keeps the activations at its peak.

    Interleaved, it keeps some of them in a part of its stages only, which counts as a part of a micro-batch.
    """
    p, m = layout.pp, layout.micro_batches
    if layout.stages == 1:
        return min(p - rank, m)
    sizes = stage_sizes(model, p * layout.stages, layout.seq)[rank::p]
    return _most_layers(sizes, p, min(m, 3 * p), rank) / sum(sizes)  # after 3 p micro-batches all repeats itself


@cache
def _most_layers(sizes: tuple[int, ...], p: int, m: int, rank: int) -> int:
    """The most layers, counted once for each micro-batch, between their forward and their backward.

    Args:
        sizes: layers of the rank's stages. m: micro-batches, a multiple of p.
    """
    order = [size for size in sizes for _ in range(p)] * (m // p)  # p micro-batches pass through a stage, then the next
    ahead = min(len(order), forwards_ahead(p, len(sizes), p, rank))
    begun = list(accumulate(order))
    ended = accumulate([size for size in reversed(sizes) for _ in range(p)] * (m // p), initial=0)
    return max([begun[ahead - 1], *(forward - backward for forward, backward in zip(begun[ahead:], ended))])


# ---- time ------------------------------------------------------------------------------------------------------------


class Pace(NamedTuple):
    """The slowest rank of a pipeline."""

    layers: float  # that it has
    head: bool  # whether it is the last, which multiplies by the head
    waits: float  # for so many of its micro-batches, if it has one stage


def pace(model: ModelConfig, layout: Layout, layer: float, head: float) -> Pace:
    """Return the rank for which all others wait.

    The first micro-batch passes through all ranks, and the others follow in the pace of the slowest. So that one waits
    while the first is with the others; with v stages on each rank, for a v-th of that.

    Args:
        layer, head: seconds of a micro-batch, forward and backward, in a layer and in the head.
    """
    *others, last = layers_of_ranks(model, layout)
    if layout.equal_stages:
        return Pace(last, True, layout.pp - 1)
    most = max(others, default=0)
    if last * layer + head >= most * layer:
        return Pace(last, True, sum(others) * layer / (last * layer + head))
    return Pace(most, False, ((sum(others) - most + last) * layer + head) / (most * layer))
