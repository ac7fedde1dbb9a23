"""A simulated slower link, with which a laptop shows what communication costs between machines."""

from dataclasses import dataclass, field

from common.errors import UsageError


@dataclass
class Link:
    """A link on which a message of n bytes takes at least `alpha + n / bandwidth` seconds. Every group has its own."""

    alpha: float  # seconds
    bandwidth: float  # bytes per second
    free: float = field(default=0.0, compare=False)  # `time.perf_counter` from which it is idle

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
