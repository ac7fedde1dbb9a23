"""How long a step takes: operations, messages and pauses of a rank, in seconds, from the steps' own costs.

This model is made to rank layouts. It simulates nothing: micro-batches follow one another, a collective starts late and
then moves its bytes, and what may hide behind a computation hides as far as that is long enough.
"""

import math
from functools import cache, lru_cache
from typing import NamedTuple

from common.costs.networks import NETWORK, bus_bandwidth
from common.costs.vocabulary import WIDTHS, Message
from common.counts import count_flops
from common.model_config import ModelConfig
from common.process_groups import DIMENSION_OF
from step08_5d import cost
from step08_5d.cost import Layout
from step08_5d.planning.stages import layers_of_ranks
from step08_5d.planning.time.machines import OURS, Habits, Machine

# Per parameter: gradient, master weight and two moments are read, all but the first written; the copy
UPDATE_BYTES = 32
AGAIN = {"none": 3, "selective": 3, "full": 4}  # forwards' worth of products in a forward and its backward
CORE_AGAIN = {"none": 3.5, "selective": 4.5, "full": 4.5}  # the same of the attention core: five products for two
# Operations of a ring's hop, forward and backward, in those of a layer: a dry run counts 97 and 576
RING_HOP = 0.17


class Times(NamedTuple):
    """Seconds of a step on a rank; they add up to the step."""

    compute: float  # products, attention and small operations, of the slowest rank of a pipeline
    launch: float  # more than that, if no layer is faster: the CPU has to launch it
    tp: float  # communication that nothing hides, by dimension
    cp: float
    ep: float
    pp: float
    dp: float
    bubble: float
    update: float

    @property
    def step(self) -> float:
        return sum(self)

    @property
    def binds(self) -> str:
        """What takes the most time besides the computation."""
        return max(self._fields[1:], key=lambda name: getattr(self, name))


def small_bytes(model: ModelConfig, layout: Layout) -> float:
    """Bytes that a layer's small operations move for a micro-batch: 40 h for norms and additions, 30 f for SwiGLU."""
    return layout.tokens / layout.tp * (20 * model.hidden + 15 * model.ffn) * WIDTHS[layout.dtype][0]


def spans(layout: Layout, dimension: str, machine: Machine, order: str) -> tuple[int, int]:
    """Return over how many nodes a group of `dimension` reaches, and how many of its ranks are in each."""
    return _spans(layout.dp, layout.pp, layout.cp, layout.tp, layout.ep, dimension, machine.gpus, order)


