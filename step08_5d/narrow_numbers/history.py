"""Delayed scaling: the scale of a tensor comes from the largest numbers of earlier steps, not from its own.

Whoever wants the largest number of a tensor must read all of it before the cast begins, and wait for the other ranks
that hold parts. With a history, a step only notes its largest numbers, and all ranks compare notes once, at its end
(Transformer Engine's DelayedScaling). If a tensor grows, it is cut off at the largest number of the format for a step.

In the first step there is no history, and all scales are 1. The same holds for a run that goes on from a checkpoint of
another recipe. A step in which nobody sees an operand, as when an expert gets no tokens, is none in its history.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.process_groups import Mesh
from step08_5d.narrow_numbers.scaling import largest_of, largest_of_all, scales_for

STEPS = 16  # whose largest numbers are kept
OPERANDS = ("x", "weight", "gradient")


class History:
    """What one weight's operands were at most: `maxima` (3, 1 + STEPS), this step first, then from the newest on."""

    def __init__(self, maxima: Tensor):
        self.maxima = maxima

    def scales(self, what: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Note the largest number of this operand, and return the scale (1, 1) that earlier steps suggest."""
        mine = self.maxima[OPERANDS.index(what)]
        mine[0] = torch.maximum(mine[0], largest_of(x, (None, None)).view(()))
        largest = mine[1:].amax().view(1, 1)
        return torch.where(largest > 0, scales_for(largest, dtype), 1)


@torch.no_grad()
def finish_step(histories: Sequence[Tensor], mesh: Mesh) -> None:
    """Compare notes: every holder of a weight, or of a part of it, learns what its operands were at most on all ranks.

    histories: (..., 3, 1 + STEPS) each, with a spec whose groups are those of the weight.
    """
    histories = sorted(histories, key=lambda each: each.spec.name)  # two copies of a stage have them in any order
    groups = [(*each.spec.shard_groups, *each.spec.extra_groups) for each in histories]
    largest_of_all(
        [(each[..., 0], [getattr(mesh, name) for name in names]) for each, names in zip(histories, groups, strict=True)]
    )
    for each in histories:
        each[..., 0].masked_fill_(~each[..., 0].isfinite(), 0)  # a step that overflows, as in float16, teaches nothing
        # Nor does one without tokens for an expert: if its zeros took a place, 16 of them would push all others out
        each.copy_(torch.where(each[..., :1] > 0, each.roll(1, -1), each))
        each[..., 0] = 0
