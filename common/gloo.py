"""What the gloo backend needs help with.

gloo communicates over TCP from CPU memory. Its own reduce-scatter is an all-reduce in disguise that sends twice the
bytes, its own all-gather copies everything through a second buffer, and its own all-to-all often uses a cable in one
direction at a time: all three are replaced here by messages, straight from every rank to every other one. Ranks that
share a GPU use gloo as well, so their tensors are copied to and from CPU memory.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from common.group import Group

# Reduce-scatters of one group in flight at most: while one travels, the next is ready. Each holds a buffer for what it
# receives, which NCCL does not need, and a step may launch one for every bucket long before it waits for any
REDUCING = 2
_reducing: WeakKeyDictionary[dist.ProcessGroup, deque] = WeakKeyDictionary()  # oldest first; perhaps waited for already


def serves(tensor: Tensor, group: Group) -> bool:
    """Return whether gloo carries this tensor. Where there are both backends, NCCL takes the CUDA tensors only."""
    return group.backend == "gloo" or group.backend == "nccl" and not tensor.is_cuda


def on_host(tensor: Tensor, group: Group, work=None) -> Tensor:
    """Return the tensor to hand to the backend: for gloo, a copy in CPU memory of a CUDA tensor.

    If the collective writes to the tensor, give its `work`: at the end of the wait the copy is copied back.
    """
    if not (tensor.is_cuda and serves(tensor, group)):
        return tensor
    host = tensor.cpu()
    if work is not None:
        work.afterwards(tensor.copy_, host)
    return host


def all_to_all(work, output: Tensor, input: Tensor, group: Group, output_sizes=None, input_sizes=None) -> None:
    """Launch an all-to-all. Sizes are those of `collectives.all_to_all`."""
    received, sent = on_host(output, group, work), on_host(input, group)
    equal = [len(input) // group.size] * group.size
    _exchange(work, received.split(output_sizes or equal), sent.split(input_sizes or equal), group)


def make_room(group: Group) -> None:
    """Before a reduce-scatter: wait for the oldest of the group if `REDUCING` are in flight, each with a buffer.

    Its peers have launched it too, or will without this one: collectives of a group come in the same order everywhere.
    """
    in_flight = _reducing.setdefault(group.handle, deque())
    while len(in_flight) >= REDUCING:
        in_flight.popleft().wait()  # its caller's own wait returns at once


def reduce_scatter(work, output: Tensor, input: Tensor, group: Group) -> None:
    """Launch a reduce-scatter as an all-to-all of the parts, to be added up when they have arrived."""
    parts = on_host(input, group).view(group.size, -1)
    own = parts[group.rank]
    received = parts.new_empty(group.size - 1, len(own))
    others = iter(received)
    _exchange(work, [own if rank == group.rank else next(others) for rank in range(group.size)], parts, group)
    work.afterwards(_add_up, output, own, received)
    _reducing.setdefault(group.handle, deque()).append(work)


def _add_up(output: Tensor, own: Tensor, received: Tensor) -> None:
    """Write `own` and the rows of `received` added up to `output`: in float32 or wider, and rounded once."""
    wide = torch.promote_types(own.dtype, torch.float32)
    total = output.view(-1) if output.dtype == wide and not output.is_cuda else own.to(wide, copy=True)
    if total.data_ptr() != own.data_ptr():
        total.copy_(own)
    for part in received:
        total.add_(part)
    if total.data_ptr() != output.data_ptr():
        output.copy_(total.view_as(output))
    received.untyped_storage().resize_(0)  # gloo's thread keeps a reference for a moment longer


def all_gather(work, output: Tensor, input: Tensor, group: Group) -> None:
    """Launch an all-gather: every rank sends its part to all others."""
    parts = on_host(output, group, work).view(group.size, -1)
    if parts[group.rank].data_ptr() != input.data_ptr():
        parts[group.rank].copy_(input.view(-1))
    _exchange(work, parts, [parts[group.rank]] * group.size, group)


def _exchange(work, receives, sends, group: Group) -> None:
    """Launch messages: sends[j] to rank j of the group, and receives[j] from it.

    All receives come first. gloo announces a receive to its sender over the connection that also carries the data, and
    behind data it would be late: the two directions would take turns.
    """
    mine = group.rank
    if receives[mine].data_ptr() != sends[mine].data_ptr():
        receives[mine].copy_(sends[mine])
    peers = [(mine + step) % group.size for step in range(1, group.size)]  # or all would send to the same rank first
    messages = [(dist.irecv, receives[peer], group.ranks[peer]) for peer in peers]
    messages += [(dist.isend, sends[peer], group.ranks[peer]) for peer in peers]
    work.launch(Messages, [message for message in messages if message[1].numel()], group)


_waiting = ThreadPoolExecutor(1000, "messages")  # as many threads as `Messages` in flight that somebody asks about


def _wait_for(works: list) -> None:
    while works:  # each is let go of with its tensor, or the tensor would outlive `Messages.wait` by a moment
        works.pop(0).wait()


class Messages:
    """Messages in flight, as one handle: unlike gloo's own handles of messages it can tell when all have arrived.

    They travel whether anybody waits or not. A thread that waits for them is started only if somebody asks. Each of
    `messages` is dist.irecv or dist.isend, the tensor, and the other global rank.
    """

    def __init__(self, messages: list, group: Group):
        self._works = [op(tensor, peer, group=group.handle) for op, tensor, peer in messages]
        self._arrival: Future | None = None

    def get_future(self) -> Future:
        self._arrival = self._arrival or _waiting.submit(_wait_for, self._works)
        return self._arrival

    def is_completed(self) -> bool:
        """Return whether all have arrived; the first time that it is asked perhaps a moment too late."""
        return self.get_future().done()

    def wait(self) -> None:
        self._arrival.result() if self._arrival else _wait_for(self._works)
