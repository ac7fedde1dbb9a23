"""What theory says of step 3: bytes held, bytes sent, number of collectives, and how much of them cannot hide.

Psi is the number of parameters, N the ranks of a shard group, M the micro-batches of a step, U the units of stage 3 (a
layer each; the embedding; the final norm with the head). The link is the alpha-beta model of
`common/costs/alpha_beta.py`.
"""

from dataclasses import dataclass

from common.costs.alpha_beta import Player

# Bytes per parameter: parameters, gradients, optimizer state (master weights and Adam's two moments).
OURS = {"float32": (4, 4, 8), "bfloat16": (2, 4, 12)}  # gradients are only ever stored in buckets of at least float32
PAPER = (2, 2, 12)  # "ZeRO", section 3.1: half-precision gradients, K = 12
FLOAT32_SUMS = (2, 2 + 4, 12)  # and beside them float32 sums, which the playbook counts
PLOTTED = (2, 2, 8)  # what the bars of the playbook's figure of 8 B parameters contain: no master weights


# ---- memory ----------------------------------------------------------------------------------------------------------


def held(parameters: float, stage: int, ranks: int, widths: tuple[int, int, int]) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer state that a rank holds ("ZeRO", section 5 and figure 1).

    Gradients are counted when the backward ends, when they are most. The padding of units, less than N elements each,
    is left out.

    Args:
        parameters: Psi. widths: bytes per parameter, such as `OURS["bfloat16"]`.
    """
    sharded_from = (3, 2, 1)  # the stage that shards each of them
    parts = zip(widths, sharded_from)
    return tuple(parameters * width / (ranks if stage >= first else 1) for width, first in parts)


def limit(stage: int, widths: tuple[int, int, int]) -> float:
    """Return how many times less a rank holds than without ZeRO, for N -> infinity."""
    rest = sum(held(1.0, stage, 10**12, widths))
    return sum(widths) / rest


# ---- traffic ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """The sizes that decide the traffic: elements of each unit, in the order of the forward (the embedding first)."""

    units: tuple[int, ...]
    tied: bool = False

    @property
    def parameters(self) -> int:
        return sum(self.units)


def all_gathers(model: Model, micro_batches: int = 1) -> int:
    """Return how many all-gathers stage 3 issues in a step.

    The rule says 2U-1 per micro-batch: all units in the forward, and all but the last one again in the backward.
    Ours are one fewer, because an embedding's backward reads no weights; a tied one is gathered again for the head.
    """
    if len(model.units) == 1:  # it contains the embedding, is gathered for the forward, and stays
        return micro_batches
    return micro_batches * (2 * len(model.units) - 2 + model.tied)


def sent(
    model: Model,
    stage: int,
    ranks: int,
    micro_batches: int = 1,
    replicas: int = 1,
    each_micro_batch: bool = True,
    widths: tuple[int, int] = (4, 4),
) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step within its shard group, and within its replica group.

    "ZeRO", section 7, says 2 Psi without ZeRO and in stages 1 and 2, and 3 Psi in stage 3, each times (N-1)/N. This
    count adds accumulation and replicas, saves the embedding's second gather, and takes each message in its own type.

    Args:
        ranks: of a shard group, N; stage 0 has `replicas` only.
        each_micro_batch: stages 2 and 3 reduce-scatter the gradients of every micro-batch.
        widths: bytes of a parameter and of a gradient.
    """
    gathered = model.parameters
    if stage == 3:
        again = sum(model.units[1:-1]) + (model.units[0] if model.tied else 0)
        gathered = micro_batches * (model.parameters + again)
    scattered = model.parameters * (micro_batches if stage >= 2 and each_micro_batch else 1)
    share = (ranks - 1) / ranks
    inside = share * (gathered * widths[0] + scattered * widths[1])
    across = 2 * (replicas - 1) / replicas * model.parameters / ranks * widths[1]
    return inside, across


def resident(model: Model, ranks: int, width: int, prefetch: bool = True) -> float:
    """Return the most bytes of parameters that stage 3 holds: the shard, the unit in use and the one in flight."""
    units = model.units
    pairs = [here + following for here, following in zip(units, units[1:])] if prefetch else []
    return width * (model.parameters / ranks + max(pairs or units))


# ---- when does it hide -----------------------------------------------------------------------------------------------


def tokens_to_hide_gather(ranks: int, bandwidth: float, peak_flops: float, width: int = 2) -> float:
    """Return the tokens per rank and micro-batch that make a unit's forward as long as the next one's all-gather.

    A unit of P parameters takes width P (N-1)/N / bandwidth against 2 P tokens / peak_flops. P cancels. (The
    playbook's appendix A3, which counts elements although bandwidths are bytes per second.)

    Args:
        bandwidth: bytes per second. width: bytes per parameter.
    """
    return width / 2 * (ranks - 1) / ranks * peak_flops / bandwidth


