"""The parts of a stage's backward that may be the fullest, and what is there when each begins.

These are the loss and the last norm, the layers at both ends of the stage, layers beside others of another sort, and
the embedding. Between these, sizes change steadily, so that none of the other layers is a peak (but for small models,
in whose first backward a bucket of 25 MB holds gradients of several layers). Where the schedule splits the backward,
its second half is a part of its own. With 1F1B, so is the end of the forward before a backward, when as many
micro-batches are in flight.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.memory import ends, layer, second_block, second_half
from step08_5d.planning.memory.kept import KeptByStage, kept_by_layers, of_a_layer
from step08_5d.planning.memory.ledger import Deferred, Ledger
from step08_5d.planning.memory.rank_parameters import RankParameters
from step08_5d.planning.memory.sizes import LayerSizes

LOSS, FIRST, SECOND = "BF", "BI", "W"  # in which halves of a backward a part is: the loss is computed before it
FORWARD = "B"  # a forward that ends before a whole backward


class Walk(NamedTuple):
    """A part of a stage's backward, and a ledger of it."""

    name: str
    halves: str  # of the backward in which it is: LOSS, FIRST or SECOND
    region: int  # of the rank's parameters
    stored: int  # gradients of the rank that have been stored when it begins
    before: float  # bytes that are there then, but for messages and other micro-batches
    ledger: Ledger
    keeps_message: bool = False  # the gradient that the stage has received waits for the second half: `before` has it

    @property
    def is_loss(self) -> bool:
        return self.halves == LOSS

    @property
    def is_forward(self) -> bool:
        return self.halves == FORWARD


def walks_of_stage(
    model: ModelConfig, layout: Layout, rank: RankParameters, number: int, kept: KeptByStage
) -> Iterator[Walk]:
    """Yield the parts of a stage's backward.

    Args:
        number: of the rank's stage. kept: what it keeps of a micro-batch.
    """
    has_loss = rank.is_last and number == len(rank.stages) - 1
    if has_loss:
        loss, head = (ledger_of(model, ends.of_an_end(layout)) for ledger_of in (ends.loss, ends.head))
        for halves, ledger in ((LOSS, loss), (FIRST, head)):
            yield Walk("", halves, rank.end, 0, kept.all + ledger.before, ledger)
    elif layout.stages == 1:
        yield from _end_of_forward(model, layout, rank, kept)
    yield from _below_the_head(model, layout, rank, number, kept, received=layout.pp > 1 and not has_loss)
    if rank.split:
        ledger = second_half.backward(deferred_by(model, layout, rank))
        yield Walk("gradients of weights, ", SECOND, rank.end, rank.early, 0.0, ledger)


def _end_of_forward(model: ModelConfig, layout: Layout, rank: RankParameters, kept: KeptByStage) -> Iterator[Walk]:
    """Yield the end of a forward whose output is sent on, if a dense layer that is not recomputed makes it.

    There are the MLP's output of all tokens, the part of the sum that this rank gets, and the layer's and the MLP's
    inputs, which norms have kept in the type of sums. The first stage has also read targets that it does not need.
    """
    ((first, last),), size = rank.stages, LayerSizes.of(model, layout)
    if last == first or layout.recompute == "full" or model.has_experts(last - 1):
        return
    made = {"output, all tokens": size.whole, "output": size.stream}
    made |= {"inputs": 2 * size.stream} if size.narrow else {}
    made |= {"output, all tokens, in order": size.whole} if layout.tp > 1 and not size.one else {}
    ledger = Ledger({})
    ledger.event("output", made | ({"targets": 8 * layout.tokens * (1 + model.mtp)} if rank.is_first else {}))
    yield Walk("the forward before it, ", FORWARD, rank.end, 0, kept.all, ledger)


def _below_the_head(
    model: ModelConfig, layout: Layout, rank: RankParameters, number: int, kept: KeptByStage, received: bool
) -> Iterator[Walk]:
    """Yield the parts with layers of a stage, and the one with the embedding.

    Args:
        received: whether the gradient of the stage's output is a message. Its last layer works with the very tensor;
            all others have a gradient of their own beside it.
    """
    first, last = rank.stages[number]
    matrix = ends.vocabulary(model, layout) * LayerSizes.of(model, layout).w
    has_second = last > max(first, model.layers)
    of_last = block_ledger(model, layout, last - 1) if last > first else None
    keeps = received and of_last is not None and layer.OUTPUT in of_last.put_off_tensors
    with_experts = min(last, max(first, model.expert_layers.start))  # from here on
    some = {first, with_experts - 1, with_experts, last - 1, last - 1 - has_second}
    for index in sorted(index for index in some if first <= index < last):
        region, experts, is_last = rank.starts[number] + index - first, index >= with_experts, index == last - 1
        ledger, keeps_it = block_ledger(model, layout, index), keeps
        before = (
            matrix * rank.waiting(region)
            + ledger.before
            + kept.beside
            + kept.received
            + kept_by_layers(model, layout, first, index)
        )
        before += second_half.bytes_of(deferred_by(model, layout, rank, index + 1))
        if is_last and experts:  # shared experts, which put it off, come after all others
            keeps_it = False
        if received and is_last and not keeps_it:
            before -= ledger.begins_with[layer.OUTPUT]  # it is the message
        yield Walk(f"layer {index}: ", FIRST, region, rank.stored_before(region), before, ledger, keeps_it)
    if rank.is_first and number == 0:
        ledger = ends.embedding(model, ends.of_an_end(layout))
        before = matrix * rank.waiting(0) + ledger.before + second_half.bytes_of(deferred_by(model, layout, rank))
        yield Walk("", FIRST, 0, rank.stored_before(0), before, ledger, keeps)


def block_ledger(model: ModelConfig, layout: Layout, index: int) -> Ledger:
    """Return the ledger of a layer, or of the block of multi-token prediction behind it, which nobody may change."""
    if index < model.layers:
        return layer_ledger(model, layout, model.has_experts(index))
    return _second_ledger(model, of_a_layer(layout, model.has_experts(index)), layout.is_whole)


@lru_cache(maxsize=1024)
def _second_ledger(model: ModelConfig, layout: Layout, shared: bool) -> Ledger:
    return second_block.backward(model, layout, shared=shared)


def layer_ledger(model: ModelConfig, layout: Layout, experts: bool) -> Ledger:
    """Return a layer's ledger, which nobody may change."""
    return _layer_ledger(model, of_a_layer(layout, experts), experts)


@lru_cache(maxsize=4096)
def _layer_ledger(model: ModelConfig, layout: Layout, experts: bool) -> Ledger:
    return layer.backward(model, layout, experts=experts)


def deferred_by(model: ModelConfig, layout: Layout, rank: RankParameters, index: int = 0) -> list[Deferred]:
    """Return what a split backward puts off, in order: from the head or last layer down to the layer `index`."""
    if not rank.split:
        return []
    ((first, last),) = rank.stages
    result = [ends.deferred_by_head(model, layout)] if rank.is_last else []
    for each in reversed(range(max(first, index), last)):
        result += block_ledger(model, layout, each).deferred
    return result
