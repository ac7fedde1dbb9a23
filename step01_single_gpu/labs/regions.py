"""What write-01-b asks of a region besides its numbers: that its inputs can be freed, and that it can go back twice."""

import contextlib
import gc
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

LEFT, OTHER = "inputs that live on after their region", "second backwards with other gradients"
ODD = {
    LEFT: "a region's inputs are still in memory when its output and gradients are gone. If `ctx` holds the output, "
    "which holds `ctx`, neither is freed until Python looks for cycles: keep inputs alone.",
    OTHER: "a second backward through a region (`retain_graph=True`) brings other gradients than the first: those of "
    "the same cut-off inputs add up in their `.grad`. Cut inputs off in the backward, anew each time.",
}


def oddities(recompute: Callable) -> list[str]:
    """Which of `ODD` holds for a student's `recompute(function, *inputs)`."""
    return [LEFT] * _lives_on(recompute) + [OTHER] * _adds_up(recompute)


def _square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _lives_on(recompute: Callable) -> bool:
    """Whether the input of a region is still there when nobody needs it, until Python looks for cycles."""
    automatic = gc.isenabled()
    gc.disable()
    x = torch.ones(3, requires_grad=True)
    storage = StorageWeakRef(x.untyped_storage())
    y = recompute(_square, x)
    y.sum().backward()
    del x, y
    left = not storage.expired()
    if automatic:
        gc.enable()
    return left


def _adds_up(recompute: Callable) -> bool:
    """Whether a second backward through a region brings other gradients than the first one."""
    x, gradients = torch.ones(3, requires_grad=True), []
    y = recompute(_square, x).sum()
    with contextlib.suppress(Exception):  # what a backward needs may be gone by then: that is no wrong number
        for _ in range(2):
            x.grad = None
            y.backward(retain_graph=True)
            gradients.append(x.grad.clone())
    return len(gradients) == 2 and not torch.equal(*gradients)
