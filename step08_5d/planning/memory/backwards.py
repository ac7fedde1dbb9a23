"""Of how many micro-batches a rank of a pipeline keeps activations, and which messages it holds, in each backward.

The schedule is 1F1B (or another with one stage per rank), or interleaved where a rank has several.
"""

import math
from collections import Counter
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from common.model_config import ModelConfig
from step05_pipeline.schedules.actions import Action
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.messages import place_messages
from step05_pipeline.schedules.whole_backward import forwards_ahead
from step08_5d.cost import Layout
from step08_5d.planning.stages import layers_of_ranks, stage_sizes


def fullest_ranks(model: ModelConfig, layout: Layout) -> list[int]:
    """Return ranks of which one holds the most: both ends, and the first one in between with each number of layers.

    A later one with as many layers keeps the activations of fewer micro-batches.
    """
    first_with = {}
    for rank, layers in enumerate(layers_of_ranks(model, layout)[1:-1], 1):
        if layers:  # nanotron leaves some without any
            first_with.setdefault(layers, rank)
    return sorted({0, layout.pp - 1, *first_with.values()})


class Backward(NamedTuple):
    """What a rank holds when a backward of one of its stages begins; of backwards that are alike, the most.

    Messages are hidden states on their way between stages, and gradients, which have this size too. A rank keeps what
    it has sent until it sends again: hidden states, and in a later backward a gradient. What it receives next is there
    while it works. The gradient that it works with stays until the backward is over.
    """

    stage: int  # of the rank's: 0 is the first one of a forward
    when: str  # first: of this stage in a step; later: while there are forwards to come; last: after them
    micro_batches: float  # of which it keeps the activations; of some stages only, as a part of a micro-batch
    summed: int | None  # the first of the rank's stages that has gradients; None if that is up to this backward
    messages: int = 0  # during the backward
    at_loss: int | None = None  # of those, the ones that are there when the loss is computed; None: it is not now
    half: str = "B"  # B: all of the backward; I, W: its halves (step 5); F: the forward that ends in the loss
    deferred: int = 0  # micro-batches that lack the gradients of weights: I has been, W has not
    early: bool = False  # whether an I has been since the last W


def until_it_repeats(layout: Layout) -> int:
    """Return after how many of its micro-batches all that a schedule holds repeats itself."""
    p, m = layout.pp, layout.micro_batches
    if layout.stages > 1:
        return min(m, 3 * p)
    return {"1f1b": min(m, p + 1), "afab": m}.get(layout.schedule, min(m, 4 * p))


def backwards(model: ModelConfig, layout: Layout, rank: int) -> tuple[Backward, ...]:
    """Return the backwards of a rank's stages, as the schedule has them."""
    p, m = layout.pp, until_it_repeats(layout)
    if layout.stages > 1:
        return _backwards_interleaved(stage_sizes(model, p * layout.stages, layout.seq)[rank::p], p, m, rank)
    if layout.schedule == "1f1b":
        return _backwards_1f1b(p, m, rank)
    return _backwards_of_actions(layout.schedule, p, m, rank)


def in_flight(model: ModelConfig, layout: Layout, rank: int) -> float:
    """Return of how many micro-batches a rank keeps the activations at most, or what a deferred W needs of them."""
    return max(each.micro_batches + each.deferred for each in backwards(model, layout, rank))


def _messages(when: str, sends: bool, receives: bool) -> tuple[int, int]:
    """How many there are during a backward, and at the loss before it. A rank may have a next and a previous one."""
    before, later = receives and when != "first", when == "later"
    return 2 * sends + before * (1 + later), 2 * sends + before


@cache
def _backwards_1f1b(p: int, m: int, rank: int) -> tuple[Backward, ...]:
    most = min(p - rank, m)
    found = [("first", most, None)]
    if m > most:
        found.append(("later", most, 0))
    elif most > 1:
        found.append(("last", most - 1, 0))
    return tuple(Backward(0, *each, *_messages(each[0], rank < p - 1, rank > 0)) for each in found)


@cache
def _backwards_of_actions(name: str, p: int, m: int, rank: int) -> tuple[Backward, ...]:
    """The same of any schedule with one stage per rank, from what step 5 makes of it: actions, sends and receives."""
    schedule, found = build_schedule(name, p, m), {}
    kept, deferred, when, summed, early = 0, 0, "first", None, False
    sent, receiving = set(), Counter()  # directions in which a send is the last one; receives that no action has used
    for item in place_messages(schedule)[rank] if p > 1 else schedule.actions[rank]:
        if not isinstance(item, Action):
            direction = item.output.direction
            if item.kind == "send":
                sent.add(direction)
            else:
                receiving[direction] += 1
            continue
        needed = schedule.input_of(rank, item)
        if needed:
            receiving[needed.direction] -= 1
        messages = len(sent) + receiving.total()
        if item.kind == "F":
            kept += 1
            if rank == p - 1:
                found[Backward(0, when, kept, summed, 0, messages, "F", deferred, early)] = None
            continue
        if item.kind == "W":
            at = "first" if summed is None else "later"
            found[Backward(0, at, kept, summed, messages, None, "W", deferred)] = None
            deferred, early = deferred - 1, False
        else:
            messages += bool(needed)  # the gradient that it works with
            found[Backward(0, when, kept, summed, messages, None, item.kind, deferred, early)] = None
            kept, when = kept - 1, "later"
            if item.kind == "I":
                deferred, early = deferred + 1, True
        if item.kind in "BW":
            summed = 0
    return tuple(found)


@cache
def _backwards_interleaved(sizes: tuple[int, ...], p: int, m: int, rank: int) -> tuple[Backward, ...]:
    """The same of several stages: p micro-batches pass through a stage, then through the next.

    Args:
        sizes: layers of the rank's stages. m: micro-batches, a multiple of p.
    """
    v, most = len(sizes), {}  # the last rank sends to the first
    begun = list(accumulate(size for _ in range(m // p) for size in sizes for _ in range(p)))
    ended = accumulate((size for _ in range(m // p) for size in reversed(sizes) for _ in range(p)), initial=0)
    ahead = forwards_ahead(p, v, p, rank)
    for number, (before, _) in enumerate(zip(ended, begun)):
        turn, stage, forwards = number // (p * v), v - 1 - number // p % v, number + ahead + 1
        when = "first" if number < p * v and number % p == 0 else "later" if forwards < len(begun) else "last"
        summed = None if when == "first" else 0 if turn else stage
        kept = (begun[min(forwards, len(begun)) - 1] - before) / sum(sizes)
        most[stage, when, summed] = max(kept, most.get((stage, when, summed), 0.0))
    found = [(stage, when, kept, summed) for (stage, when, summed), kept in most.items()]
    return _fullest([Backward(*each, *_messages(each[1], p > 1, p > 1)) for each in found])


def _fullest(found: list[Backward]) -> tuple[Backward, ...]:
    """Leave out whole backwards beside which another of the same stage holds at least as much of everything."""
    result: list[Backward] = []
    for one in sorted(found, key=_amounts, reverse=True):
        amounts = (_amounts(each) for each in result if each.stage == one.stage)
        if not any(all(more >= less for more, less in zip(most, _amounts(one))) for most in amounts):
            result.append(one)
    return tuple(result)


def _amounts(backward: Backward) -> tuple[float, ...]:
    summed = -math.inf if backward.summed is None else -backward.summed  # from this stage on there are gradients
    return backward.micro_batches, summed, backward.messages, backward.at_loss
