"""Peak memory: known allocations must be found to the byte."""

import itertools

import pytest
import torch

from common.measure.storages import live_bytes
from step01_single_gpu.memory_meter import Allocation, Measurement, MemoryMeter, _known

MB = 10**6


def megabytes(count):
    return torch.empty(count * MB, dtype=torch.uint8)


def levels(memory: Measurement) -> list[int]:  # bytes alive at entry and after every event
    return list(itertools.accumulate((event.bytes for event in memory.allocations), initial=memory.baseline_bytes))


def test_the_peak_is_exact():
    with MemoryMeter("cpu").measure() as memory:
        a = megabytes(3)
        b = megabytes(5)
        del a
        c = megabytes(4)
        del b
        d = megabytes(2)
    assert memory.peak_bytes == 9 * MB
    assert [level // MB for level in levels(memory)] == [0, 3, 8, 5, 9, 4, 6]
    seconds = [event.seconds for event in memory.allocations]
    assert seconds == sorted(seconds) and 0 < seconds[-1] < 60
    assert live_bytes([c, d]) == levels(memory)[-1]


def test_the_baseline_counts_until_it_is_freed():
    with MemoryMeter("cpu").measure():
        old = megabytes(6)
    with MemoryMeter("cpu").measure(baseline=[old]) as memory:
        new = megabytes(1)
        del old
        new = megabytes(2)  # noqa: F841 (the first one lives until the second is made)
    assert memory.baseline_bytes == 6 * MB and memory.peak_bytes == 7 * MB
    assert levels(memory)[-1] == 2 * MB


def test_a_release_counts_what_was_allocated_at_its_address():
    # 200 is alive at entry with 7 bytes, but the allocator remembers another size; nothing is known of 300
    changes = [(100, 10), (200, -500), (300, -400), (100, -10), (100, 30)]
    events = [Allocation(0.0, address, size) for address, size in changes]
    found = [(event.address, event.bytes) for event in _known(events, {200: 7})]
    assert found == [(100, 10), (200, -7), (100, -10), (100, 30)]


def test_a_block_that_another_one_overlaps_was_released_unseen():
    events = [Allocation(0.0, 100, 50), Allocation(0.1, 200, 50), Allocation(0.2, 140, 70), Allocation(0.3, 90, 10)]
    found = [(event.address, event.bytes) for event in _known(events, {150: 20, 250: 9})]
    released = [(100, -50), (150, -20), (200, -50)]  # the neighbours at 250 and at 90 to 100 stay
    assert found == [(100, 50), (200, 50), *released, (140, 70), (90, 10)]


def test_live_bytes_counts_a_storage_once():
    a = torch.zeros(100, 100)
    assert live_bytes([a, a[0], a.t(), torch.zeros(3, dtype=torch.float64)]) == 40_000 + 24
    a.untyped_storage().resize_(0)  # as ZeRO-3 frees parameters
    assert live_bytes([a, torch.empty(5, device="meta")]) == 0


def test_nothing_is_measured_when_switched_off_inside_another_profiler_or_after_an_error(capfd):
    with MemoryMeter("cpu", on_cpu=False).measure() as off:
        megabytes(1)
    with torch.autograd.profiler.profile(), MemoryMeter("cpu").measure() as inside:
        megabytes(1)
    with pytest.raises(ZeroDivisionError), MemoryMeter("cpu").measure() as failed:
        1 / 0  # noqa: B018
    assert off.peak_bytes is inside.peak_bytes is failed.peak_bytes is None
    with MemoryMeter("cpu").measure() as memory:
        megabytes(2)
    assert memory.peak_bytes == 2 * MB and capfd.readouterr() == ("", "")


@pytest.mark.gpu
def test_the_peak_on_cuda():
    before = torch.empty(4 * 2**20, dtype=torch.uint8, device="cuda")
    with MemoryMeter("cuda").measure() as memory:
        inside = torch.empty(8 * 2**20, dtype=torch.uint8, device="cuda")
        del inside
    assert memory.baseline_bytes >= before.nbytes
    assert memory.peak_bytes == memory.baseline_bytes + 8 * 2**20 and memory.allocations == []
