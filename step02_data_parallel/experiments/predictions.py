"""What theory says of step 2: numbers of messages, bytes, and how much of the communication cannot hide.

The link is the alpha-beta model of `common/costs/alpha_beta.py`.
"""

from dataclasses import dataclass

from common.costs.alpha_beta import all_reduce_seconds, fill_buckets
from common.costs.hardware import bus_bandwidth
from common.link import Link
from step02_data_parallel.batch_recipe import exposed_share, tokens_to_hide


@dataclass(frozen=True)
class Overlap:
    """Times of a step's gradient all-reduces, in seconds."""

    communication: float  # the link is busy
    exposed: float  # from the end of the backward until the last one is complete

    @property
    def overlap_share(self) -> float:
        return 1 - self.exposed / self.communication

    def with_scalars(self, ranks: int, link: Link) -> "Overlap":
        """And the all-reduces of the gradient norm and of the loss, of 8 bytes each, which nothing can hide."""
        seconds = 2 * all_reduce_seconds(8, ranks, link)
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
    buckets = fill_buckets(sizes, limit if mode == "bucket" else 0)
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
    ratio = tokens_to_hide(dp, bus_bandwidth("all_reduce", dp), peak_flops, gradient_bytes) / tokens
    return alone * (1 - exposed_share(ratio, accumulation))