@cache  # a search asks for a few hundred of them, and often
def _spans(dp: int, pp: int, cp: int, tp: int, ep: int, dimension: str, of_node: int, order: str) -> tuple[int, int]:
    sizes, axes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}, order.split(",")
    first = {"ep": "tp" if ep <= tp else "cp", "dp": "cp" if cp > 1 else "dp"}.get(dimension)
    before = math.prod(sizes[axis] for axis in axes[: axes.index(first or dimension)])
    size = {"ep": ep, "dp": dp * cp}.get(dimension) or sizes[dimension]
    together = min(size, max(1, of_node // before))
    return math.ceil(size / together), together


def launching(layout: Layout, machine: Machine, habits: Habits) -> float:
    """Seconds in which the CPU launches a layer, forward and backward, for a micro-batch: no layer takes less.

    Recomputation launches the forward again, and a ring of cp ranks cp hops of attention. In a pipeline a layer takes
    longer, which includes the messages of its tensor ranks.
    """
    least, hops = habits.launch, layout.cp if layout.cp > 1 else 0
    if layout.pp > 1:
        nodes, _ = spans(layout, "tp", machine, habits.order)
        least = max(least, habits.paced * layout.tp**habits.apart * nodes**habits.crowd)
    return AGAIN[layout.recompute] / 3 * least * (1 + RING_HOP * hops)


def seconds_of(message: Message, dimension: str, layout: Layout, machine: Machine, habits: Habits) -> float:
    """Return the time of all `message.count` messages.

    Between nodes a collective starts the later, the more nodes there are, and moves bytes as fast as the playbook's
    authors measured for whole nodes (`bus_bandwidth`, on cards of 50 GB/s); slower, if it has few of a node's ranks.
    """
    nodes, together = spans(layout, dimension, machine, habits.order)
    if nodes == 1:
        return message.count * (habits.near_start + message.bytes / machine.near)
    start = habits.far_start * (nodes - 1) ** habits.spread
    op = message.op if message.op in ("all_reduce", "reduce_scatter") else "all_gather"
    whole_nodes = bus_bandwidth(op, nodes * machine.gpus) * machine.far / NETWORK
    speed = whole_nodes * (together / machine.gpus) ** habits.cards
    return message.count * (start + message.bytes / min(machine.near, speed))


class Mean(NamedTuple):
    """What a rank with the mean number of layers takes, in seconds."""

    layer: float  # of a micro-batch, forward and backward, in one layer
    head: float  # the same in the head with the loss
    launch: float  # of a step, as in `Times`
    exposed: dict[str, float]  # of a step, by dimension, but for `dp` and for the sends of a pipeline
    dp: list[tuple[Message, float]]  # what copies send each other, with the time of each


@lru_cache(maxsize=1)  # a search asks for one layout with several schedules, one after the other
def mean_rank(model: ModelConfig, layout: Layout, machine: Machine, habits: Habits) -> Mean:
    """Predict what a rank with the mean number of layers takes, whatever the schedule."""
    m, layers = layout.micro_batches, model.layers / layout.pp
    flops, rate = count_flops(model, layout.seq), machine.peak * habits.efficiency
    of_rank = layout.micro_batch / (layout.cp * layout.tp)  # sequences
    products = AGAIN[layout.recompute] * flops.linear + CORE_AGAIN[layout.recompute] * flops.attention_core / 2
    layer = products / model.layers * of_rank / rate
    again = AGAIN[layout.recompute] / 3  # small operations are repeated, too
    layer += again * habits.small * small_bytes(model, layout) / machine.memory_bandwidth
    head = 3 * flops.head * of_rank / rate
    head += habits.small * 20 * layout.tokens * model.vocab / layout.tp / machine.memory_bandwidth
    dp, exposed = [], dict.fromkeys(("tp", "cp", "ep", "pp", "dp"), 0.0)
    for message in cost.messages(model, layout, ends=False):
        dimension = DIMENSION_OF[message.group]
        if dimension == "dp":
            dp.append((message, seconds_of(message, dimension, layout, machine, habits)))
        elif dimension != "pp":
            exposed[dimension] += seconds_of(message, dimension, layout, machine, habits)
    meanwhile = exposed["cp"] + exposed["ep"] + (exposed["tp"] if layout.pp > 1 else 0.0)
    launch = max(0.0, m * layers * (launching(layout, machine, habits) - layer) - meanwhile)
    return Mean(layer, head, launch, exposed, dp)


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
    most = max(others, default=0)
    if last * layer + head >= most * layer:
        return Pace(last, True, sum(others) * layer / (last * layer + head))
    return Pace(most, False, ((sum(others) - most + last) * layer + head) / (most * layer))


def times(model: ModelConfig, layout: Layout, machine: Machine, habits: Habits = OURS) -> Times:
    """Predict the step of the slowest rank of a pipeline, for which all others wait."""
    m, mean = layout.micro_batches, model.layers / layout.pp
    layer, head, launch, exposed, dp = mean_rank(model, layout._replace(stages=1), machine, habits)
    slowest = pace(model, layout, layer + (launch + sum(exposed.values())) / (m * mean), head)
    # It has `more` times the layers of the mean rank, and so of its launches and messages
    layers, head, more = slowest.layers, head * slowest.head, slowest.layers / mean
    launch, exposed = more * launch, {dimension: more * seconds for dimension, seconds in exposed.items()}
    if layout.pp > 1:
        start = habits.near_start if spans(layout, "pp", machine, habits.order)[0] == 1 else habits.far_start
        sends = 2 * layout.stages * layout.tokens * model.hidden * WIDTHS[layout.dtype][0] / layout.tp
        exposed["pp"] = m * (sends / machine.far + 2 * layout.stages * start)
    forward = layers * layer / AGAIN[layout.recompute] + head / 3
    exposed["dp"] = not_hidden([(message, more * time) for message, time in dp], forward, layers * layer + head, habits)
    compute, share = m * (layers * layer + head), slowest.waits / (layout.stages * m + slowest.waits)
    busy = compute + launch + sum(exposed.values()) - exposed["dp"]
    exposed["pp"] += lateness(layout, habits.pause)
    held = sum(cost.parameters(model, layout)) / (layout.copies if layout.zero else 1)
    update = UPDATE_BYTES * held / machine.memory_bandwidth
    return Times(compute, launch, bubble=busy * share / (1 - share), update=update, **exposed)


def lateness(layout: Layout, pause: float) -> float:
    """Return the seconds that a step takes more if each message between stages is late by `pause`.

    A stage in the middle exchanges four of them per micro-batch, one after the other; with two stages, each has two.
    All of them count, also those that a bubble might hide: so do the published runs that are late.
    """
    if layout.pp == 1:
        return 0.0
    return pause * 2 * layout.stages * min(2, layout.pp * layout.stages - 1) * layout.micro_batches


def not_hidden(messages: list[tuple[Message, float]], forward: float, both: float, habits: Habits) -> float:
    """Return the seconds of sums of gradients, and of gathers of weights, that hide behind no computation.

    Args:
        messages: with the seconds of each. forward, both: seconds of a micro-batch's forward, and with its backward.
    """
    free, exposed = {"the forward": forward, "the backward": both - forward}, 0.0
    hidden = dict.fromkeys(free, 0.0)
    for message, time in messages:  # those that hide behind the same computation share it
        share = habits.prefetch if message.op == "all_gather" else habits.hides
        during = "the forward" if message.hidden_by == "the forward" else "the backward"  # of this or other stages
        hides = min(time, max(0.0, share * free[during] * message.count - hidden[during]))
        hidden[during] += hides
        exposed += time - hides
    return exposed


def mfu(model: ModelConfig, layout: Layout, seconds: float, machine: Machine) -> float:
    """Model FLOPs utilization of a step of so many seconds: PaLM's, with attention's full square."""
    sequences = layout.micro_batch * layout.micro_batches / (layout.cp * layout.tp * layout.pp)
    return count_flops(model, layout.seq).model * sequences / seconds / machine.peak