def tokens_to_hide_backward(
    ranks: int, gather: float, scatter: float, peak_flops: float, widths: tuple[int, int] = (2, 4)
) -> float:
    """Return the same for the backward: 4 P tokens of computation hide an all-gather and a reduce-scatter.

    Args:
        gather, scatter: their bandwidths, bytes per second. widths: bytes of a parameter and of a gradient.
    """
    return (ranks - 1) / ranks * peak_flops / 4 * (widths[0] / gather + widths[1] / scatter)


def tokens_to_hide_scatter(ranks: int, bandwidth: float, peak_flops: float, width: int = 4) -> float:
    """Return the tokens whose backward, 4 P tokens, takes as long as stage 2's reduce-scatter of P gradients."""
    return width / 4 * (ranks - 1) / ranks * peak_flops / bandwidth


def appendix_a3(ranks: int, bandwidth: float, peak_flops: float, tokens: float) -> float:
    """Return the playbook's ratio for ZeRO-3 (appendix A3): elements, although a bandwidth is bytes per second."""
    return 1 / (2 * tokens) * (ranks - 1) / ranks * peak_flops / bandwidth


def cheatsheet_zero3(ranks: int, bandwidth: float, peak_flops: float, tokens: float) -> float:
    """Return the ratio of the playbook's cheatsheet for ZeRO-3, which also lacks 1/N."""
    return (ranks - 1) * peak_flops / (2 * tokens * bandwidth)


def cheatsheet_zero2(ranks: int, bandwidth: float, peak_flops: float, tokens: float, parameters: float) -> float:
    """Return the ratio of the playbook's cheatsheet for ZeRO-2: the number of parameters should have cancelled."""
    return (ranks - 1) * parameters * peak_flops / (4 * bandwidth * tokens * ranks)


# ---- the link, played ------------------------------------------------------------------------------------------------


def play_all_reduces(player: Player, buckets: list[list[int]], sizes: list[int], costs: list, times: tuple) -> None:
    """Play a step of stage 0: in the backward, full buckets are all-reduced. Arguments as of `play_buckets`."""
    forward, backward = times
    player.now += forward
    for bucket in buckets:
        player.now += backward * sum(costs[index] for index in bucket) / sum(costs)
        complete = player.all_reduce(sum(sizes[index] for index in bucket))
    player.wait(complete)


def play_buckets(
    player: Player, buckets: list[list[int]], regions: list[list[int]], sizes: list[int], costs: list, times: tuple
) -> None:
    """Play a step of stage 1 or 2: gather all, and wait in the forward region by region; scatter full buckets.

    Args:
        buckets: indices of parameters, in the order of the backward.
        regions: indices of parameters, in the order of the forward.
        sizes: bytes of each parameter, which are also those of its gradient.
        costs: of each parameter's computation, in any unit. times: seconds of the forward and of the backward.
    """
    forward, backward = (seconds / sum(costs) for seconds in times)
    whole = [sum(sizes[index] for index in bucket) for bucket in buckets]
    arrival = {}  # of each parameter's gathered weights
    for bucket, size in zip(reversed(buckets), reversed(whole)):
        arrival |= dict.fromkeys(bucket, player.message(size))
    for region in regions:
        player.wait(max(arrival[index] for index in region))
        player.now += forward * sum(costs[index] for index in region)
    complete = 0.0  # when the reduce-scatter in flight will be complete
    for bucket, size in zip(buckets, whole):
        player.now += backward * sum(costs[index] for index in bucket)
        previous, complete = complete, player.message(size)
        player.wait(previous)
    player.wait(complete)


def play_units(
    player: Player,
    sizes: list[float],
    costs: list,
    times: tuple,
    prefetch: bool = True,
    scattered: list[float] | None = None,
) -> None:
    """Play a step of stage 3.

    Args:
        sizes: bytes of each unit's weights, in the order of the forward. costs, times: as of `play_buckets`, of units.
        scattered: bytes of each unit's gradients, by default those of its weights.
    """
    scattered = scattered or sizes
    forward, backward = (seconds / sum(costs) for seconds in times)
    last, arrival = len(sizes) - 1, {}  # when the weights of the units that are gathered have arrived

    def fetch(unit: int) -> None:
        if unit not in arrival:
            arrival[unit] = player.message(sizes[unit])

    for unit, cost in enumerate(costs):
        fetch(unit)
        player.wait(arrival[unit])
        if prefetch and unit < last:
            fetch(unit + 1)
        player.now += forward * cost
        if unit < last:
            del arrival[unit]
    complete = 0.0  # when the reduce-scatter in flight will be complete
    for unit in range(last, -1, -1):
        if unit > 0:  # the embedding's backward needs no weights
            fetch(unit)
            player.wait(arrival[unit])
            if prefetch and unit > 1:
                fetch(unit - 1)
        if unit < last:  # the gradients of the unit above follow the gather that has just been launched
            previous, complete = complete, player.message(scattered[unit + 1])
            player.wait(previous)
        player.now += backward * costs[unit]
    previous, complete = complete, player.message(scattered[0])
    player.wait(previous)
    player.wait(complete)
