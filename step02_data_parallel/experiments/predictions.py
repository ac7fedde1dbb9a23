"""What theory says of step 2: numbers of messages, bytes, and how much of the communication cannot hide.

The link is the alpha-beta model: a ring all-reduce of K bytes over N ranks takes 2(N-1) alpha + 2(N-1)/N K /
bandwidth (Thakur, Rabenseifner and Gropp, 2005). With `--link` messages really take that long, so the
predictions can be checked.
"""

from dataclasses import dataclass

from common.link import Link
from step02_data_parallel.batch_recipe import all_reduce_bandwidth, exposed_share, tokens_to_hide


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends in an all-reduce of `size` bytes: 2(N-1)/N K."""
    return 2 * (ranks - 1) / ranks * size


def all_reduce_seconds(size: float, ranks: int, link: Link) -> float:
    """Time of one all-reduce of `size` bytes over the link."""
    return 2 * (ranks - 1) * link.alpha + all_reduce_bytes(size, ranks) / link.bandwidth


def fill(sizes: list[int], limit: float) -> list[list[int]]:
    """Indices of the parameters (bytes `sizes`, in forward order) in each bucket, in the order of the backward."""
    buckets, room = [], 0.0
    for index in reversed(range(len(sizes))):
        if not buckets or sizes[index] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets


@dataclass(frozen=True)
class Overlap:
    """Times of a step's gradient all-reduces, in seconds."""

    communication: float  # the link is busy
    exposed: float  # from the end of the backward until the last one is complete

    @property
    def overlap_share(self) -> float:
        return 1 - self.exposed / self.communication

    def with_scalars(self, ranks: int, link: Link) -> "Overlap":
        """And the all-reduces of the gradient norm and of the loss, of 4 and 8 bytes, which nothing can hide."""
        seconds = all_reduce_seconds(4, ranks, link) + all_reduce_seconds(8, ranks, link)
        return Overlap(self.communication + seconds, self.exposed + seconds)


def overlap(
    sizes: list[int], costs: list[float], backward: float, ranks: int, link: Link, mode: str, limit: float = 0.0
) -> Overlap:
    """Play the backward and the link: a bucket starts once it is full and the one before it has left the link.

    Args:
        sizes: bytes of each parameter's gradient, in forward order.
        costs: what each parameter's backward costs, in any unit: for a matrix the number of its elements.
        backward: seconds of the whole backward.
        limit: bytes of a bucket, in mode bucket.
    """
    buckets = fill(sizes, limit if mode == "bucket" else 0)
    now, free, busy, total = 0.0, 0.0, 0.0, sum(costs)
    for bucket in buckets:
        now += backward * sum(costs[index] for index in bucket) / total  # its last gradient is there
        took = all_reduce_seconds(sum(sizes[index] for index in bucket), ranks, link)
        free = max(free, backward if mode == "naive" else now) + took
        busy += took
    return Overlap(busy, max(0.0, free - backward))


def tokens_per_second_per_gpu(
    dp: int, samples: int, micro_batch: int, seq_len: int, alone: float, peak_flops: float, gradient_bytes: int
) -> float:
    """Strong scaling: a global batch of `samples` sequences over `dp` GPUs.

    Each computes `alone` tokens/s; what the last backward cannot hide of the all-reduce is added. The ratio
    of the two comes from the FLOP/s that `alone` amounts to, so the caller passes those as `peak_flops`.
    """
    accumulation = samples // (micro_batch * dp)
    tokens = micro_batch * seq_len
    ratio = tokens_to_hide(dp, all_reduce_bandwidth(dp), peak_flops, gradient_bytes) / tokens
    return alone * (1 - exposed_share(ratio, accumulation))
