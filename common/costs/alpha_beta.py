"""The alpha-beta cost model: what collectives cost over a link, and how much of that a rank's computation hides.

A message of n bytes takes alpha + n / bandwidth seconds, and collectives are rings of messages (Thakur, Rabenseifner
and Gropp, 2005). With `--link` messages really take that long, so predictions can be checked.
"""

from dataclasses import dataclass

from common.link import Link


def gather_ratio(ranks: int, width: float, peak_flops: float, bandwidth: float, beta: int = 2) -> float:
    """Return the time of an all-gather over that of the matrix product that follows it; up to 1 it can hide completely.

    The all-gather of b s h elements brings each of t ranks (t-1)/t of them. The product with `width` columns, of which
    a rank has width / t, is 2 b s h width / t FLOPs:

        beta b s h (t-1)/t / bandwidth  :  2 b s h width / t / peak  =  beta (t-1) peak / (2 width bandwidth)

    b, s and h have canceled. The playbook's appendix A3 has width = h and counts elements (beta = 1) while bandwidths
    are bytes per second; its cheatsheet sets width = 12 h, a whole block.

    Args:
        width: columns of all matrices that share the gather, over all ranks.
        peak_flops: FLOP/s of a rank. bandwidth: bytes/s that reach a rank. beta: bytes of an element.
    """
    return beta * (ranks - 1) * peak_flops / (2 * width * bandwidth)


@dataclass
class Player:
    """Plays one rank and its link: messages queue for the link, and the rank computes or waits. Times in seconds.

    player = Player(2, link)
    arrives = player.message(size)   # an all-gather starts
    player.now += compute            # the rank computes meanwhile
    player.wait(arrives)             # player.blocked has grown by what the computation did not hide
    """

    ranks: int = 2
    link: Link = Link(0.0, float("inf"))
    now: float = 0.0
    free: float = 0.0  # when the link is idle again
    communication: float = 0.0
    blocked: float = 0.0

    def travel(self, seconds: float) -> float:
        """Start what keeps the link busy for so long. Returns when it will be complete."""
        self.free = max(self.free, self.now) + seconds
        self.communication += seconds
        return self.free

    def message(self, size: float) -> float:
        """Start an all-gather or reduce-scatter of `size` bytes in total. Returns when it will be complete."""
        return self.travel((self.ranks - 1) * (self.link.alpha + size / self.ranks / self.link.bandwidth))

    def exchange(self, size: float) -> float:
        """Start to send `size` bytes to a neighbor, and to receive as many. Returns when they will be there."""
        return self.travel(self.link.alpha + size / self.link.bandwidth)

    def all_reduce(self, size: float) -> float:
        """Start an all-reduce: a reduce-scatter and an all-gather of `size` bytes. Returns when it will be complete."""
        self.message(size)
        return self.message(size)

    def wait(self, until: float) -> None:
        """Do nothing before `until`."""
        self.blocked += max(0.0, until - self.now)
        self.now = max(self.now, until)
