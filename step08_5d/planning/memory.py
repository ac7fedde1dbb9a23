"""What the ranks of a layout hold at the fullest moment of a step, by kind.

The peak is a maximum over moments (`moments.py`): the loss and the last norm, the backward of the first and of the last
layer of a stage, and that of the embedding; each in the first backward of a step, when the most micro-batches are in
flight and there are no gradients, and in a later one. Between these layers sizes change steadily, so that none of them
is a peak (but for small models, in whose first backward a bucket of 25 MB holds gradients of several layers). Where the
schedule splits the backward (ZB-H1), its second half has moments of its own. Nothing is fitted: tests compare a grid of
layouts with dry runs. With interleaved stages the tables and messages of a micro-batch in only some stages of a rank
are estimated, as that part of them which these stages have of its layers.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from common.costs.vocabulary import KINDS, WIDTHS
from common.model_config import ModelConfig
from step04_tensor_parallel.cost import Way, block_activations
from step07_expert_parallel.cost import activations as expert_activations
from step08_5d.cost import Layout
from step08_5d.planning import moments
from step08_5d.planning.moments import Moment, Sizes
from step08_5d.planning.share import Share, share_of
from step08_5d.planning.stages import backwards, fullest_ranks

NOTHING = (-math.inf, "")
LOSS, FIRST, SECOND = "BF", "BI", "W"  # in which parts of a backward a walk is: the loss is computed before it


class Peak(NamedTuple):
    """The fullest moment of a step."""

    moment: str
    held: dict[str, float]  # bytes by kind


def memory(model: ModelConfig, layout: Layout) -> dict[str, float]:
    """Return the bytes by kind of the rank of a pipeline that holds most."""
    ranks = fullest_ranks(model, layout)
    return max((of_stage(model, layout, rank) for rank in ranks), key=lambda kinds: sum(kinds.values()))


def of_stage(model: ModelConfig, layout: Layout, rank: int) -> dict[str, float]:
    """Return the bytes by kind that this rank of a pipeline holds at the fullest moment."""
    return peak(model, layout, rank).held


def peak(model: ModelConfig, layout: Layout, rank: int) -> Peak:
    """Return what happens at the fullest moment of a rank of the pipeline, and the bytes by kind.

    `activations` are what the micro-batches in flight keep for their backwards, `working` is all else.
    """
    narrow, wide, _ = WIDTHS[layout.dtype]
    at_rest = states(model, layout, rank)
    # But for the optimizer state, which is at rest, ZeRO-1 holds what no ZeRO does
    name, gathered, gradients, activations, needed = _fullest_moment(
        model, layout._replace(zero=max(1, layout.zero)), rank
    )
    sizes = at_rest["parameters"] + narrow * gathered, wide * gradients, at_rest["optimizer state"]
    needed = min(activations, needed)
    return Peak(name, dict(zip(KINDS, sizes)) | {"activations": needed, "working": activations - needed})


def states(model: ModelConfig, layout: Layout, rank: int) -> dict[str, float]:
    """Return the bytes of parameters, gradients and optimizer state, each when it is most but for what travels."""
    result, shards = {}, parameters(model, layout, rank)
    for kind, width, first in zip(KINDS, WIDTHS[layout.dtype], (3, 2, 1)):  # first: the stage of ZeRO that divides it
        ranks = (layout.copies, layout.edp) if layout.zero >= first else (1, 1)
        result[kind] = width * sum(size / by for size, by in zip(shards, ranks))
    return result


def parameters(model: ModelConfig, layout: Layout, rank: int) -> tuple[float, float]:
    """Return how many parameters this rank of a pipeline has before ZeRO: all but experts, and experts."""
    return share_of(model, layout, rank).shards


# ---- activations -----------------------------------------------------------------------------------------------------


def kept(model: ModelConfig, layout: Layout, rank: int) -> float:
    """Return the bytes that the stages of a rank keep of one micro-batch, with the tables of the rotation."""
    return sum(_kept_of_stages(model, layout, rank, _of_layers(model, layout)))


def _kept_of_stages(model: ModelConfig, layout: Layout, rank: int, layers: "_Layers") -> list[float]:
    narrow, wide, _ = WIDTHS[layout.dtype]
    tables = 2 * layout.seq / layout.cp * model.head_width * wide
    # What a later stage has received is a copy of its own, unless it is what the first norm or recomputation keeps
    copied = narrow < wide and layout.recompute != "full"
    received = layout.tokens * model.hidden / layout.tp * narrow if copied else 0.0
    result = []
    for number, (first, last) in enumerate(share_of(model, layout, rank).stages):
        data = 8 * layout.tokens * ((first == 0) + (last == model.layers))  # tokens or targets, or both
        each = _kept_by_layers(model, layers, first, last) + tables + data
        result.append(each + (received if rank or number else 0.0))
    return result


def _kept_by_layers(model: ModelConfig, layers: "_Layers", first: int, last: int) -> float:
    """Return the bytes that the layers [first, last) keep of one micro-batch."""
    with_experts = max(0, last - max(first, model.dense_layers)) if model.experts else 0
    return (last - first - with_experts) * layers[False].kept + with_experts * layers[True].kept


def layer_activations(model: ModelConfig, layout: Layout, recompute: str, experts: bool = False) -> float:
    """Return the bytes that a layer keeps of one micro-batch, dense or with experts.

    Attention is fused and keeps no scores, so `selective` saves no more than a number for each row of them.
    """
    full_recompute = recompute == "full"
    dtype, seq = getattr(torch, layout.dtype), layout.seq // layout.cp
    way = Way(sequence_parallel=layout.tp > 1, full_recompute=full_recompute)
    dense = block_activations(model, layout.micro_batch, seq, dtype, layout.tp, way)
    if recompute == "selective":
        dense["attention"] -= layout.micro_batch * seq * model.heads * max(4, dtype.itemsize) // layout.tp
    elif moments.ulysses(layout) and not full_recompute:  # of all tokens, their order, and the output once more
        size = Sizes.of(model, layout)
        dense["attention"] += size.queries + 2 * (size.gathered_keys - size.keys) + 8 * layout.seq
    if full_recompute or not experts:
        return sum(dense.values())
    tokens = int(layout.tokens / layout.tp)
    rows, width, shared_ffn = tokens * model.top_k, dtype.itemsize, model.shared_experts * model.expert_ffn
    shared = tokens * (model.hidden + 4 * shared_ffn) * width if shared_ffn else 0
    # The MLP's input is that of a router, which has counted it
    dense["mlp"], dense["column inputs"] = 0, dense["column inputs"] // 2
    return sum(dense.values()) + expert_activations(model, tokens, rows, width, layout.ep) + shared


# ---- all moments -----------------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """Bytes of a layer, alone."""

    kept: float  # of a micro-batch in flight
    at_work: float  # when its backward begins
    fullest: dict[int, tuple[float, str]]  # more than that: see `_fullest`


_Layers = tuple[_Layer, _Layer]  # a dense one, and one with experts


def _of_layers(model: ModelConfig, layout: Layout) -> _Layers:
    return _layers(model, layout._replace(dp=1, pp=1, zero=0, micro_batches=1, stages=1, nanotron=False))


@lru_cache(maxsize=4096)  # a search asks for the same layers in many pipelines
def _layers(model: ModelConfig, layout: Layout) -> _Layers:
    """The same, of a layout with all that makes no difference left out."""
    dense = _layer(model, layout, False)
    return dense, _layer(model, layout, True) if model.experts else dense


def _layer(model: ModelConfig, layout: Layout, experts: bool) -> _Layer:
    at_work = moments.kept_at_work(model, layout, Sizes.of(model, layout), layer_activations, experts)
    kept = layer_activations(model, layout, layout.recompute, experts)
    return _Layer(kept, at_work, _fullest(moments.layer(model, layout, experts)))


class _Walk(NamedTuple):
    """A part of a stage's backward."""

    name: str
    halves: str  # of the backward in which it is: B or I, W, or F for the loss
    region: int
    begun: int  # how many gradients of the rank have been stored when it begins
    running: float  # bytes that are there then, but for other micro-batches
    fullest: dict[int, tuple[float, str]]  # and more, at the moments of `_fullest`

    @property
    def is_loss(self) -> bool:
        return self.halves == LOSS

    @property
    def most(self) -> float:
        return max(self.fullest.values())[0]


