"""How long a step takes: operations, messages and pauses of a rank, in seconds, from the steps' own costs.

This is physics: FLOPs, bytes, bubbles and data sheets. What an implementation makes of them is a `Profile`. Nothing is
simulated: micro-batches follow one another, a message starts late and then moves its bytes, and what may hide behind a
computation hides as far as that is long enough.
"""

import math
from functools import cache, lru_cache
from itertools import groupby
from typing import NamedTuple

from common.costs.vocabulary import WIDTHS, Message
from common.counts import count_flops, count_parameters
from common.model_config import ModelConfig
from common.process_groups import DIMENSION_OF
from step05_pipeline.cost import BUBBLES
from step06_context_parallel.cost import expansions
from step08_5d import cost
from step08_5d.cost import Layout
from step08_5d.planning.stages import layers_of_ranks
from step08_5d.planning.time.machines import Machine
from step08_5d.planning.time.profiles import Profile

# Per parameter: gradient, master weight and two moments are read, all but the first written; the copy
UPDATE_BYTES = 32
AGAIN = {"none": 3, "selective": 3, "full": 4}  # forwards' worth of products in a forward and its backward
CORE_FORWARDS = {"none": 1, "selective": 2, "full": 2}  # of the attention core
SPLIT = ("zb-h1", "zb-h2")  # schedules with split backwards; times are those of 1F1B otherwise
MESSAGES_AGAIN = {"none": 1.0, "selective": 1.0, "full": 7 / 5}  # within a layer: a forward has two of five


class Times(NamedTuple):
    """Seconds of a step on a rank; they add up to the step."""

    compute: float  # products, attention and small operations, of the slowest rank of a pipeline
    launch: float  # more than that, if a layer has a least time: see `nanotron.py`
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
    """Bytes that a layer's small operations move for a micro-batch: 40 h for norms and additions, 30 f for SwiGLU.

    Norms of latents take 16 for each of their numbers.
    """
    numbers = 20 * model.hidden + 15 * model.ffn
    numbers += 8 * (model.latent.q_rank + model.latent.kv_rank) if model.latent else 0
    return layout.tokens / layout.tp * numbers * WIDTHS[layout.dtype][0]


def core_again(model: ModelConfig, recompute: str) -> float:
    """Forwards' worth of products in the attention core, forward and backward.

    The backward has five products where the forward has two: three as wide as keys and two as wide as values.
    """
    keys, values = model.head_width, model.value_width
    return CORE_FORWARDS[recompute] + (3 * keys + 2 * values) / (keys + values)


