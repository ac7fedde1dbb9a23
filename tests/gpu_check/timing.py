"""Times of calls that take turns, and the ceilings that they are compared with."""

import functools
import statistics
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


def take_turns(contestants: dict[str, Callable[[], Callable]], rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return the median seconds of each contestant, and what went wrong with those that cannot run.

    A contestant is a function that prepares a call, which takes no time, and returns it. The caches are cold. On a CPU,
    where nobody asks for times, each is only tried.
    """
    on_gpu, errors, names = machine.DEVICE.type == "cuda", {}, []
    finish = torch.cuda.synchronize if on_gpu else lambda: None
    for name, prepare in contestants.items():
        try:
            for _ in range(2):  # to compile
                prepare()()
                finish()
            names.append(name)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    if not on_gpu or not names:
        return {}, errors
    stops: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    cache = torch.empty(machine.CACHE, dtype=torch.uint8, device=machine.DEVICE)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            stops[name].append(machine.clock(contestants[name](), cache))
    finish()
    return {name: statistics.median(stop() for stop in stops[name]) for name in names}, errors
