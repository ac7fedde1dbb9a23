"""What a training step costs, in the words of every `stepNN/cost.py`, so that costs of dimensions can be added up.

All numbers are those of ONE rank in ONE optimizer step. Where ranks differ, an argument says which one is meant (a
pipeline's stage) or the docstring does (the mean, if experts are equally busy). A `cost.py` offers, as far as its
dimension has them, pure functions of a model's shape and of degrees:

- `held(...)`: bytes by kind, `{"parameters": ..., "gradients": ..., "optimizer state": ..., "activations": ...}`, each
  when it is most; a dimension divides some kinds and leaves others alone.
- `messages(...)`: a list of `Message`, with groups and operations named as collectives.record() names them, so that
  `common.experiments.counting.counted` can stand beside it.
- `operations(...)`: FLOPs by computation; a multiply-add is 2. `Message.hidden_by` names one of these computations.

Sizes are in bytes, so a function that counts elements takes their `width` in bytes. Nothing here or in a `cost.py`
imports what trains; a rank's group may have 16,384 others.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from common.link import Link

KINDS = ("parameters", "gradients", "optimizer state")
# Bytes per parameter of each kind in our training. The optimizer's state is Adam's two moments and, beside narrow
# weights, float32 master weights; gradients are only ever stored as sums in at least float32
WIDTHS = {"float64": (8, 8, 16), "float32": (4, 4, 8), "bfloat16": (2, 4, 12), "float16": (2, 4, 12)}


class Message(NamedTuple):
    """One kind of collective, or of message to another rank, in a step."""

    group: str  # of the mesh: common/process_groups.py has their names
    op: str  # as in common/collectives.py: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send
    bytes: float  # that this rank sends in one of them
    count: float  # of them in a step
    hidden_by: str = ""  # the computation that may run meanwhile; "" if the rank can only wait


def sent(op: str, size: float, ranks: int) -> float:
    """Return the bytes that a rank sends in one operation on `size` bytes, of the whole, in the best algorithm.

    Thakur, Rabenseifner and Gropp, 2005: an all-reduce 2(N-1)/N K; a broadcast and a message K; all others (N-1)/N K.
    """
    if op in ("send", "broadcast"):
        return size
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks * size


def seconds(message: Message, ranks: int, link: Link) -> float:
    """Return the time of all `message.count` of them in a group of `ranks`, over a link for each rank: as rings."""
    hops = {"all_reduce": 2 * (ranks - 1), "send": 1}.get(message.op, ranks - 1)
    return message.count * (hops * link.alpha + message.bytes / link.bandwidth)


def added(messages: Iterable[Message]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return how many there are in a step, and the bytes of all of them, by group and operation."""
    number, size = Counter(), Counter()
    for each in messages:
        number[each.group, each.op] += each.count
        size[each.group, each.op] += each.count * each.bytes
    return {key: (number[key], size[key]) for key in number if number[key]}
