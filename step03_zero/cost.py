"""What ZeRO costs: a rank holds 1/N of what its stage divides, and borrows the rest.

Psi is the number of parameters, N the ranks of a shard group, M the micro-batches of a step. A unit is what is gathered
or reduced at a time: in stages 1 and 2 a bucket; in stage 3 the embedding, a layer, or the final norm with the head.
Operations are those of step 2.
"""

import math

from common.costs.alpha_beta import Player
from common.costs.vocabulary import KINDS, WIDTHS, Message, sent
from step02_data_parallel.cost import SCALAR

# ---- what a rank holds and sends -------------------------------------------------------------------------------------


def held(parameters: float, stage: int, ranks: float, widths: tuple[int, ...] = WIDTHS["float32"]) -> dict[str, float]:
    """Return the bytes of parameters, gradients and optimizer state that a rank holds ("ZeRO", section 5 and figure 1).

    Each when it is most: gradients when the backward ends. Padding, less than N elements a unit, is left out.

    Args:
        parameters: Psi. widths: bytes per parameter of each kind.
    """
    sharded_from = (3, 2, 1)  # the stage that shards each kind
    shares = [parameters / (ranks if stage >= first else 1) for first in sharded_from]
    return {kind: width * share for kind, width, share in zip(KINDS, widths, shares, strict=True)}


def saving(stage: int, ranks: float, widths: tuple[int, ...] = (2, 2, 12)) -> float:
    """Return how many times smaller ZeRO makes what a rank holds; `ranks` may be infinite.

    With the paper's widths it tends to 4 in stage 1 and to 8 in stage 2, and is N in stage 3 ("ZeRO", section 5.4).
    """
    held_by_each = sum(held(1, stage, ranks, widths).values())
    return sum(widths) / held_by_each if held_by_each else math.inf


def messages(
    units: tuple[float, ...],
    stage: int,
    ranks: int,
    micro_batches: int = 1,
    replicas: int = 1,
    each_micro_batch: bool = True,
    widths: tuple[int, ...] = WIDTHS["float32"],
    tied: bool = False,
) -> list[Message]:
    """What a rank sends in a step: in its shard group, to its replicas, and two single numbers.

    "ZeRO", section 7, says 2 Psi without ZeRO and in stages 1 and 2, and 3 Psi in stage 3, each times (N-1)/N. Here
    are also accumulation and replicas, and each message has its own type. In stage 3 the last unit stays for the
    backward, and an embedding's backward reads no weights; a tied one is gathered again for the head.

    Args:
        units: elements of each, in the order of the forward.
        ranks: of a shard group, N; stage 0 has `replicas` only.
        each_micro_batch: stages 2 and 3 reduce-scatter the gradients of every micro-batch.
        widths: bytes of a parameter and of a gradient.
        tied: the first unit's weights are also those of the head.
    """
    weight, gradient, *_ = widths
    gathers = micro_batches if stage == 3 else 1
    scatters = micro_batches if stage >= 2 and each_micro_batch else 1
    found = []

    def gathered(sizes: tuple[float, ...], behind: str) -> None:
        for size in sizes:
            found.append(Message("shard", "all_gather", sent("all_gather", weight * size, ranks), gathers, behind))

    if stage > 0:
        gathered(units, "forward")
    if stage == 3:
        gathered(units[:1] if tied and len(units) > 1 else (), "forward")
        gathered(units[1:-1], "backward")
    for size in units:
        if stage > 0:
            scattered = sent("reduce_scatter", gradient * size, ranks)
            found.append(Message("shard", "reduce_scatter", scattered, scatters, "backward"))
        if replicas > 1:
            across = sent("all_reduce", gradient * size / ranks, replicas)
            found.append(Message("replica", "all_reduce", across, 1, "last backward"))
    scalar = sent("all_reduce", SCALAR, ranks * replicas)
    return [*found, Message("dp_cp", "all_reduce", scalar, 1), Message("world", "all_reduce", scalar, 1)]