@lru_cache(maxsize=4096)
def _fullest_moment(model: ModelConfig, layout: Layout, rank: int) -> tuple[str, float, float, float, float]:
    """Its name, elements of gathered weights and of gradients, bytes of activations, and of those that backwards need.

    Activations are with all that is there for the moment.
    """
    narrow, wide, _ = WIDTHS[layout.dtype]
    share, size = share_of(model, layout, rank), Sizes.of(model, layout)
    layers = _of_layers(model, layout)
    each = _kept_of_stages(model, layout, rank, layers)
    walks = [list(_walks(model, layout, share, size, layers, *here)) for here in enumerate(each)]
    cases, whole = [], sum(each)
    of_head = moments.kept_after_loss(model, layout, size) if share.is_last and len(each) == 1 else 0.0
    all_deferred = _deferred(model, layout, share, size)
    for backward in backwards(model, layout, rank):
        own = 0.0 if backward.half == "W" else each[backward.stage]
        others = max(0.0, backward.micro_batches * whole - own)
        others += backward.deferred * all_deferred + max(0.0, backward.micro_batches - (backward.half != "W")) * of_head
        begun = share.early if backward.early else 0
        for walk in walks[backward.stage]:
            messages = backward.at_loss if walk.is_loss else backward.messages
            if backward.half not in walk.halves or messages is None:
                continue
            gathered = share.gathered(walk.region, prefetch=not walk.is_loss)
            there = others + walk.running + messages * size.stream
            cases.append((narrow * gathered + there + walk.most, backward, walk, gathered, there, begun))
    cases.sort(key=lambda case: -case[0])
    most, result = -1.0, None
    for bytes_but_gradients, backward, walk, gathered, there, begun in cases:
        if bytes_but_gradients + wide * share.most_gradients < most:
            break  # this case and those after it cannot hold more
        for stored, (more, moment) in walk.fullest.items():
            gradients = share.gradients(max(begun, walk.begun + stored), backward.summed)
            held = narrow * gathered + wide * gradients + there + more
            if held > most:
                most, result = held, (backward, walk, moment, gathered, gradients, there + more)
    backward, walk, moment, *sizes = result
    kept = backward.micro_batches * whole + backward.deferred * all_deferred
    return f"{backward.when} backward, {walk.name}{moment}", *sizes, kept


