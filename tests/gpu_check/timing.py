"""Times of calls that take turns, and the ceilings that they are compared with."""

import functools
import statistics
import time
from collections.abc import Callable

import torch

from step08_5d.gpu_ladder import machine

MATMUL = 8192  # rows and columns of the matrices that show what the tensor cores can do


@functools.cache
def ceilings(device: torch.device) -> dict[str, float]:
    """What this GPU reaches at most: bytes per second of a large copy, FLOP/s of a bfloat16 product. A CPU: nothing."""
    if device.type == "cpu":
        return {}
    a, b = (torch.randn(MATMUL, MATMUL, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {"GB/s": machine.copy_ceiling(), "TFLOP/s": 2 * MATMUL**3 / machine.seconds_of(torch.matmul, a, b)}


def take_turns(
    contestants: dict[str, Callable[[], Callable]], device: torch.device, rounds: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the median seconds of each contestant, and what went wrong with those that cannot run.

    A contestant is a function that prepares a call, which takes no time, and returns it. The caches are cold.
    """
    errors, left, measured = {}, dict(contestants), {name: [] for name in contestants}
    for name, prepare in contestants.items():
        try:
            for _ in range(2):  # to compile
                prepare()()
                if device.type == "cuda":
                    torch.cuda.synchronize()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            del left[name]
    cache = torch.empty(machine.CACHE if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    for turn in range(rounds if left else 0):
        names = list(left)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            measured[name].append(_clock(left[name](), cache))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {name: statistics.median(stop() for stop in measured[name]) for name in left}, errors


def _clock(call: Callable, cache: torch.Tensor) -> Callable[[], float]:
    """Make a call. Returns a function that tells, when the device has finished everything, how many seconds it took."""
    if cache.is_cuda:
        return machine.clock(call, cache)
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return lambda: seconds
