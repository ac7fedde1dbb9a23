"""Every collective of the project goes through here: one place that runs it, counts its bytes and can record it.

All reductions are sums (a rank's loss is its share of the global mean). Peers are named
by their index within the group. A group of one rank returns at once. Every function returns a `Work`; without
`async_op` it has completed already.

Model bytes are what one rank sends in the bandwidth-optimal algorithm for K bytes over N ranks (Thakur, Rabenseifner,
Gropp 2005): all-reduce 2(N-1)/N K, reduce-scatter, all-gather and all-to-all (N-1)/N K, broadcast and send K.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from common.errors import CommunicationError, first_line
from common.link import Link
from common.process_groups import Group

# torch 2.13 renamed two collectives and warns about the old names, which are the only ones that 2.11 has
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LOST_PEER = ("Connection closed", "Connection reset", "Connection refused", "Timed out", "timeout", "Broken pipe")
_LOST_PEER += ("Read error", "Write error", "NCCL error", "Socket closed", "recvBytes", "sendBytes")

link: Link | None = None  # simulated slower link (--link)
recorder = None  # the tracer while it records: has `calls`, `clock()` and `watch(handle, calls, done_at)`
phase = "setup"  # forward, backward or optimizer: set by the tracer, copied into each recorded call
sent_bytes: dict[str, int] = defaultdict(int)  # model bytes that this rank sent, by group name

_link_free: dict[str, float] = defaultdict(float)  # when the simulated link of a group is idle again


@dataclass
class Call:
    """One recorded collective. The four times are marks of the recording's clock; None: it has not come so far."""

    op: str
    group: str
    group_size: int
    dtype: str
    elements: int
    bytes: int  # model bytes sent by this rank
    phase: str
    peer: int | None  # global rank of the other end of a message
    issue: object = None
    wait_start: object = None
    wait_end: object = None
    completion: object = None
    clock: Callable = field(default=time.perf_counter_ns, repr=False, compare=False)  # of its recording


@dataclass(frozen=True, eq=False)
class _Recording:
    calls: list[Call]
    clock: Callable
    launched: Callable | None


_recordings: list[_Recording] = []  # those under way, the innermost last


@contextmanager
def record(clock: Callable = time.perf_counter_ns, launched: Callable | None = None) -> Iterator[list[Call]]:
    """Record every collective that this rank issues in the block: a list of `Call`s that grows as it runs.

        with collectives.record() as calls:
            ...
        print([(call.op, call.group, call.bytes) for call in calls])

    A message is one `Call` for its sender ("send") and one for its receiver. Groups of one rank communicate nothing
    and leave no call. The marks of a wait are also set if it comes after the block. Recordings may be nested.

    Args:
        clock: gives the marks `issue`, `wait_start`, `wait_end` and, unless `launched` sets it, `completion`.
        launched: called as `launched(handle, calls, done_at)` right after each launch of one collective or one batch
            of messages, with torch's handle, the `Call`s of this launch, and the time (of `time.perf_counter`) before
            which the simulated link does not complete it, 0.0 without one.
    """
    recording = _Recording([], clock, launched)
    _recordings.append(recording)
    try:
        yield recording.calls
    finally:
        _recordings.remove(recording)


class Work:
    """A collective under way. `wait` returns when its result may be used (on NCCL: by the current stream)."""

    __slots__ = ("_calls", "_done_at", "_finish", "_handles", "_keep")

    def __init__(self, handles=(), finish: Callable | None = None, calls=(), done_at: float = 0.0, keep=()):
        self._handles, self._finish, self._calls = handles, finish, calls
        self._done_at, self._keep = done_at, keep  # tensors in flight stay alive until the wait

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        if self._handles is None:
            return True
        return time.perf_counter() >= self._done_at and all(handle.is_completed() for handle in self._handles)

    def wait(self) -> None:
        """Wait for completion. Raises CommunicationError when another rank is gone or did not answer in time."""
        if self._handles is None:
            return
        for call in self._calls:
            call.wait_start = call.clock()
        try:
            for handle in self._handles:
                handle.wait()
        except RuntimeError as error:
            raise as_communication_error(error) from error
        if self._finish is not None:
            self._finish()
        if self._done_at:
            time.sleep(max(0.0, self._done_at - time.perf_counter()))
        for call in self._calls:
            call.wait_end = call.clock()
            if call.completion is None:
                call.completion = call.wait_end
        self._handles = self._finish = self._keep = None


_DONE = Work()


def reset_bytes() -> None:
    """Start counting the sent bytes anew."""
    sent_bytes.clear()


