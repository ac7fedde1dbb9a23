"""What the ranks of a layout hold at the fullest moment of a step, by kind.

The peak is a maximum over moments: those of all walks through the backward of a stage (`walks.py`), in the first
backward of a step, when the most micro-batches are in flight and there are no gradients, and in a later one
(`../stages.py`). What a moment adds to all that lives longer, `moments.py`, `ends.py` and `second_half.py` say; what a
micro-batch in flight keeps, `kept.py`. Nothing is fitted: tests compare a grid of layouts with dry runs. With
interleaved stages the tables and messages of a micro-batch in only some stages of a rank are estimated, as that part of
them which these stages have of its layers.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from common.costs.vocabulary import KINDS, WIDTHS
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.memory import ends
from step08_5d.planning.memory.kept import Kept, kept_by_stages
from step08_5d.planning.memory.share import share_of
from step08_5d.planning.memory.sizes import Sizes
from step08_5d.planning.memory.walks import Top, Walk, deferred, walks_of_stage
from step08_5d.planning.stages import Backward, backwards, fullest_ranks


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

    parameters, gradients  with the weights that ZeRO has gathered, and all buckets
    communication          other buffers that a collective has filled or is sending, unless a backward needs them
    activations            what else the micro-batches in flight keep for their backwards
    working                all else: gradients of activations, copies in float32, logits, ...
    """
    narrow, wide, _ = WIDTHS[layout.dtype]
    at_rest = states(model, layout, rank)
    # But for the optimizer state, which is at rest, ZeRO-1 holds what no ZeRO does
    case, top, gradients = _fullest_moment(model, layout._replace(zero=max(1, layout.zero)), rank)
    sizes = at_rest["parameters"] + narrow * case.gathered, wide * gradients, at_rest["optimizer state"]
    communication = case.communication + top.communication
    rest = case.there + top.size - communication
    activations = min(rest, case.kept)
    name = f"{case.backward.when} backward, {case.walk.name}{top.moment}"
    held = {"communication": communication, "activations": activations, "working": rest - activations}
    return Peak(name, dict(zip(KINDS, sizes)) | held)


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


# ---- all moments -----------------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    """A walk in one of a rank's backwards."""

    backward: Backward
    walk: Walk
    gathered: float  # elements of weights
    begun: int  # gradients that were stored before
    there: float  # bytes that are there when it begins, but for parameters, gradients and optimizer state
    communication: float  # of these
    kept: float  # and of these, what backwards need


@lru_cache(maxsize=4096)
def _fullest_moment(model: ModelConfig, layout: Layout, rank: int) -> tuple[_Case, Top, float]:
    """Return the fullest moment: in which case, the moment, and the elements of gradients then."""
    narrow, wide, _ = WIDTHS[layout.dtype]
    share = share_of(model, layout, rank)
    cases = [(narrow * case.gathered + case.there + case.walk.most, case) for case in _cases(model, layout, rank)]
    cases.sort(key=lambda pair: -pair[0])
    most, result = -1.0, None
    for bytes_but_gradients, case in cases:
        if bytes_but_gradients + wide * share.most_gradients < most:
            break  # this case and those after it cannot hold more
        for stored, top in case.walk.tops.items():
            gradients = share.gradients(max(case.begun, case.walk.begun + stored), case.backward.summed)
            held = narrow * case.gathered + wide * gradients + case.there + top.size
            if held > most:
                most, result = held, (case, top, gradients)
    return result


def _cases(model: ModelConfig, layout: Layout, rank: int) -> Iterator[_Case]:
    share, size = share_of(model, layout, rank), Sizes.of(model, layout)
    kept, walks = _stages(model, layout._replace(zero=1), rank)
    whole, received = sum(each.all for each in kept), sum(each.received for each in kept)
    all_deferred = deferred(model, layout, share)
    of_head = ends.kept_after_loss(model, layout, size) if share.is_last and len(kept) == 1 else 0.0
    for backward in backwards(model, layout, rank):
        in_flight, at_work = backward.micro_batches, backward.half != "W"  # one of those in flight is at work
        own = kept[backward.stage].all if at_work else 0.0
        others = max(0.0, in_flight * whole - own)
        others += max(0.0, in_flight - at_work) * of_head + backward.deferred * all_deferred
        needed = in_flight * (whole - received) + backward.deferred * all_deferred
        for walk in walks[backward.stage]:
            messages = backward.at_loss if walk.is_loss else backward.messages
            if backward.half not in walk.halves or messages is None:
                continue
            gathered = share.gathered(walk.region, prefetch=not walk.is_loss)
            there = others + walk.running + messages * size.stream
            communication = messages * size.stream - walk.put_off + in_flight * received
            begun = share.early if backward.early else 0
            yield _Case(backward, walk, gathered, begun, there, communication, needed)


@lru_cache(maxsize=512)
def _stages(model: ModelConfig, layout: Layout, rank: int) -> tuple[list[Kept], list[list[Walk]]]:
    """Return what each stage of a rank keeps, and the walks through it: the same ones with all stages of ZeRO."""
    kept, share = kept_by_stages(model, layout, rank), share_of(model, layout, rank)
    return kept, [list(walks_of_stage(model, layout, share, *here)) for here in enumerate(kept)]
