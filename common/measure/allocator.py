"""Peak memory of a region of code: the CUDA allocator's counters on a GPU, allocator events on the CPU.

On the CPU torch keeps no counters, but with `profile_memory=True` its profiler logs every allocation and
release of tensor storage. Asked for these alone, without the operators, the log costs about 5 microseconds an
event (20 ms for the 4,300 events of a 200 ms training step); the profiler's usual result would cost 20 times
that. The resident set size of the process is no substitute: it counts touched pages, caches and code.
"""

import bisect
import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Allocation(NamedTuple):
    """An event of the CPU allocator, `seconds` after entry: `bytes` more (negative: fewer) at `address`."""

    seconds: float
    address: int
    bytes: int


@dataclass
class Measurement:
    """What `MemoryMeter.measure` found; filled in when the region ends.

    peak_bytes: highest number of bytes alive. On CUDA everything the allocator holds; on the CPU
        `baseline_bytes` plus what the region allocated. None where nothing was measured.
    baseline_bytes: bytes alive at entry, as far as known: CUDA's counter, or the storages of the `baseline`.
    allocations: events of the CPU allocator in order; empty on CUDA. Releases of what is neither baseline nor
        allocated inside are left out.
    """

    peak_bytes: int | None = None
    baseline_bytes: int = 0
    allocations: list[Allocation] = field(default_factory=list)

    @property
    def timeline(self) -> list[tuple[float, int]]:
        """(seconds after entry, bytes alive from then on), starting with the baseline."""
        alive, points = self.baseline_bytes, [(0.0, self.baseline_bytes)]
        for event in self.allocations:
            alive += event.bytes
            points.append((event.seconds, alive))
        return points


class MemoryMeter:
    """Measures peak memory on `device`. With `on_cpu=False` a CPU region is not measured and costs nothing.

    Two limits on the CPU. The allocator reports a release only if it reported the allocation, so a tensor
    made outside any measured region and freed inside one still counts (torch warns: "Memory block of unknown
    size"); enter with what the region frees, such as old gradients, already gone. And only the entering thread
    is seen, with the backward passes it runs. Where gloo's thread happens to drop the last reference to a
    message, the release shows only once the memory is used again: with several ranks a peak may come out high.
    """

    def __init__(self, device: torch.device | str, on_cpu: bool = True):
        self.device = torch.device(device)
        self.on_cpu = on_cpu

    @contextlib.contextmanager
    def measure(self, baseline: Iterable[torch.Tensor] = ()) -> Iterator[Measurement]:
        """Measure the region; `baseline` are tensors alive at entry (used on the CPU only).

        Where torch's profiler runs already (it cannot be nested), `peak_bytes` stays None.
        """
        result = Measurement()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            result.baseline_bytes = torch.cuda.memory_allocated(self.device)
            yield result
            result.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        elif not self.on_cpu or torch._C._autograd._profiler_enabled():
            yield result
        else:
            storages = _storages(baseline)
            del baseline  # or a list made for the call would keep alive what the region frees
            result.baseline_bytes = sum(storages.values())
            with _allocator_events() as events:
                yield result
            result.allocations = _known(events, storages)
            changes = (event.bytes for event in result.allocations)
            result.peak_bytes = max(itertools.accumulate(changes, initial=result.baseline_bytes))


def live_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once however many views of it there are."""
    return sum(_storages(tensors).values())


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes. Storage without memory (meta tensors, freed parameters of ZeRO-3) has address 0."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr()}


@contextlib.contextmanager
def _allocator_events() -> Iterator[list[Allocation]]:
    """Fill the list with the CPU allocator's events of the region (empty if it raises).

    `torch.profiler` would log every operator as well, so this asks the layer below it for a kind of operator
    that never runs (scope KERNEL_FUNCTION_DTYPE exists to trace builds for phones).
    """
    from torch._C import _autograd, _profiler

    # Without this, torch 2.13 prints "USDT: profiler_start" and "profiler_stop" for each region.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Positions: shapes, memory, stacks, FLOPs, modules.
    flags = False, True, False, False, False
    config = _profiler.ProfilerConfig(_profiler.ProfilerState.KINETO, *flags, _profiler._ExperimentalConfig())
    activities, events = {_profiler.ProfilerActivity.CPU}, []
    _autograd._prepare_profiler(config, activities)
    _autograd._enable_profiler(config, activities, {_profiler.RecordScope.KERNEL_FUNCTION_DTYPE})
    try:
        yield events
    finally:
        logged = _autograd._disable_profiler()
    start = logged.trace_start_ns()
    for event in logged.experimental_event_tree():
        fields = event.extra_fields
        if fields.device.type == "cpu":
            events.append(Allocation((event.start_time_ns - start) * 1e-9, fields.ptr, fields.alloc_size))


def _known(events: list[Allocation], alive: dict[int, int]) -> list[Allocation]:
    """Only the events whose size is sure: a release takes what an event, or `alive`, put at its address.

    The allocator's own size may be stale: it forgets releases outside measured regions, so an address used
    again there keeps the size that it had in the last measured region. And some releases are not reported (see
    `MemoryMeter`): those of blocks that a new one overlaps are put just before it.
    """
    alive, known = dict(alive), []
    addresses = sorted(alive)  # of the blocks in `alive`, which never overlap

    def release(seconds: float, address: int) -> None:
        known.append(Allocation(seconds, address, -alive.pop(address)))
        del addresses[bisect.bisect_left(addresses, address)]

    for event in events:
        if event.bytes > 0:
            place = bisect.bisect_left(addresses, event.address + event.bytes)
            while place and addresses[place - 1] + alive[addresses[place - 1]] > event.address:
                place -= 1
                release(event.seconds, addresses[place])
            alive[event.address] = event.bytes
            addresses.insert(place, event.address)
            known.append(event)
        elif event.address in alive:
            release(event.seconds, event.address)
    return known
