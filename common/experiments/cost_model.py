"""The alpha-beta cost model: what collectives cost over a link, and how much of that a rank's computation hides.

A message of n bytes takes alpha + n / bandwidth seconds, and collectives are rings of messages (Thakur, Rabenseifner
and Gropp, 2005). With `--link` messages really take that long, so predictions can be checked.
"""

from dataclasses import dataclass

from common.link import Link

# Bytes/s that an H100 sends at most: over NVLink 4 to GPUs of its node, and over a card of 400 Gb/s to other nodes
NVLINK, NETWORK = 450e9, 50e9
NODE = 8  # GPUs

# Median bus bandwidth (GB/s) of an all-gather of 256 MB by number of GPUs, on nodes of 8 H100. Measured by the authors
# of the playbook and read off its figure "pp_comm_bandwidth"; not measured here.
ALL_GATHER_GB_PER_S = {8: 249.8, 16: 184.6, 32: 119.0, 64: 69.0, 128: 55.0, 256: 28.0, 512: 11.0}


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce of `size` bytes: 2(N-1)/N K."""
    return 2 * (ranks - 1) / ranks * size


def all_reduce_seconds(size: float, ranks: int, link: Link) -> float:
    """Return the time of an all-reduce of `size` bytes: 2(N-1) alpha + 2(N-1)/N K / bandwidth."""
    return 2 * (ranks - 1) * link.alpha + all_reduce_bytes(size, ranks) / link.bandwidth


def fill_buckets(sizes: list[int], limit: float) -> list[list[int]]:
    """Return the indices of the parameters in each bucket of at most `limit` bytes, in the order of the backward.

    Args:
        sizes: bytes of each parameter's gradient, in forward order. A larger one has a bucket to itself.
    """
    buckets, room = [], 0.0
    for index in reversed(range(len(sizes))):
        if not buckets or sizes[index] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets


def gather_ratio(ranks: int, width: float, peak_flops: float, bandwidth: float, beta: int = 2) -> float:
    """Return the time of an all-gather over that of the matrix product that follows it; up to 1 it can hide completely.

    The all-gather of b s h elements brings each of t ranks (t-1)/t of them. The product with `width` columns, of which
    a rank has width / t, is 2 b s h width / t FLOPs:

        beta b s h (t-1)/t / bandwidth  :  2 b s h width / t / peak  =  beta (t-1) peak / (2 width bandwidth)

    b, s and h have cancelled. The playbook's appendix A3 has width = h and counts elements (beta = 1) while bandwidths
    are bytes per second; its cheatsheet sets width = 12 h, a whole block.

    Args:
        width: columns of all matrices that share the gather, over all ranks.
        peak_flops: FLOP/s of a rank. bandwidth: bytes/s that reach a rank. beta: bytes of an element.
    """
    return beta * (ranks - 1) * peak_flops / (2 * width * bandwidth)


@dataclass
class Player:
    """Plays one rank and its link: messages queue for the link, and the rank computes or waits. Times in seconds."""

    ranks: int
    link: Link
    now: float = 0.0
    free: float = 0.0  # when the link is idle again
    communication: float = 0.0
    blocked: float = 0.0

    def message(self, size: float) -> float:
        """Start an all-gather or reduce-scatter of `size` bytes in total. Returns when it will be complete."""
        seconds = (self.ranks - 1) * (self.link.alpha + size / self.ranks / self.link.bandwidth)
        self.free = max(self.free, self.now) + seconds
        self.communication += seconds
        return self.free

    def exchange(self, size: float) -> float:
        """Start to send `size` bytes to a neighbor, and to receive as many. Returns when they will be there."""
        seconds = self.link.alpha + size / self.link.bandwidth
        self.free = max(self.free, self.now) + seconds
        self.communication += seconds
        return self.free

    def all_reduce(self, size: float) -> float:
        """Start an all-reduce: a reduce-scatter and an all-gather of `size` bytes. Returns when it will be complete."""
        self.message(size)
        return self.message(size)

    def wait(self, until: float) -> None:
        """Do nothing before `until`."""
        self.blocked += max(0.0, until - self.now)
        self.now = max(self.now, until)
