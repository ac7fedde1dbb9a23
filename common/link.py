"""A simulated slower link, with which a laptop shows what communication costs between machines."""

import time
from dataclasses import dataclass

from common.errors import UsageError


@dataclass(frozen=True)
class Link:
    """A link on which a message of n bytes takes at least `alpha + n / bandwidth` seconds."""

    alpha: float  # seconds
    bandwidth: float  # bytes per second

    def seconds(self, size: float, hops: int = 1) -> float:
        """What `size` bytes take in `hops` messages, one after another."""
        return hops * self.alpha + size / self.bandwidth

    @classmethod
    def parse(cls, text: str) -> "Link":
        """The link that `--link ALPHA_US,GB_PER_S` describes. Raises UsageError when it describes none."""
        try:
            alpha, bandwidth = (float(part) for part in text.split(","))
        except ValueError:
            raise UsageError(f"--link {text} is not ALPHA_US,GB_PER_S, such as 50,1.5") from None
        if not (0 <= alpha <= 1e9 and bandwidth > 0):
            raise UsageError(f"--link {text}: the latency must be 0 to 1e9 us and the bandwidth positive")
        return cls(alpha * 1e-6, bandwidth * 1e9)


class Line:
    """The link of one group, which carries its messages one after another."""

    def __init__(self, link: Link):
        self.link, self.free = link, 0.0

    def occupy(self, seconds: float) -> float:
        """Occupy the line for so long. Returns the `time.perf_counter` from which it is idle again."""
        self.free = max(time.perf_counter(), self.free) + seconds
        return self.free