def all_reduce(tensor: torch.Tensor, group: Group, async_op: bool = False, op: str = "sum") -> Work:
    """Replace `tensor` on every rank by the sum (or "max") over the group."""
    if group.size == 1:
        return _DONE
    host, give_back = _stage(group, tensor, output=True)
    reduction = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    return _issue(
        *("all_reduce", group, tensor, 2 * (group.size - 1), 2 * _share(tensor, group), async_op, give_back),
        lambda: [dist.all_reduce(host, reduction, group=group.handle, async_op=True)],
    )


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: Group, async_op: bool = False) -> Work:
    """`output` receives this rank's 1/N of the sum of every rank's `input` (N times as many elements).

    gloo's own reduce-scatter is an all-reduce in disguise; there it is an all-to-all and a local sum in rank order.
    """
    if group.size == 1:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input.view_as(output))
        return _DONE
    if group.backend == "nccl" and input.is_cuda:
        return _issue(
            *("reduce_scatter", group, input, group.size - 1, _share(input, group), async_op, None),
            lambda: [_reduce_scatter(output, input, group=group.handle, async_op=True)],
        )
    host, _ = _stage(group, input)
    received = torch.empty_like(host)

    def local_sum() -> None:
        parts = received.view(group.size, -1)
        if output.is_cuda:
            output.copy_(parts.sum(0).view_as(output))
        else:
            torch.sum(parts, 0, out=output.view(-1))
        received.untyped_storage().resize_(0)  # gloo's thread refers to it a moment longer

    return _issue(
        *("reduce_scatter", group, input, group.size - 1, _share(input, group), async_op, local_sum),
        lambda: [dist.all_to_all_single(received.view(-1), host.view(-1), group=group.handle, async_op=True)],
    )


def all_gather(output: torch.Tensor, input: torch.Tensor, group: Group, async_op: bool = False) -> Work:
    """`output` (N times as many elements) receives the `input` of every rank, in rank order.

    `input` may be this rank's part of `output`. gloo's own all-gather copies through a buffer of the whole size; N
    broadcasts into `output` need none.
    """
    if group.size == 1:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input.view_as(output))
        return _DONE
    described = "all_gather", group, input, group.size - 1, (group.size - 1) * _size(input), async_op
    if group.backend == "nccl" and input.is_cuda:
        return _issue(
            *(*described, None),
            lambda: [_all_gather(output.view(-1), input.view(-1), group=group.handle, async_op=True)],
        )
    host, give_back = _stage(group, output, output=True, copy=False)
    parts = host.view(group.size, -1)
    if parts[group.rank].data_ptr() != input.data_ptr():
        parts[group.rank].copy_(input.view(-1))
    return _issue(
        *(*described, give_back),
        lambda: [
            dist.broadcast(part, source, group=group.handle, async_op=True)
            for part, source in zip(parts, group.ranks, strict=True)
        ],
    )


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group,
    output_sizes: list[int] | None = None,
    input_sizes: list[int] | None = None,
    async_op: bool = False,
) -> Work:
    """Rank i's j-th part of `input` becomes rank j's i-th part of `output`. Sizes count rows; None: equal parts."""
    if group.size == 1:
        output.copy_(input)
        return _DONE
    host_input, _ = _stage(group, input)
    host_output, give_back = _stage(group, output, output=True, copy=False)
    kept = input_sizes[group.rank] if input_sizes else input.shape[0] // group.size
    sent = _size(input) - kept * _size(input) // max(1, input.shape[0])
    return _issue(
        *("all_to_all", group, input, group.size - 1, sent, async_op, give_back),
        lambda: [
            dist.all_to_all_single(host_output, host_input, output_sizes, input_sizes, group.handle, async_op=True)
        ],
    )


def broadcast(tensor: torch.Tensor, source: int, group: Group, async_op: bool = False) -> Work:
    """Every rank's `tensor` becomes that of index `source` of the group."""
    if group.size == 1:
        return _DONE
    host, give_back = _stage(group, tensor, output=True)
    sent = _size(tensor)
    return _issue(
        *("broadcast", group, tensor, group.size - 1, sent, async_op, give_back),
        lambda: [dist.broadcast(host, group.ranks[source], group=group.handle, async_op=True)],
    )


def send(tensor: torch.Tensor, to: int, group: Group, async_op: bool = False) -> Work:
    """Send `tensor` to index `to` of the group. Do not change it before the wait."""
    return exchange([(tensor, to)], [], group, async_op)


