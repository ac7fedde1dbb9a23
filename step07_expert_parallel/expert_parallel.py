"""Expert parallelism by hand: every rank of an `ep` group holds some of the experts, and tokens travel to them.

Two all-to-alls surround the experts. The first, the *dispatch*, sends each token to ranks that hold its experts; the
second, the *combine*, sends the results back. How many tokens go where is known only after the router, so that ranks
first tell each other the numbers. (GShard, Lepikhin et al., arXiv:2006.16668; dropless as in MegaBlocks, Gale et al.,
arXiv:2211.15841.)

The ranks of one pipeline stage are folded a second time for the experts, into (edp, ep): attention and experts have
different layouts on the same ranks. The gradient of an expert is summed over `edp`, the ranks that hold it as well:
tokens of all others have been sent to one of them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common import collectives
from common.group import Group
from step07_expert_parallel.experts import Counts


class AllToAll:
    """Rows that travel to other ranks and, in the backward, their gradients that travel back.

    `start` and `finish` surround whatever is computed meanwhile. In the backward, autograd comes to `finish` first:

        forward     start: send the rows          | shared experts            | finish: wait for rows
        backward    finish: send their gradients  | shared experts, backward  | start: wait for gradients

    `before_wait` is called before each wait: somebody else may compute meanwhile.
    """

    def __init__(self, sent: list[int], received: list[int], group: Group, before_wait: Callable[[], None]):
        self.sent, self.received, self.group, self.before_wait = sent, received, group, before_wait
        self.in_flight: tuple[Tensor, collectives.Work] | None = None

    def start(self, x: Tensor) -> Tensor:
        """Start to send the rows of x (sum of `sent`, h), `sent[j]` of them to rank j of the group.

        Returns the tensor (sum of `received`, h) that `finish` makes valid.
        """
        return _Start.apply(x, self)

    def finish(self, x: Tensor) -> Tensor:
        """Wait for what `start` returned."""
        return _Finish.apply(x, self)

    def launch(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = x.new_empty(sum(received), *x.shape[1:])
        work = collectives.all_to_all(result, x.contiguous(), self.group, received, sent, async_op=True)
        self.in_flight = result, work
        return result

    def wait(self) -> Tensor:
        self.before_wait()
        (result, work), self.in_flight = self.in_flight, None
        work.wait()
        return result


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: AllToAll):
        ctx.exchange = exchange
        # A tensor of its own: autograd ties the output to this node, the node to the exchange, and that to the result
        return exchange.launch(x, exchange.sent, exchange.received).detach()

    @staticmethod
    def backward(ctx, _):
        return ctx.exchange.wait(), None  # of what _Finish has started


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: AllToAll):
        ctx.exchange = exchange
        exchange.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        exchange = ctx.exchange
        exchange.launch(gradient, exchange.received, exchange.sent)
        return gradient, None  # autograd wants this shape; _Start does not use it


def inverse(order: Tensor) -> Tensor:
    """Return where each of 0, 1, 2 and so on stands in `order`, a permutation. (Sorting it would take much longer.)"""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Permute(torch.autograd.Function):
    """x[order]. `order` is a permutation, so that the backward is another gather and adds nothing up."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor):
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient):
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, inverse(order)), None


class TokenDispatcher:
    """Brings one layer's rows to their experts on other ranks, and back. Alone, a rank has all experts.

    For example, two ranks hold the experts 0, 1 and 2, 3. Here a row is written as the number of its expert:

        rows of rank 0   0 1 1 2        it sends three of them to rank 0 (itself), and one to rank 1
        rows of rank 1   0 0 3          it sends two to rank 0, and one to rank 1
        there, rank 0    0 1 1 | 0 0    what arrives from rank 0, and from rank 1
        order            0 3 4 1 2      takes it by expert: 0 0 0 1 1

    Args:
        counts: how many of this rank's rows, which are sorted by expert, each of all the experts gets.
        ep: rank j of this group holds the j-th part of the experts.
        before_wait: see `AllToAll`.
    """

    def __init__(self, counts: Counts, ep: Group, before_wait: Callable[[], None] = lambda: None):
        self.counts, self.alone = counts, ep.size == 1
        if self.alone:
            return
        sent = counts.on_device.view(ep.size, -1)  # (ep, experts of a rank)
        received = torch.empty_like(sent)
        collectives.all_to_all(received, sent, ep)
        rows_sent, rows_received = counts.read(torch.stack((sent.sum(1), received.sum(1))))
        self.there = AllToAll(rows_sent, rows_received, ep, before_wait)
        self.home = AllToAll(rows_received, rows_sent, ep, before_wait)
        # What arrives is sorted by the rank that it comes from, and only then by expert
        expert = torch.arange(sent.shape[1], device=sent.device).repeat(ep.size)
        expert = expert.repeat_interleave(received.flatten(), output_size=sum(rows_received))
        self.counts, self.order = Counts(received.sum(0), counts.read), expert.argsort(stable=True)

    def dispatch(self, rows: Tensor) -> Tensor:
        """Start to send the rows. `arrive` takes what this returns, and nothing else may."""
        return rows if self.alone else self.there.start(rows)

    def arrive(self, rows: Tensor) -> tuple[Tensor, Counts]:
        """Return the rows of this rank's experts, sorted by expert, and how many there are of each."""
        arrived = rows if self.alone else _Permute.apply(self.there.finish(rows), self.order)
        return arrived, self.counts

    def back(self, rows: Tensor) -> Tensor:
        """Send the outputs of this rank's experts back, and return those for the rows of this rank."""
        if self.alone:
            return rows
        return self.home.finish(self.home.start(_Permute.apply(rows, inverse(self.order))))
