"""How long a call takes on a GPU."""

import statistics
from collections.abc import Callable

import torch

CACHE = 256 * 2**20  # bytes, more than any GPU's L2 cache holds
WARM_UP, CALLS = 5, 30


def seconds_of(function: Callable, *inputs: torch.Tensor) -> float:
    """Median time of a call on the GPU, with cold caches."""
    for _ in range(WARM_UP):  # compiles, and wakes the GPU's clock
        function(*inputs)
    cache = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    stops = [clock(lambda: function(*inputs), cache) for _ in range(CALLS)]
    torch.cuda.synchronize()
    return statistics.median(stop() for stop in stops)


def clock(call: Callable, cache: torch.Tensor) -> Callable[[], float]:
    """Make a call on the GPU. Returns a function that tells, once the GPU has finished, how many seconds it took.

    The L2 cache is cleared by filling `cache`. Then the GPU sleeps for a millisecond, and meanwhile Python launches the
    call: else the time of a short kernel would be that of its launch.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cache.zero_()
    torch.cuda._sleep(2_000_000)  # cycles
    start.record()
    call()
    stop.record()
    return lambda: 1e-3 * start.elapsed_time(stop)
