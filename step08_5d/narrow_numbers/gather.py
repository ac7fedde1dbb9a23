"""ZeRO-3 gathers weights in FP8 (`--fp8-gather`): half of the bytes, and the same numbers.

Every product casts its weight anyway. So a rank may as well cast its shard before it is sent, with the scales of the
whole weight: a shard ends in the middle of a block, so ranks first compare the largest numbers that they hold, once per
step. What else a unit holds (norms, a router) travels in the same message as it is. Weights are widened on arrival. The
products cast them again, with the same scales, and get the numbers that were sent.

A weight may be gathered like this if it has one form in FP8: with one scale, or in tiles of 128 x 128. With `row` and
`mx` it has two, as its blocks lie along what a product adds up: `in` in the forward, and `out` in the backward.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from common import collectives
from common.group import Group
from common.layers import at_least_float32
from step03_zero.unit import Unit
from step08_5d.narrow_numbers.experts import products_of
from step08_5d.narrow_numbers.linear import FORMATS, Products
from step08_5d.narrow_numbers.scaling import Narrow, block_of, cast, largest_of_all, scales_for

FORMAT = FORMATS["e4m3"]


class Part:
    """Elements [start, stop) of a unit: one matrix in FP8, or a parameter that stays wide and has no `products`."""

    def __init__(self, start: int, stop: int, shape: torch.Size, products: Products | None):
        self.start, self.stop, self.shape, self.products = start, stop, shape, products
        if products:
            self.block = block_of(products.recipe, weight=True)
            self.size = [size or length for size, length in zip(self.block, shape, strict=True)]
            self.grid = [math.ceil(length / size) for length, size in zip(shape, self.size, strict=True)]

    def blocks(self, start: int, stop: int, device: torch.device) -> Tensor:
        """The number of the block in which each of these elements of the unit is, row by row."""
        index = torch.arange(start - self.start, stop - self.start, device=device)
        row, column = index // self.shape[1], index % self.shape[1]
        return row // self.size[0] * self.grid[1] + column // self.size[1]


class NarrowGather:
    """The all-gather of one unit, with weights in FP8: see `Unit.all_gather`."""

    def __init__(self, unit: Unit):
        self.parts, start = [], 0
        for parameter in unit.parameters:
            for products in products_of(parameter) or [None]:
                stop = start + (math.prod(parameter.shape[-2:]) if products else parameter.numel())
                self.parts.append(Part(start, stop, parameter.shape[-2:], products))
                start = stop
        self.narrow = [part for part in self.parts if part.products]
        self.size, wide = unit.shard.numel(), unit.shard.element_size()
        sizes = [
            sum((stop - start) * (1 if part.products else wide) for part, start, stop in self._pieces(rank))
            for rank in range(unit.group.size)
        ]
        self.bytes = max(sizes)  # of what each rank sends: the others fill up

    def __call__(self, weights: Tensor, shard: Tensor, group: Group, async_op: bool = False) -> collectives.Work:
        """As `collectives.all_gather`."""
        if self.narrow[0].products.gathered is None:
            self._find_scales(shard, group)
        packed, filled = torch.zeros(self.bytes, dtype=torch.uint8, device=shard.device), 0
        for part, start, stop in self._pieces(group.rank):
            piece = shard[start - group.rank * self.size : stop - group.rank * self.size]
            if part.products:
                scales = part.products.gathered
                piece = cast(piece.to(scales.dtype) / scales.flatten()[part.blocks(start, stop, piece.device)], FORMAT)
            sent = piece.view(torch.uint8)
            packed[filled : filled + len(sent)] = sent
            filled += len(sent)
        arrived = packed.new_empty(group.size, self.bytes)
        work = collectives.all_gather(arrived, packed, group, async_op=True)
        work.afterwards(self._unpack, arrived, weights)
        if not async_op:
            work.wait()
        return work

    def _pieces(self, rank: int) -> Iterator[tuple[Part, int, int]]:
        """What the shard of a rank holds: elements [start, stop) of the unit, which belong to one part."""
        for part in self.parts:
            start, stop = max(part.start, rank * self.size), min(part.stop, (rank + 1) * self.size)
            if start < stop:
                yield part, start, stop

    def _find_scales(self, shard: Tensor, group: Group) -> None:
        """Give all matrices the scales of this step, from the largest numbers of whole blocks, wherever they are."""
        largest = {part: shard.new_zeros(part.grid, dtype=at_least_float32(shard.dtype)) for part in self.narrow}
        for part, start, stop in self._pieces(group.rank):
            if part.products:
                piece = shard[start - group.rank * self.size : stop - group.rank * self.size].abs()
                blocks, found = part.blocks(start, stop, piece.device), largest[part].view(-1)
                found.scatter_reduce_(0, blocks, piece.to(found.dtype), "amax")
        if self.narrow[0].products.recipe in ("tensor", "tile"):  # others do not ask for this step's
            holders = {part: part.products.groups(part.block, "out", "in") for part in self.narrow}
            largest_of_all([(found, (group, *holders[part])) for part, found in largest.items()])
        for part, found in largest.items():
            part.products.gathered = _scales(part.products, found)

    def _unpack(self, arrived: Tensor, weights: Tensor) -> None:
        for rank, packed in enumerate(arrived):
            for part, start, stop in self._pieces(rank):
                piece = weights[start:stop]
                if part.products:
                    numbers, packed = packed[: len(piece)], packed[len(piece) :]
                    piece.copy_(numbers.view(FORMAT))
                else:
                    size = len(piece) * piece.element_size()
                    numbers, packed = packed[:size], packed[size:]
                    piece.view(torch.uint8).copy_(numbers)
        for part in self.narrow:
            matrix = weights[part.start : part.stop].view(part.shape)
            matrix.copy_(Narrow(matrix, part.products.gathered, part.block).wide())


def _scales(products: Products, largest: Tensor) -> Tensor:
    """The scales of a weight, as `products` would find them, from the largest numbers of its blocks."""
    if products.recipe == "naive":
        return torch.ones_like(largest)
    if products.history is not None:
        return products.history.scales("weight", largest, FORMAT)
    return scales_for(largest, FORMAT)
