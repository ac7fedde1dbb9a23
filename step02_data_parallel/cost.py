"""What data parallelism costs: every rank holds what one process holds, and all-reduces each gradient once per step.

Ψ is the number of parameters, N the ranks that divide the samples, beta the bytes per gradient (4, since we add up in
float32) and T the tokens of a rank's micro-batch. Held: as in step 1, on every rank.
"""

from common.costs.alpha_beta import Player
from common.costs.networks import bus_bandwidth
from common.costs.vocabulary import Message, sent

SCALAR = 8  # bytes of the loss and of the gradient's norm


def messages(parameters: float, ranks: int, width: int = 4, buckets: int = 1) -> list[Message]:
    """What a rank sends in a step, however many micro-batches the step has: 2(N-1)/N beta Ψ, and two single numbers.

    Args:
        width: bytes per gradient. buckets: how many all-reduces carry them, such as one for each parameter.
    """
    bucket, scalar = (sent("all_reduce", size, ranks) for size in (width * parameters / buckets, SCALAR))
    return [
        Message("dp_cp", "all_reduce", bucket, buckets, "last backward"),
        Message("dp_cp", "all_reduce", scalar, 1),
        Message("world", "all_reduce", scalar, 1),
    ]


def operations(parameters: float, tokens: float, micro_batches: int = 1) -> dict[str, float]:
    """FLOPs of a step's linear layers. Only the last of its backwards may hide communication.

    Args:
        tokens: of a micro-batch on one rank.
    """
    forward = 2 * parameters * tokens
    return {
        "forward": micro_batches * forward,
        "backward": micro_batches * 2 * forward,
        "last backward": 2 * forward,
    }


# ---- does it hide ----------------------------------------------------------------------------------------------------


def tokens_to_hide(dp: int, bandwidth: float, peak_flops: float, gradient_bytes: int) -> float:
    """Return the tokens per GPU and synchronized backward with which its computation takes as long as the all-reduce.

    All-reduce: 2(DP-1)/DP bytes x parameters / bandwidth. Backward: 4 tokens x parameters / peak_flops. The parameters
    cancel: bytes x (DP-1) x peak_flops / (2 DP bandwidth) tokens.
    """
    return gradient_bytes * (dp - 1) * peak_flops / (2 * dp * bandwidth)


def printed_ratio(parameters: int, tokens: int, dp: int, bandwidth: float, peak_flops: float) -> float:
    """Evaluate the playbook's formula as printed: parameters do not cancel, and bytes per gradient are missing."""
    return parameters / (2 * tokens) * (dp - 1) / dp * peak_flops / bandwidth


def exposed_share(ratio: float, accumulation: int) -> float:
    """Return the part of a step in which nothing but the all-reduce runs, with `ratio` = all-reduce / backward time.

    A forward takes half as long as a backward, and only the last of `accumulation` backwards can hide communication.
    """
    exposed = max(0.0, ratio - 1)
    return exposed / (1.5 * accumulation + exposed)


def tokens_per_second_per_gpu(
    dp: int, samples: int, micro_batch: int, seq_len: int, alone: float, reached_flops: float, gradient_bytes: int
) -> float:
    """Strong scaling: a global batch of `samples` sequences over `dp` H100s, at the playbook's bandwidths.

    Each computes `alone` tokens/s, which are `reached_flops` FLOP/s; what the last backward cannot hide of the
    all-reduce is added. An upper bound: no optimizer, no slow rank, no NCCL kernels beside those that compute.
    """
    accumulation, tokens = samples // (micro_batch * dp), micro_batch * seq_len
    ratio = tokens_to_hide(dp, bus_bandwidth("all_reduce", dp), reached_flops, gradient_bytes) / tokens
    return alone * (1 - exposed_share(ratio, accumulation))


# ---- the link, played ------------------------------------------------------------------------------------------------


def play_step(
    player: Player, buckets: list[list[int]], sizes: list[int], costs: list[float], times: tuple, naive: bool = False
) -> None:
    """Play a step: in the backward, a bucket is all-reduced once it is full and the one before it has left the link.

    Args:
        buckets: indices of parameters, in the order of the backward.
        sizes: bytes of each parameter's gradient, in forward order.
        costs: what each parameter's backward costs, in any unit: for a matrix the number of its elements.
        times: seconds of the forward and of the whole backward.
        naive: the first all-reduce waits for the end of the backward.
    """
    forward, backward = times
    player.now += forward + (backward if naive else 0)
    complete = player.now
    for bucket in buckets:
        player.now += 0 if naive else backward * sum(costs[index] for index in bucket) / sum(costs)
        complete = player.all_reduce(sum(sizes[index] for index in bucket))
    player.wait(complete)