def resident(units: tuple[float, ...], ranks: int, width: int, prefetch: bool = True) -> float:
    """Return the most bytes of parameters that stage 3 holds: the shard, the unit in use and the one in flight."""
    pairs = [here + following for here, following in zip(units, units[1:])] if prefetch else []
    return width * (sum(units) / ranks + max(pairs or units))


# ---- does it hide ----------------------------------------------------------------------------------------------------


def tokens_to_hide_gather(ranks: int, bandwidth: float, peak_flops: float, width: int = 2) -> float:
    """Return the tokens per rank and micro-batch that make a unit's forward as long as the next one's all-gather.

    A unit of P parameters takes width P (N-1)/N / bandwidth against 2 P tokens / peak_flops. P cancels.

    Args:
        bandwidth: bytes per second. width: bytes per parameter.
    """
    return width / 2 * (ranks - 1) / ranks * peak_flops / bandwidth


def tokens_to_hide_scatter(ranks: int, bandwidth: float, peak_flops: float, width: int = 4) -> float:
    """Return the tokens whose backward, 4 P tokens, takes as long as stage 2's reduce-scatter of P gradients."""
    return width / 4 * (ranks - 1) / ranks * peak_flops / bandwidth


def tokens_to_hide_backward(
    ranks: int, gather: float, scatter: float, peak_flops: float, widths: tuple[int, int] = (2, 4)
) -> float:
    """Return the tokens whose backward hides an all-gather and a reduce-scatter of stage 3.

    Args:
        gather, scatter: their bandwidths, bytes per second. widths: bytes of a parameter and of a gradient.
    """
    return (ranks - 1) / ranks * peak_flops / 4 * (widths[0] / gather + widths[1] / scatter)


def appendix_a3(ranks: int, bandwidth: float, peak_flops: float, tokens: float) -> float:
    """Return the playbook's ratio for ZeRO-3 (appendix A3): elements, although a bandwidth is bytes per second."""
    return 1 / (2 * tokens) * (ranks - 1) / ranks * peak_flops / bandwidth


def cheatsheet_zero3(ranks: int, bandwidth: float, peak_flops: float, tokens: float) -> float:
    """Return the ratio of the playbook's cheatsheet for ZeRO-3, which also lacks 1/N."""
    return (ranks - 1) * peak_flops / (2 * tokens * bandwidth)


def cheatsheet_zero2(ranks: int, bandwidth: float, peak_flops: float, tokens: float, parameters: float) -> float:
    """Return the ratio of the playbook's cheatsheet for ZeRO-2: the number of parameters should have canceled."""
    return (ranks - 1) * parameters * peak_flops / (4 * bandwidth * tokens * ranks)


# ---- the link, played: stage 0 is step 2's `play_step` ---------------------------------------------------------------


def play_buckets(
    player: Player,
    buckets: list[list[int]],
    regions: list[list[int]],
    sizes: list[int],
    costs: list,
    times: tuple,
    update: float = 0.0,
    early: bool = False,
) -> None:
    """Play a step of stage 1 or 2: gather all, and wait in the forward region by region; scatter full buckets.

    It begins with the update of the step before.

    Args:
        buckets: indices of parameters, in the order of the backward.
        regions: indices of parameters, in the order of the forward.
        sizes: bytes of each parameter, which are also those of its gradient.
        costs: of each parameter's computation, in any unit. times: seconds of the forward and of the backward.
        update: seconds of the optimizer for this rank's shards.
        early: gather a bucket as soon as it is updated. Else, as our stages do, all of them when the update is over.
    """
    forward, backward = (seconds / sum(costs) for seconds in times)
    whole = [sum(sizes[index] for index in bucket) for bucket in buckets]
    arrival = {}  # of each parameter's gathered weights
    player.now += 0 if early else update
    for bucket, size in zip(reversed(buckets), reversed(whole)):
        player.now += update * size / sum(whole) if early else 0
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
