"""Peak memory of a region of code: the CUDA allocator's counters on a GPU, allocator events on the CPU.

On the CPU torch's profiler can log each allocation and release of a storage, for about 5 microseconds. The resident
set size of the process is no substitute: it counts touched pages, caches and code.
"""

import bisect
import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch._C import _autograd, _profiler

from common.measure.storages import storages_of


class Allocation(NamedTuple):
    """An event of the CPU allocator, `seconds` after entry: `bytes` more (negative: fewer) at `address`."""

    seconds: float
    address: int
    bytes: int


@dataclass
class Measurement:
    """What `MemoryMeter.measure` found; filled in when the region ends."""

    peak_bytes: int | None = None  # on CUDA of everything, on the CPU of the baseline and what the region allocated
    baseline_bytes: int = 0  # alive at entry
    allocations: list[Allocation] = field(default_factory=list)  # on the CPU: the events of baseline and region


class MemoryMeter:
    """Measures peak memory on `device`. With `on_cpu=False` a CPU region is not measured and costs nothing.

    The CPU's allocator reports a release only if it reported the allocation, so free old gradients before you enter.
    Only the entering thread and its backward passes are seen: a message that gloo's thread frees may raise a peak.
    """

    def __init__(self, device: torch.device | str, on_cpu: bool = True):
        self.device, self.on_cpu = torch.device(device), on_cpu

    @contextlib.contextmanager
    def measure(self, baseline: Iterable[torch.Tensor] = ()) -> Iterator[Measurement]:
        """Measure the region; inside another profiler nothing is measured. `baseline`: tensors alive at entry (CPU)."""
        result = Measurement()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            result.baseline_bytes = torch.cuda.memory_allocated(self.device)
            yield result
            result.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        elif not self.on_cpu or _autograd._profiler_enabled():
            yield result
        else:
            storages = storages_of(baseline)
            del baseline  # or a list made for the call would keep alive what the region frees
            result.baseline_bytes = sum(storages.values())
            with _allocator_events() as events:
                yield result
            result.allocations = _known(events, storages)
            changes = (event.bytes for event in result.allocations)
            result.peak_bytes = max(itertools.accumulate(changes, initial=result.baseline_bytes))


@contextlib.contextmanager
def _allocator_events() -> Iterator[list[Allocation]]:
    """Fill the list with the CPU allocator's events of the region."""
    flags = False, True, False, False, False, _profiler._ExperimentalConfig()  # shapes, memory, stacks, FLOPs, modules
    options = _profiler.ProfilerConfig(_profiler.ProfilerState.KINETO, *flags), {_profiler.ProfilerActivity.CPU}
    _autograd._prepare_profiler(*options)
    # torch.profiler would log every operator, at 20 times the cost; this kind only runs in traced builds for phones.
    _autograd._enable_profiler(*options, {_profiler.RecordScope.KERNEL_FUNCTION_DTYPE})
    events = []
    try:
        yield events
    finally:
        logged = _autograd._disable_profiler()
    start = logged.trace_start_ns()
    tree = [((event.start_time_ns - start) * 1e-9, event.extra_fields) for event in logged.experimental_event_tree()]
    events += [Allocation(seconds, it.ptr, it.alloc_size) for seconds, it in tree if it.device.type == "cpu"]


def _known(events: list[Allocation], alive: dict[int, int]) -> list[Allocation]:
    """Only the events whose size is sure: an event releases what `alive` or an earlier event has put at its place.

    The allocator's own size of a release may be out of date, since it does not see what happens between regions, and
    a release that was not reported (see `MemoryMeter`) shows only when a new block overlaps the old one.
    """
    alive, addresses, known = dict(alive), sorted(alive), []
    for event in events:
        first = last = bisect.bisect_left(addresses, event.address + max(event.bytes, 1))
        while first and addresses[first - 1] + alive[addresses[first - 1]] > event.address:
            first -= 1
        known += [Allocation(event.seconds, address, -alive.pop(address)) for address in addresses[first:last]]
        addresses[first:last] = [event.address] if event.bytes > 0 else []
        if event.bytes > 0:
            alive[event.address] = event.bytes
            known.append(event)
    return known
