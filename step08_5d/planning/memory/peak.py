"""What the ranks of a layout hold at the fullest moment of a step, by kind.

The peak is a maximum over events: those of all parts of a stage's backward (`walks.py`), in the first backward of a
step, when the most micro-batches are in flight and there are no gradients, and in a later one (`backwards.py`). What an
event adds to all that lives longer say the ledgers of `layer.py`, `ends.py` and `second_half.py`; what a micro-batch in
flight keeps, `kept.py`; how large weights and sums of gradients are, `rank_parameters.py`.

Nothing is fitted: tests compare a grid of layouts with dry runs. With interleaved stages the tables and messages of a
micro-batch in only some stages of a rank are estimated, as that part of them which these stages have of its layers. So
is what a block of multi-token prediction keeps beside its layer: in small models that was up to 8 % of the peak.
"""

from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from common.costs.vocabulary import KINDS, WIDTHS
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.memory import ends
from step08_5d.planning.memory.backwards import Backward, backwards, fullest_ranks, until_it_repeats
from step08_5d.planning.memory.kept import kept_by_stages
from step08_5d.planning.memory.ledger import LedgerEntry
from step08_5d.planning.memory.rank_parameters import parameters_of_rank
from step08_5d.planning.memory.second_half import bytes_of
from step08_5d.planning.memory.sizes import LayerSizes
from step08_5d.planning.memory.walks import Walk, deferred_by, walks_of_stage


class Fullest(NamedTuple):
    """A rank when it holds most in a step."""

    moment: str
    held: dict[str, float]  # bytes by kind


def memory(model: ModelConfig, layout: Layout, gradient: int | None = None) -> dict[str, float]:
    """Return the bytes by kind of the rank of a pipeline that holds most. Nobody may change what is returned.

    Args:
        gradient: bytes of an element in sums of gradients; None: as in our training, at least those of float32. Others
            add up in bfloat16.
    """
    return _memory(model, layout._replace(micro_batches=until_it_repeats(layout)), gradient)


@lru_cache(maxsize=2**16)  # a search asks again with larger batches
def _memory(model: ModelConfig, layout: Layout, gradient: int | None) -> dict[str, float]:
    ranks = fullest_ranks(model, layout)
    return max((peak(model, layout, rank, gradient).held for rank in ranks), key=lambda kinds: sum(kinds.values()))


def at_least(model: ModelConfig, layout: Layout, gradient: int | None = None) -> dict[str, float]:
    """Return the parameters, gradients and optimizer state of the rank with most of them, in bytes by kind.

    No layout holds less: when a backward ends, all of it is there.
    """
    return _at_least(model, _at_rest(layout), gradient)


@lru_cache(maxsize=64)
def _at_least(model: ModelConfig, layout: Layout, gradient: int | None) -> dict[str, float]:
    of_ranks = (states(model, layout, rank, gradient) for rank in fullest_ranks(model, layout))
    return max(of_ranks, key=lambda kinds: sum(kinds.values()))


def peak(model: ModelConfig, layout: Layout, rank: int, gradient: int | None = None) -> Fullest:
    """Return what happens at the fullest moment of a rank of the pipeline, and the bytes by kind.

    parameters, gradients  with the weights that ZeRO has gathered, and all buckets
    communication          other buffers that a collective has filled or is sending, unless a backward needs them
    activations            what else the micro-batches in flight keep for their backwards
    working                all else: gradients of activations, copies in float32, logits, ...
    """
    narrow, wide, _ = WIDTHS[layout.dtype]
    at_rest, gradient = states(model, layout, rank), gradient or wide
    # But for the optimizer state, which is at rest, ZeRO-1 holds what no ZeRO does
    alike = layout._replace(zero=1, zero_replicas=1) if layout.zero < 2 else layout
    case, entry, gathered, gradients = _fullest_moment(model, alike, rank, gradient)
    sizes = at_rest["parameters"] + narrow * gathered, gradient * gradients, at_rest["optimizer state"]
    communication = case.communication + entry.communication
    rest = case.there + entry.held - communication
    activations = min(rest, case.kept)
    name = f"{case.backward.when} backward, {case.walk.name}{entry.name}"
    held = {"communication": communication, "activations": activations, "working": rest - activations}
    return Fullest(name, dict(zip(KINDS, sizes)) | held)


def states(model: ModelConfig, layout: Layout, rank: int, gradient: int | None = None) -> dict[str, float]:
    """Return the bytes of parameters, gradients and optimizer state, each when it is most but for what travels."""
    return _states(model, _at_rest(layout), rank, gradient)