def on_a_node(layout: Layout, axes: str, machine: Machine) -> int:
    """Return how many of the ranks that differ in these axes only are on a node."""
    here = apart = 1
    divided = (axis for axis in machine.order.split(",") if getattr(layout, axis) > 1)
    for mine, some in groupby(divided, key=lambda axis: axis in axes.split(",")):
        size = math.prod(getattr(layout, axis) for axis in some)
        here *= min(size, max(1, machine.gpus // apart)) if mine else 1
        apart *= size
    return here


def spans(layout: Layout, group: str, machine: Machine) -> tuple[int, int]:
    """Return over how many nodes a group reaches, and how many of its ranks are on each.

    Args:
        group: of `process_groups`. Those that share weights are over dp and cp; those that share experts deal out the
            ranks of a stage: ep takes neighbors, and expert_shard every ep-th.
    """
    copies = layout.zero_replicas if layout.zero else layout.copies
    return _spans(layout.dp, layout.pp, layout.cp, layout.tp, layout.ep, copies, group, machine)


@lru_cache(maxsize=4096)  # a search asks for the same degrees with every stage of ZeRO, micro-batch and recomputation
def _spans(dp: int, pp: int, cp: int, tp: int, ep: int, copies: int, group: str, machine: Machine) -> tuple[int, int]:
    layout = Layout(0, dp, pp, cp, tp, ep, zero=1, zero_replicas=copies)
    machine, axes = machine.for_gpus(dp * pp * cp * tp), DIMENSION_OF[group]
    size, apart, of_experts = getattr(layout, axes), 1, group.startswith("expert")
    if axes == "dp":
        (size, copies), apart = layout.sharing(of_experts), layout.ep if of_experts else 1
        if group.endswith("replica"):
            size, apart = copies, size * apart
        axes = "tp,cp,dp" if of_experts else "cp,dp"
    axes = "tp,cp,dp" if axes == "ep" else axes
    together = min(size, max(1, on_a_node(layout, axes, machine) // apart))
    return math.ceil(size / together), together


def seconds_of(message: Message, layout: Layout, machine: Machine, profile: Profile) -> float:
    """Return the time of all `message.count` messages.

    What nanotron's table says of a network gives way to a measurement; how late its collectives start does not.
    """
    nodes, together = spans(layout, message.group, machine)
    start, speed = profile.start, machine.near * profile.network
    if nodes > 1:
        speed = card(machine, profile) * cards(message.op, nodes, together)
        if message.op not in ("send", "all_to_all"):
            start *= math.log2(2 * nodes)
        if profile.own and message.op != "send":
            start, table = profile.own.collective(message, nodes, together, machine.far, machine.gpus)
            speed = speed if machine.measured else table
    return message.count * (start + message.bytes / min(machine.near, speed))


def card(machine: Machine, profile: Profile) -> float:
    """Return the bytes/s of messages that a GPU sends to other nodes."""
    return machine.far * (1.0 if machine.measured else profile.network)


def cards(op: str, nodes: int, together: int) -> float:
    """Return over how many cards the bytes leave a node that a rank sends to several nodes.

    A collective moves them over the cards of all its ranks on a node. A message to one other rank, which is a ring's
    hop, and an all-to-all have one card for each rank; of an all-to-all, a part stays in the node.
    """
    if op == "send":
        return 1.0
    return nodes / (nodes - 1) if op == "all_to_all" else together


class Shared(NamedTuple):
    """Seconds of a step that are the same with all kinds of recomputation, before anything hides."""

    within: list[tuple[str, float]]  # messages within layers, by dimension
    dp: list[tuple[Message, float]]  # what copies send each other
    handing_on: float  # between the stages of a pipeline
    update: float


def shared(model: ModelConfig, layout: Layout, machine: Machine, profile: Profile) -> Shared:
    """Return what messages and the update take, found once for profiles and layouts that differ in nothing else."""
    return _shared(model, _not_recomputed(layout), machine, _of_messages(profile))


@lru_cache(maxsize=1)
def _not_recomputed(layout: Layout) -> Layout:
    return layout._replace(recompute="none")


@cache
def _of_messages(profile: Profile) -> Profile:
    return profile._replace(name="", products=1.0, attention=1.0, hides=0.0)


@lru_cache(maxsize=32)
def _shared(model: ModelConfig, layout: Layout, machine: Machine, profile: Profile) -> Shared:
    within, dp = [], []
    for message in _messages(model, layout, profile.gradient):
        dimension = DIMENSION_OF[message.group]
        if dimension == "dp":
            dp.append((message, seconds_of(message, layout, machine, profile)))
        elif dimension != "pp":
            within.append((dimension, seconds_of(message, layout, machine, profile)))
    handed = handing_on(model, layout, machine, profile) if layout.pp > 1 else 0.0
    held = sum(cost.parameters(model, layout)) / layout.sharing()[0]
    return Shared(within, dp, layout.micro_batches * handed, UPDATE_BYTES * held / machine.memory_bandwidth)


@lru_cache(maxsize=1)  # which all profiles ask for
def _messages(model: ModelConfig, layout: Layout, gradient: int | None) -> list[Message]:
    return cost.messages(model, layout, ends=False, gradient=gradient)


def mean_rank(
    model: ModelConfig, layout: Layout, machine: Machine, profile: Profile, messages: list[tuple[str, float]]
) -> tuple[float, float, float, float, dict[str, float]]:
    """Predict what a rank with the mean number of layers takes, whatever the schedule.

    Args:
        messages: those within layers, as in `Shared`.

    Returns the seconds of a micro-batch, forward and backward, in a layer, for the gradients of its weights, and in the
    head with the loss; and of a step, as in `Times`, the launches and by dimension all that nothing hides, but for `dp`
    and `pp`.
    """
    m, layers = layout.micro_batches, model.blocks / layout.pp
    flops, rate = count_flops(model, layout.seq), machine.products * profile.products
    of_attention = machine.attention * profile.attention
    of_rank = layout.micro_batch / (layout.cp * layout.tp)  # sequences
    beside = 2 * layout.seq * count_parameters(model).mtp_projection  # of the last stage, as the head is
    core = core_again(model, layout.recompute) * flops.attention_core / 2 / model.blocks * of_rank / of_attention
    weights = (flops.linear - beside) / model.blocks * of_rank / rate
    layer = AGAIN[layout.recompute] * weights + core
    again = AGAIN[layout.recompute] / 3  # small operations are repeated, too
    layer += again * profile.small * small_bytes(model, layout) / machine.memory_bandwidth
    # In the ring, a rank expands the latents of all ranks
    more = expansions(layout.cp_mode, layout.cp, layout.recompute) - AGAIN[layout.recompute]
    layer += more * flops.expansion / model.blocks * of_rank / rate
    head, predictions = 3 * (flops.head + beside) * of_rank / rate, 1 + model.mtp
    head += profile.small * 20 * predictions * layout.tokens * model.vocab / layout.tp / machine.memory_bandwidth
    exposed = dict.fromkeys(("tp", "cp", "ep", "pp", "dp"), 0.0)
    for dimension, seconds in messages:
        hides = profile.hides
        if dimension == "cp":  # no more of a hop hides than attention takes
            hides = min(hides, core * m * layers / seconds) if seconds else 0.0
        else:
            seconds *= MESSAGES_AGAIN[layout.recompute]
        exposed[dimension] += (1 - hides) * seconds
    launch = 0.0
    if profile.own:
        meanwhile = exposed["cp"] + exposed["ep"] + (exposed["tp"] if layout.pp > 1 else 0.0)
        least = again * profile.own.least(layout, spans(layout, "tp", machine)[0])
        launch = max(0.0, m * layers * (least - layer) - meanwhile)
    return layer, weights, head, launch, exposed


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


def times(model: ModelConfig, layout: Layout, machine: Machine, profile: Profile) -> Times:
    """Predict the step of the slowest rank of a pipeline, for which all others wait."""
    m, mean = layout.micro_batches, model.blocks / layout.pp
    within, dp, handed, update = shared(model, layout, machine, profile)
    layer, weights, head, launch, exposed = mean_rank(model, layout, machine, profile, within)
    whole = layer + (launch + sum(exposed.values())) / (m * mean)
    slowest = pace(model, layout, whole, head)
    waits = slowest.waits
    if layout.schedule in SPLIT:  # ranks wait for each other after a step, at least for the first forward
        forward = whole / AGAIN[layout.recompute]
        waits *= max(forward, BUBBLES[layout.schedule](2, forward, whole - forward, weights)) / whole
    # It has `more` times the layers of the mean rank, and so of its launches and messages
    layers, head, more = slowest.layers, head * slowest.head, slowest.layers / mean
    launch, exposed = more * launch, {dimension: more * seconds for dimension, seconds in exposed.items()}
    exposed["pp"] = (1 - profile.hides) * handed
    forward = layers * layer / AGAIN[layout.recompute] + head / 3
    exposed["dp"] = not_hidden(
        [(message, more * time) for message, time in dp], forward, layers * layer + head, profile
    )
    compute, share = m * (layers * layer + head), waits / (layout.stages * m + waits)
    busy = compute + launch + sum(exposed.values()) - exposed["dp"]
    return Times(compute, launch, bubble=busy * share / (1 - share), update=update, **exposed)


def handing_on(model: ModelConfig, layout: Layout, machine: Machine, profile: Profile) -> float:
    """Return the seconds of a micro-batch's messages to the next stages and back, for a stage in the middle."""
    near = spans(layout, "pp_forward", machine)[0] == 1
    start = profile.own.far_start if profile.own and not near else profile.start
    speed = profile.network * machine.near if near and not profile.own else card(machine, profile)
    sends = 2 * layout.stages * layout.tokens * model.hidden * WIDTHS[layout.dtype][0] / layout.tp
    return sends / speed + 2 * layout.stages * start


def not_hidden(messages: list[tuple[Message, float]], forward: float, both: float, profile: Profile) -> float:
    """Return the seconds of sums of gradients, and of gathers of weights, that hide behind no computation.

    Nanotron's sums hide as far as the backward is long enough, and its gathers do not.

    Args:
        messages: with the seconds of each. forward, both: seconds of a micro-batch's forward, and with its backward.
    """
    free, exposed = {"the forward": forward, "the backward": both - forward}, 0.0
    hidden = dict.fromkeys(free, 0.0)
    for message, time in messages:  # those that hide behind the same computation share it
        may = (message.op != "all_gather") if profile.own else profile.hides
        during = "the forward" if message.hidden_by == "the forward" else "the backward"  # of this or other stages
        hides = min(may * time, max(0.0, free[during] * message.count - hidden[during]))
        hidden[during] += hides
        exposed += time - hides
    return exposed


def mfu(model: ModelConfig, layout: Layout, seconds: float, machine: Machine) -> float:
    """Model FLOPs utilization of a step of so many seconds: PaLM's, with attention's full square."""
    sequences = layout.micro_batch * layout.micro_batches / (layout.cp * layout.tp * layout.pp)
    return count_flops(model, layout.seq).model * sequences / seconds / machine.peak
