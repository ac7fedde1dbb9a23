"""ParameterSpec: what each parameter is, and which part of it this rank holds.

Parallel techniques edit the specs. Initial values, gradient reduction and norm, checkpoints and export only read them.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

Box = tuple[tuple[int, int], ...]


@dataclass
class ParameterSpec:
    """What a parameter is in the whole, single-process model, and which part of it this rank holds.

    name: in the whole model; the same on every rank that holds a part.
    global_shape: shape there. Rows of `box` beyond it are padding: zero, never saved, exported or counted.
    box: (start, stop) along each axis of the whole tensor: the slice that this rank holds.
    init_std: standard deviation of the initial normal distribution; None: ones.
    shard_groups: names of the groups over which its gradient is summed: ranks that may shard it, and their copies.
    extra_groups: names of further groups over which its gradient is a partial sum.
    owner: this rank counts and saves the elements, and no other rank does.
    flat_range: [start, stop) of the flattened box, if the tensor is one-dimensional and holds only these elements.
    own_bucket: a gradient bucket holds this parameter alone, so that all holders cut it into the same shards.
    state: no weight, but something that training keeps beside them. A checkpoint may lack it, and no export has it.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    init_std: float | None
    shard_groups: tuple[str, str] = ("shard", "replica")
    extra_groups: tuple[str, ...] = ()
    owner: bool = True
    flat_range: tuple[int, int] | None = None
    own_bucket: bool = False
    state: bool = False

    def boxes(self, tensor: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        """Split `tensor`, which has this spec, into boxes of the whole tensor: a list of (box, view of `tensor`)."""
        if self.flat_range is None:
            return [(self.box, tensor)]
        origin, found, done = [start for start, _ in self.box], [], 0
        for local in _flat_boxes([stop - start for start, stop in self.box], *self.flat_range):
            shape = [stop - start for start, stop in local]
            box = tuple((low + start, low + stop) for low, (start, stop) in zip(origin, local, strict=True))
            found.append((box, tensor[done : done + math.prod(shape)].view(shape)))
            done += math.prod(shape)
        return found

    @property
    def decay(self) -> bool:
        """Weight decay applies to matrices, not to the gains of norms (which have one axis)."""
        return len(self.global_shape) > 1


def _flat_boxes(shape: list[int], start: int, stop: int) -> list[list[tuple[int, int]]]:
    """The boxes, in order, that cover [start, stop) of a flattened tensor: at most 2 * len(shape) - 1 of them."""
    if len(shape) == 1:
        return [[(start, stop)]] if start < stop else []
    row, found = math.prod(shape[1:]), []
    while start < stop:
        index, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:  # whole rows
            found.append([(index, stop // row), *((0, size) for size in shape[1:])])
            start = stop // row * row
        else:  # a part of one row
            end = min(stop, (index + 1) * row)
            found += [[(index, index + 1), *box] for box in _flat_boxes(shape[1:], inside, end - index * row)]
            start = end
    return found


def attach_specs(module: nn.Module, init_std: dict[str, float | None] | None = None) -> None:
    """Give a spec to every parameter of a whole `module` that has none yet.

    Of `init_std`, the first end of a name that fits counts. Without it, initial values come from elsewhere.
    """
    for name, parameter in module.named_parameters():
        if not hasattr(parameter, "spec"):
            shape = tuple(parameter.shape)
            std = next((value for suffix, value in (init_std or {}).items() if name.endswith(suffix)), None)
            parameter.spec = ParameterSpec(name, shape, tuple((0, size) for size in shape), std)
