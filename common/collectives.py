"""Every collective on tensors of the training: what it does, how many bytes it sends, and a record of the calls.

Reductions are sums (a rank's loss is its share of the global mean). Peers are named by their index within the group. A
group of one rank communicates nothing. Functions return a `Work`, which has completed already unless `async_op`.

Model bytes are what one rank sends in the bandwidth-optimal algorithm for K bytes over N ranks (Thakur, Rabenseifner,
Gropp 2005): all-reduce 2(N-1)/N K, reduce-scatter, all-gather and all-to-all (N-1)/N K, a message K.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from common import gloo
from common.errors import communication_errors
from common.group import Group

# torch 2.13 renamed two collectives and warns about the old names, which are the only ones that 2.11 has
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

phase = "setup"  # forward, backward or optimizer: set by the tracer, copied into each recorded call
sent_bytes: dict[str, int] = defaultdict(int)  # model bytes that this rank sent, by group name


def all_reduce(tensor: Tensor, group: Group, async_op: bool = False, op: str = "sum") -> Work:
    """Replace `tensor` on every rank by the sum (or "max") over the group."""
    if group.size == 1:
        return Work()
    work = Work([_call("all_reduce", tensor, group, 2 * _others(tensor, group))], group, hops=2 * (group.size - 1))
    host = gloo.on_host(tensor, group, work)
    work.launch(dist.all_reduce, host, _REDUCTIONS[op], group=group.handle, async_op=True)
    return work.launched(async_op)


def reduce_scatter(output: Tensor, input: Tensor, group: Group, async_op: bool = False) -> Work:
    """Sum `input` over the group and keep one part of it: rank j receives part j of the sum in `output`.

    In a group of N ranks, `input` has N times as many elements as `output`.
    """
    if group.size == 1:
        return _copied(output, input)
    on_gloo = gloo.serves(input, group)
    if on_gloo:
        gloo.make_room(group)
    work = Work([_call("reduce_scatter", input, group, _others(input, group))], group, hops=group.size - 1)
    if on_gloo:
        gloo.reduce_scatter(work, output, input, group)
    else:
        work.launch(_reduce_scatter, output, input, group=group.handle, async_op=True)
    return work.launched(async_op)


def all_gather(output: Tensor, input: Tensor, group: Group, async_op: bool = False) -> Work:
    """Join the `input` of every rank, in rank order, in `output`. `input` may be this rank's part of `output`."""
    if group.size == 1:
        return _copied(output, input)
    work = Work([_call("all_gather", input, group, (group.size - 1) * _bytes(input))], group, hops=group.size - 1)
    if gloo.serves(input, group):
        gloo.all_gather(work, output, input, group)
    else:
        work.launch(_all_gather, output.view(-1), input.view(-1), group=group.handle, async_op=True)
    return work.launched(async_op)


def all_to_all(
    output: Tensor, input: Tensor, group: Group, output_sizes=None, input_sizes=None, async_op: bool = False
) -> Work:
    """Send part j of `input` to rank j, and receive rank j's part for this rank as part j of `output`.

    The sizes are lists of rows per part; without them all parts are equal.
    """
    if group.size == 1:
        return _copied(output, input)
    kept = input_sizes[group.rank] if input_sizes else input.shape[0] // group.size
    sent = _bytes(input) - kept * _bytes(input) // max(1, input.shape[0])
    work = Work([_call("all_to_all", input, group, sent)], group, hops=group.size - 1)
    if gloo.serves(input, group):
        gloo.all_to_all(work, output, input, group, output_sizes, input_sizes)
    else:
        work.launch(dist.all_to_all_single, output, input, output_sizes, input_sizes, group.handle, async_op=True)
    return work.launched(async_op)


def exchange(sends: list, receives: list, group: Group, async_op: bool = False) -> Work:
    """Issue messages as one batch, so that NCCL cannot deadlock on their order: pairs (tensor, index of its peer).

    Do not change what is sent before the wait.
    """
    if not sends and not receives:
        return Work()
    calls = [_call("send", tensor, group, _bytes(tensor), peer) for tensor, peer in sends]
    calls += [_call("receive", tensor, group, 0, peer) for tensor, peer in receives]
    directions = (sum(_bytes(tensor) for tensor, _ in messages) for messages in (sends, receives))
    work = Work(calls, group, hops=1, link_bytes=max(directions))
    batch = [(dist.irecv, gloo.on_host(tensor, group, work), group.ranks[peer]) for tensor, peer in receives]
    batch += [(dist.isend, gloo.on_host(tensor, group), group.ranks[peer]) for tensor, peer in sends]
    if _recordings and gloo.serves(batch[0][1], group):
        for message in batch:  # each with a thread that knows when it has arrived, which costs 0.3 ms
            work.launch(gloo.Messages, [message], group)
    else:
        work.launch(dist.batch_isend_irecv, [dist.P2POp(*message, group.handle) for message in batch])
    return work.launched(async_op)


def send(tensor: Tensor, to: int, group: Group, async_op: bool = False) -> Work:
    """Send `tensor` to index `to` of the group: an `exchange` of one message."""
    return exchange([(tensor, to)], [], group, async_op)


def receive(tensor: Tensor, source: int, group: Group, async_op: bool = False) -> Work:
    """Receive into `tensor` from index `source` of the group: an `exchange` of one message."""
    return exchange([], [(tensor, source)], group, async_op)


