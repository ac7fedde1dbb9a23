"""Walks through the backward of a stage of the pipeline: its parts that may be the fullest, and how much is there then.

These are the loss and the last norm, the layers at both ends of the stage, layers beside others of another sort, and
the embedding. Between these, sizes change steadily, so that none of the other layers is a peak (but for small models,
in whose first backward a bucket of 25 MB holds gradients of several layers). Where the schedule splits the backward,
its second half has a walk of its own.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.memory import ends, moments, second_half
from step08_5d.planning.memory.kept import Kept, kept_at_work, kept_by_layers, of_a_layer
from step08_5d.planning.memory.moments import Moment
from step08_5d.planning.memory.second_half import Product
from step08_5d.planning.memory.share import Share, has_experts
from step08_5d.planning.memory.sizes import Sizes, gradient_stays

LOSS, FIRST, SECOND = "BF", "BI", "W"  # in which parts of a backward a walk is: the loss is computed before it


class Top(NamedTuple):
    """The fullest of some moments."""

    size: float  # bytes beyond those that were there when the walk began
    moment: str
    communication: float = 0.0  # of all bytes of the walk


Tops = dict[int, Top]  # by how many gradients the walk has stored until then


class Walk(NamedTuple):
    """A part of a stage's backward."""

    name: str
    halves: str  # of the backward in which it is: LOSS, FIRST or SECOND
    region: int
    begun: int  # how many gradients of the rank have been stored when it begins
    running: float  # bytes that are there then, but for other micro-batches
    tops: Tops
    put_off: float = 0.0  # bytes of messages that are none any more, since the second half needs them

    @property
    def is_loss(self) -> bool:
        return self.halves == LOSS

    @property
    def most(self) -> float:
        return max(self.tops.values()).size


def walks_of_stage(model: ModelConfig, layout: Layout, share: Share, number: int, kept: Kept) -> Iterator[Walk]:
    """Yield the walks through a stage.

    Args:
        number: of the rank's stage. kept: what it keeps of a micro-batch.
    """
    size, has_loss = Sizes.of(model, layout), share.is_last and number == len(share.stages) - 1
    if has_loss:
        loss = ends.loss(model, layout, size)
        running = kept.all + ends.kept_by_head(layout, size)
        yield Walk("", LOSS, share.end, 0, running, tops([loss]))
        yield Walk("", FIRST, share.end, 0, running + loss.left, tops(ends.head(model, layout, size)))
    yield from _below_the_head(model, layout, share, number, kept, received=layout.pp > 1 and not has_loss)
    if share.split:
        some = second_half.moments(_products(model, layout, share))
        yield Walk("gradients of weights, ", SECOND, share.end, share.early, 0.0, tops(some))


def _below_the_head(
    model: ModelConfig, layout: Layout, share: Share, number: int, kept: Kept, received: bool
) -> Iterator[Walk]:
    """Yield the walks through layers of a stage, and through the embedding.

    Args:
        received: whether the gradient of the stage's output is a message. Its last layer works with the very tensor;
            all others have a gradient of their own beside it. If the second half needs it, too, it counts only once.
    """
    size, (first, last) = Sizes.of(model, layout), share.stages[number]
    gradient = size.stream + (ends.vocabulary(model, layout) * size.w if share.tied else 0.0)  # one of two, which waits
    put_off = size.stream if received and gradient_stays(model, size, has_experts(model, last - 1)) else 0.0
    with_experts = min(last, max(first, model.dense_layers)) if model.experts else last  # from here on
    some = {first, with_experts - 1, with_experts, last - 1}
    for index in sorted(index for index in some if first <= index < last):
        region, experts, is_last = share.starts[number] + index - first, index >= with_experts, index == last - 1
        running = kept.beside + kept.received + kept_by_layers(model, layout, first, index)
        running += kept_at_work(model, layout, experts) + gradient + deferred(model, layout, share, index + 1)
        running -= size.stream if received and is_last else put_off
        late = 0.0 if is_last and experts else put_off  # shared experts come after all others
        most = _tops_of_layer(model, of_a_layer(layout), experts)
        yield Walk(f"layer {index}: ", FIRST, region, share.stored_before(region), running, most, late)
    if share.is_first and number == 0:
        running = gradient + deferred(model, layout, share, first) - put_off
        most = tops(ends.embedding(model, layout, size))
        yield Walk("", FIRST, 0, share.stored_before(0), running, most, put_off)


def deferred(model: ModelConfig, layout: Layout, share: Share, index: int = 0) -> float:
    """Return the bytes that layers from `index` on, and the head, keep between the halves of a stage's backward."""
    return second_half.deferred(_products(model, layout, share, index)) if share.split else 0.0


def _products(model: ModelConfig, layout: Layout, share: Share, index: int = 0) -> list[Product]:
    """The second half of a stage's backward, from its head or last layer down to the layer `index`."""
    ((first, last),) = share.stages
    result = [second_half.of_head(model, layout)] if share.is_last else []
    for each in reversed(range(max(first, index), last)):
        result += second_half.of_layer(model, layout, has_experts(model, each))
    return result


@lru_cache(maxsize=4096)
def _tops_of_layer(model: ModelConfig, layout: Layout, experts: bool) -> Tops:
    return tops(moments.layer(model, layout, experts))


def tops(some: Iterable[Moment]) -> Tops:
    """Walk through moments. Returns the fullest for each number of gradients stored so far."""
    result, running, stored = {}, 0.0, 0

    def add(top: Top) -> None:
        if stored not in result or top.size > result[stored].size:
            result[stored] = top

    for moment in some:
        add(Top(running + moment.there, moment.name, moment.communication))
        running, stored = running + moment.left, stored + moment.stored
        if moment.stored:
            add(Top(running + moment.weight, f"{moment.name}, added up", moment.arrived))
    return result