def _walks(
    model: ModelConfig, layout: Layout, share: Share, size: Sizes, layers: _Layers, number: int, each: float
) -> Iterator[_Walk]:
    """The parts of a stage that may be the fullest: both ends, and layers beside others of another sort.

    Args:
        number: of the rank's stage. each: bytes that it keeps of a micro-batch.
    """
    narrow = WIDTHS[layout.dtype][0]
    matrix = -(-model.vocab // layout.tp) * model.hidden * narrow
    tied = matrix if share.tied else 0.0  # one gradient of two waits for that of the embedding
    has_loss = share.is_last and number == len(share.stages) - 1
    if has_loss:
        loss, *head = moments.head(model, layout, size)
        running = each + moments.kept_by_head(model, layout, size)
        yield _Walk("", LOSS, share.end, 0, running, _fullest([loss]))
        yield _Walk("", FIRST, share.end, 0, running + loss.left, _fullest(head))
    first, last = share.stages[number]
    with_experts = min(last, max(first, model.dense_layers)) if model.experts else last  # from here on
    some = [index for index in {first, with_experts - 1, with_experts, last - 1} if first <= index < last]
    below = each - _kept_by_layers(model, layers, first, last)
    for index in sorted(some):
        region, layer = share.starts[number] + index - first, layers[index >= with_experts]
        # A last layer works with the very gradient that has been received
        gradient = 0.0 if layout.pp > 1 and not has_loss and index == last - 1 else size.stream
        running = below + _kept_by_layers(model, layers, first, index) + layer.at_work + gradient + tied
        running += _deferred(model, layout, share, size, index + 1, received=gradient > 0 and not has_loss)
        yield _Walk(f"layer {index}: ", FIRST, region, share.stored_before(region), running, layer.fullest)
    if share.is_first and number == 0:
        scattered = size.whole * (1 if size.one else 2) if layout.tp > 1 else 0.0
        fullest = _fullest([Moment("embedding", matrix + scattered, -size.stream, matrix, 1)])
        running = size.stream + tied + _deferred(model, layout, share, size, first, received=layout.pp > 1)
        yield _Walk("", FIRST, 0, share.stored_before(0), running, fullest)
    if share.split:
        some = moments.second_half(model, layout, size, last - first, has_loss)
        yield _Walk("gradients of weights, ", SECOND, share.end, share.early, 0.0, _fullest(some))


def _deferred(
    model: ModelConfig, layout: Layout, share: Share, size: Sizes, index: int = 0, received: bool = False
) -> float:
    """Bytes that a stage's layers from `index` on, and the head, keep between the halves of their backward.

    Args:
        received: whether the gradient of the last layer's output still counts as a message.
    """
    if not share.split:
        return 0.0
    ((first, last),) = share.stages
    result = (last - max(first, index)) * moments.deferred(size)
    if share.is_last:
        return result + moments.deferred_by_head(model, layout)
    return result - (size.stream if received and size.gradient_stays else 0.0)


def _fullest(some: Iterable[Moment]) -> dict[int, tuple[float, str]]:
    """Walk through moments. Returns the bytes and name of the fullest for each number of gradients stored so far."""
    result, running, stored = {}, 0.0, 0
    for moment in some:
        result[stored] = max(result.get(stored, NOTHING), (running + moment.there, moment.name))
        running, stored = running + moment.left, stored + moment.stored
        if moment.stored:
            result[stored] = max(result.get(stored, NOTHING), (running + moment.weight, f"{moment.name}, added up"))
    return result