def barrier(group: Group) -> None:
    """Return when every rank of the group has called this."""
    if group.size > 1:
        with communication_errors():
            dist.barrier(group.handle)


def all_gather_objects(value, group: Group) -> list:
    """Return the `value` (anything that can be pickled) of every rank of the group, in rank order."""
    values = [value] * group.size
    if group.size > 1:
        with communication_errors():
            dist.all_gather_object(values, value, group=group.handle)
    return values


def _call(op: str, tensor: Tensor, group: Group, sent: int, peer: int | None = None) -> Call:
    dtype, peer = str(tensor.dtype).removeprefix("torch."), None if peer is None else group.ranks[peer]
    return Call(op, group.name, group.size, dtype, tensor.numel(), sent, phase, peer)


def _copied(output: Tensor, input: Tensor) -> Work:
    """A collective from `input` to `output` in a group of one rank."""
    if output.data_ptr() != input.data_ptr():
        output.copy_(input.view_as(output))
    return Work()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _others(tensor: Tensor, group: Group) -> int:
    """(N-1)/N of the tensor's bytes: the parts of the other ranks."""
    return _bytes(tensor) * (group.size - 1) // group.size


# ---- recorded, and in flight -----------------------------------------------------------------------------------------


@dataclass
class Call:
    """One recorded collective or message. The four marks are those of the recording's clock, None until they come."""

    op: str
    group: str
    group_size: int
    dtype: str
    elements: int
    bytes: int  # model bytes sent by this rank
    phase: str
    peer: int | None = None  # global rank of the other end of a message
    issue: object = None
    wait_start: object = None
    wait_end: object = None
    completion: object = None
    link_seconds: float = 0.0  # that the simulated link takes


class _Recording(NamedTuple):
    calls: list[Call]
    clock: Callable
    launched: Callable


_recordings: list[_Recording] = []  # those that are running, the innermost last


@contextmanager
def record(clock: Callable = time.perf_counter_ns, launched: Callable = lambda *_: None) -> Iterator[list[Call]]:
    """Record every collective that this rank issues in the block: a list of `Call`s that grows meanwhile.

    A message is one `Call` for its sender ("send") and one for its receiver ("receive"). Groups of one rank leave none.
    The marks of a wait are also set if it happens after the block. Recordings may be nested.

    Args:
        clock: gives the marks `issue`, `wait_start`, `wait_end` and, unless `launched` sets it, `completion`.
        launched: called as `launched(handles, calls, done_at)` after each launch of one collective or one batch of
            messages: torch's handle, or one for each message, receives first; the `Call`s; and the `time.perf_counter`
            at which the simulated link completes them.
    """
    recording = _Recording([], clock, launched)
    _recordings.append(recording)
    try:
        yield recording.calls
    finally:
        _recordings.pop()


class Work:
    """A collective in flight, which keeps its tensors alive. `Work()` has completed.

    Args:
        calls: describe the collective, or the messages of a batch. They are counted, and recorded as issued now.
        group: that of all of them.
        hops: messages that follow one another; each pays the latency of the simulated link.
        link_bytes: what the simulated link carries, if that is not what this rank sends.
    """

    __slots__ = ("_afterwards", "_done_at", "_handles", "_in_flight", "_recorded")

    def __init__(
        self, calls: list[Call] = (), group: Group | None = None, hops: int = 0, link_bytes: int | None = None
    ):
        self._handles, self._in_flight, self._afterwards, self._recorded, self._done_at = [], [], [], [], 0.0
        if not calls:
            return
        sent, seconds = sum(call.bytes for call in calls), 0.0
        sent_bytes[group.name] += sent
        if group.line is not None:
            seconds = group.line.link.seconds(sent if link_bytes is None else link_bytes, hops)
            self._done_at = group.line.occupy(seconds)
        for recording in _recordings:
            timed = {"issue": recording.clock(), "link_seconds": seconds}
            self._recorded.append((recording, [replace(call, **timed) for call in calls]))
            recording.calls.extend(self._recorded[-1][1])

    def launch(self, function: Callable, *args, **options) -> None:
        """Call a function of torch.distributed that returns one handle or several."""
        with communication_errors():
            handles = function(*args, **options)
        self._handles += handles if isinstance(handles, list) else [handles]
        self._in_flight.append(args)

    def afterwards(self, function: Callable, *args) -> None:
        """Let the wait end with `function(*args)`."""
        self._afterwards.append((function, args))

    def launched(self, async_op: bool) -> Work:
        """Return this work, after its wait unless `async_op`. Everything that belongs to it has been launched."""
        for recording, calls in self._recorded:
            recording.launched(self._handles, calls, self._done_at)
        if not async_op:
            self.wait()
        return self

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return time.perf_counter() >= self._done_at and all(handle.is_completed() for handle in self._handles)

    def wait(self) -> None:
        """Return when the result may be used (on NCCL: by the current stream).

        Raises CommunicationError if another rank is gone or does not answer in time.
        """
        if not self._handles:
            return
        recorded = [(call, recording.clock) for recording, calls in self._recorded for call in calls]
        for call, clock in recorded:
            call.wait_start = clock()
        with communication_errors():
            for handle in self._handles:
                handle.wait()
        for function, args in self._afterwards:
            function(*args)
        if self._done_at:
            time.sleep(max(0.0, self._done_at - time.perf_counter()))
        for call, clock in recorded:
            call.wait_end = clock()
            if call.completion is None:
                call.completion = call.wait_end
        self._handles, self._in_flight, self._afterwards = [], [], []