@lru_cache(maxsize=16)  # all ranks of a layout ask for it
def _at_rest(layout: Layout) -> Layout:
    """Return the layout without micro-batches and recomputation, with all kinds of which a search asks."""
    return layout._replace(micro_batch=1, micro_batches=1, recompute="none")


@lru_cache(maxsize=64)
def _states(model: ModelConfig, layout: Layout, rank: int, gradient: int | None) -> dict[str, float]:
    shards = parameters_of_rank(model, layout, rank).shards
    divided = layout.sharing()[0], layout.sharing(experts=True)[0]
    narrow, wide, of_optimizer = WIDTHS[layout.dtype]
    result = {}
    for kind, width, first in zip(KINDS, (narrow, gradient or wide, of_optimizer), (3, 2, 1)):
        ranks = divided if layout.zero >= first else (1, 1)  # from this stage on ZeRO divides it
        result[kind] = width * sum(size / by for size, by in zip(shards, ranks))
    return result


# ---- all events ------------------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    """A part of a stage's backward, in one of the rank's backwards."""

    backward: Backward
    walk: Walk
    begun: int  # gradients that were stored before
    there: float  # bytes that are there when it begins, but for parameters, gradients and optimizer state
    communication: float  # of these
    kept: float  # and of these, what backwards need

    @property
    def most(self) -> float:
        """Bytes at its fullest, but for parameters, gradients and optimizer state."""
        return self.there + self.walk.ledger.fullest[0].held


@lru_cache(maxsize=4096)
def _fullest_moment(
    model: ModelConfig, layout: Layout, rank: int, gradient: int
) -> tuple[_Case, LedgerEntry, float, float]:
    """Return the fullest moment: in which case, the moment, and the elements of gathered weights and gradients then."""
    narrow, mine = WIDTHS[layout.dtype][0], parameters_of_rank(model, layout, rank)
    most_gradients, most, result = gradient * mine.most_gradients, -1.0, None
    for case in _cases(model, layout if layout.zero == 1 else layout._replace(zero=1, zero_replicas=1), rank):
        gathered = mine.gathered(case.walk.region, prefetch=not case.walk.is_loss)
        there = narrow * gathered + case.there
        for entry in case.walk.ledger.fullest if mine.zero > 1 else case.walk.ledger.rising:
            if there + most_gradients + entry.held <= most:
                break  # and no later entry holds more
            gradients = mine.gradients(max(case.begun, case.walk.stored + entry.stored), case.backward.summed)
            held = there + gradient * gradients + entry.held
            if held > most:
                most, result = held, (case, entry, gathered, gradients)
    return result


@lru_cache(maxsize=512)
def _cases(model: ModelConfig, layout: Layout, rank: int) -> list[_Case]:
    """Return all cases, the fullest first. They are the same with every stage of ZeRO."""
    mine, size = parameters_of_rank(model, layout, rank), LayerSizes.of(model, layout)
    kept, result = kept_by_stages(model, layout, rank), []
    walks = [list(walks_of_stage(model, layout, mine, *here)) for here in enumerate(kept)]
    whole, received = sum(each.all for each in kept), sum(each.received for each in kept)
    all_deferred = bytes_of(deferred_by(model, layout, mine))
    of_head = 0.0  # of a micro-batch whose loss has been computed, with two gradients
    if mine.is_last and len(kept) == 1:
        of_head = sum(ends.loss(model, ends.of_an_end(layout)).tensors.values())
    for backward in backwards(model, layout, rank):
        in_flight, at_work = backward.micro_batches, backward.half != "W"  # one of those in flight is at work
        own = kept[backward.stage].all if at_work else 0.0
        others = max(0.0, in_flight * whole - own)
        others += max(0.0, in_flight - at_work) * of_head + backward.deferred * all_deferred
        needed = in_flight * (whole - received) + backward.deferred * all_deferred
        for walk in walks[backward.stage]:
            messages = backward.at_loss if walk.is_loss else backward.messages
            if backward.half not in walk.halves or messages is None or (walk.is_forward and backward.when != "later"):
                continue
            messages -= walk.is_forward and rank > 0  # what is received next is not on its way yet
            in_messages = (messages - walk.keeps_message) * size.stream
            there = others + walk.before + in_messages
            begun = mine.early if backward.early else 0
            result.append(_Case(backward, walk, begun, there, in_messages + in_flight * received, needed))
    return sorted(result, key=attrgetter("most"), reverse=True)
