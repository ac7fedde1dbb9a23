"""Tokens travel to their experts in FP8 (`--fp8-dispatch`), as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.3).

A row is sent as its numbers, 8 bits each, followed by the scale of each of its blocks: a little more than half of BF16.
Outputs of experts come back in BF16, since they are added up, and so do gradients. All rows that arrive at experts are
rounded in the same way, whether they have travelled or not: what is rounded already stays as it is.
"""

import torch
from torch import Tensor

from common import collectives
from common.layers import at_least_float32
from step07_expert_parallel.expert_parallel import AllToAll, TokenDispatcher
from step07_expert_parallel.experts import Counts
from step08_5d.narrow_numbers.scaling import BLOCKS, Narrow, quantise_now

FORMAT = torch.float8_e4m3fn


def pack(rows: Tensor) -> Tensor:
    """rows (rows, h) -> (rows, bytes of a row), bytes: the numbers of each row, then its scales."""
    narrow = quantise_now(rows, FORMAT, "tile")
    return torch.cat([narrow.numbers.view(torch.uint8), narrow.scales.contiguous().view(torch.uint8)], 1)


def unpack(packed: Tensor, rows: Tensor) -> None:
    """Fill `rows` with what `pack` has packed."""
    numbers, scales = packed.split([rows.shape[1], packed.shape[1] - rows.shape[1]], 1)
    scales = scales.contiguous().view(at_least_float32(rows.dtype))
    rows.copy_(Narrow(numbers.contiguous().view(FORMAT), scales, (1, BLOCKS["tile"])).wide())


class NarrowAllToAll(AllToAll):
    """`AllToAll` that sends rows in FP8, and the gradients that go back in their own type."""

    def launch(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if sent is not self.sent:
            return super().launch(x, sent, received)
        packed, result = pack(x), x.new_empty(sum(received), x.shape[1])
        arrived = packed.new_empty(sum(received), packed.shape[1])
        work = collectives.all_to_all(arrived, packed, self.group, received, sent, async_op=True)
        work.afterwards(unpack, arrived, result)
        self.in_flight = result, work
        return result


class NarrowDispatcher(TokenDispatcher):
    """`TokenDispatcher` with a dispatch in FP8. Rows that do not travel are rounded in the same way."""

    def __init__(self, *args):
        super().__init__(*args)
        if not self.alone:
            there = self.there
            self.there = NarrowAllToAll(there.sent, there.received, there.group, there.before_wait)

    def arrive(self, rows: Tensor) -> tuple[Tensor, Counts]:
        """As `TokenDispatcher.arrive`."""
        arrived, counts = super().arrive(rows)
        return Rounded.apply(arrived), counts


class Rounded(torch.autograd.Function):
    """The rows (rows, h) as they are after a dispatch in FP8. Gradients pass."""

    @staticmethod
    def forward(ctx, rows):
        return quantise_now(rows, FORMAT, "tile").wide().to(rows.dtype) if len(rows) else rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient):
        return gradient