def receive(tensor: torch.Tensor, source: int, group: Group, async_op: bool = False) -> Work:
    """Receive into `tensor` from index `source` of the group."""
    return exchange([], [(tensor, source)], group, async_op)


def exchange(
    sends: list[tuple[torch.Tensor, int]],
    receives: list[tuple[torch.Tensor, int]],
    group: Group,
    async_op: bool = False,
) -> Work:
    """Messages issued together as one batch, so that NCCL cannot deadlock on their order: (tensor, peer index) each."""
    if not sends and not receives:
        return _DONE
    operations, copies, calls, sent = [], [], [], 0
    for tensor, peer in sends:
        host, _ = _stage(group, tensor)
        operations.append(dist.P2POp(dist.isend, host, group.ranks[peer], group.handle))
        calls.append(("send", tensor, group.ranks[peer], _size(tensor)))
        sent += _size(tensor)
    for tensor, peer in receives:
        host, give_back = _stage(group, tensor, output=True, copy=False)
        operations.append(dist.P2POp(dist.irecv, host, group.ranks[peer], group.handle))
        calls.append(("receive", tensor, group.ranks[peer], 0))
        copies += [give_back] if give_back else []

    def finish() -> None:
        for copy in copies:
            copy()

    transfer = max((_size(tensor) for _, tensor, _, _ in calls), default=0)
    return _issue(
        *("exchange", group, None, 1, sent, async_op, finish if copies else None),
        lambda: dist.batch_isend_irecv(operations),
        messages=calls,
        transfer=transfer,
    )


def all_gather_objects(value, group: Group) -> list:
    """Return the `value` of every rank of the group, in rank order. Values travel pickled; they are not recorded."""
    if group.size == 1:
        return [value]
    values = [None] * group.size
    try:
        dist.all_gather_object(values, value, group=group.handle)
    except RuntimeError as error:
        raise as_communication_error(error) from error
    return values


def barrier(group: Group) -> None:
    """Return when every rank of the group has come here."""
    if group.size > 1:
        try:
            dist.barrier(group.handle)
        except RuntimeError as error:
            raise as_communication_error(error) from error


# ---- one road for all of them ---------------------------------------------------------------------------------


def _issue(op, group, tensor, hops, sent, async_op, finish, launch, messages=None, transfer=None) -> Work:
    """Count, record, launch, and wait unless `async_op`. `hops` and `transfer` bytes give the simulated link's time."""
    sent_bytes[group.name] += sent
    recordings = list(_recordings)
    if recorder is not None:
        recordings.append(_Recording(recorder.calls, lambda: recorder.clock() if recorder else None, recorder.watch))
    launches = []  # by recording, its calls
    for recording in recordings:
        described = messages or [(op, tensor, None, sent)]
        calls = [
            Call(
                *(name, group.name, group.size, str(each.dtype).removeprefix("torch.")),
                *(each.numel(), size, phase, peer),
                clock=recording.clock,
            )
            for name, each, peer, size in described
        ]
        for call in calls:
            call.issue = call.clock()
        recording.calls.extend(calls)
        launches.append(calls)
    done_at = 0.0
    if link is not None:
        start = max(time.perf_counter(), _link_free[group.name])
        done_at = start + hops * link.alpha + (sent if transfer is None else transfer) / link.bandwidth
        _link_free[group.name] = done_at
    try:
        handles = launch()
    except RuntimeError as error:
        raise as_communication_error(error) from error
    for recording, calls in zip(recordings, launches, strict=True):
        if recording.launched is not None:
            recording.launched(handles[-1], calls, done_at)
    every_call = [call for calls in launches for call in calls]
    work = Work(handles, finish, every_call, done_at, launch)  # launch refers to every tensor in flight
    if not async_op:
        work.wait()
    return work


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _share(tensor: torch.Tensor, group: Group) -> int:
    """(N-1)/N of the tensor's bytes."""
    return _size(tensor) * (group.size - 1) // group.size


def _stage(group: Group, tensor: torch.Tensor, output: bool = False, copy: bool = True):
    """The tensor to hand to the backend, and what brings the result back: gloo gets a CPU copy of a CUDA tensor."""
    if group.backend == "nccl" or not tensor.is_cuda:
        return tensor, None
    host = tensor.cpu() if copy else torch.empty(tensor.shape, dtype=tensor.dtype)
    return host, (lambda: tensor.copy_(host)) if output else None


def as_communication_error(error: RuntimeError) -> RuntimeError:
    """A lost peer as CommunicationError; anything else (a wrong size, say) stays what it is."""
    if any(sign in str(error) for sign in _LOST_PEER):
        return CommunicationError(first_line(error))
    return error
