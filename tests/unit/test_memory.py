"""Peak memory: known allocations must be found to the byte."""

import pytest
import torch

from common.measure.allocator import Allocation, MemoryMeter, _known, live_bytes

MB = 10**6


def megabytes(count):
    return torch.empty(count * MB, dtype=torch.uint8)


def test_the_peak_is_exact():
    with MemoryMeter("cpu").measure() as memory:
        a = megabytes(3)
        b = megabytes(5)
        del a
        c = megabytes(4)
        del b
        d = megabytes(2)
    assert memory.peak_bytes == 9 * MB
    assert [event.bytes // MB for event in memory.allocations] == [3, 5, -3, 4, -5, 2]
    assert [level // MB for _, level in memory.timeline] == [0, 3, 8, 5, 9, 4, 6]
    seconds = [second for second, _ in memory.timeline]
    assert seconds == sorted(seconds) and 0 < seconds[-1] < 60
    assert live_bytes([c, d]) == memory.timeline[-1][1]


def test_the_baseline_counts_and_is_missed_once_freed():
    with MemoryMeter("cpu").measure():
        old = megabytes(6)
    with MemoryMeter("cpu").measure(baseline=[old]) as memory:
        new = megabytes(1)
        del old
        new = megabytes(2)  # noqa: F841 (the first one lives until the second is made)
    assert memory.baseline_bytes == 6 * MB and memory.peak_bytes == 7 * MB
    assert memory.timeline[-1][1] == 2 * MB


def test_a_release_counts_what_was_allocated_at_its_address():
    events = [
        Allocation(0.0, 100, 10),
        Allocation(0.1, 200, -500),  # alive at entry with 7 bytes; the allocator remembers another size
        Allocation(0.2, 300, -400),  # neither baseline nor allocated here
        Allocation(0.3, 100, -10),
        Allocation(0.4, 100, 30),
    ]
    assert [(event.address, event.bytes) for event in _known(events, {200: 7})] == [
        (100, 10),
        (200, -7),
        (100, -10),
        (100, 30),
    ]


def test_a_block_that_another_one_overlaps_was_released_unseen():
    events = [Allocation(0.0, 100, 50), Allocation(0.1, 200, 50), Allocation(0.2, 140, 70), Allocation(0.3, 90, 10)]
    assert [(event.address, event.bytes) for event in _known(events, {150: 20, 250: 9})] == [
        (100, 50),
        (200, 50),
        (200, -50),
        (150, -20),
        (100, -50),
        (140, 70),
        (90, 10),
    ]


def state_tensors(model, optimizer):
    """Parameters, gradients and optimizer state: what lives from step to step."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def test_a_training_step_with_its_backward_pass():
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 500, bias=False)  # 2,000,000 bytes
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(10, 1000)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        optimizer.step()

    meter, weight = MemoryMeter("cpu"), 2 * MB
    levels = []
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)  # outside, see MemoryMeter
        with meter.measure([x, *state_tensors(model, optimizer)]) as memory:
            step()
        levels.append((memory.baseline_bytes, memory.timeline[-1][1]))
        assert memory.timeline[-1][1] == live_bytes([x, *state_tensors(model, optimizer)])
    counter = 4  # AdamW's step count
    state = 2 * weight + counter
    entry = weight + x.numel() * 4
    assert levels == [(entry, entry + weight + state), (entry + state, entry + state + weight)]
    assert memory.peak_bytes > entry + state + weight  # the update has temporaries


def test_live_bytes_counts_a_storage_once():
    a = torch.zeros(100, 100)
    assert live_bytes([a, a[0], a.t(), torch.zeros(3, dtype=torch.float64)]) == 40_000 + 24
    a.untyped_storage().resize_(0)  # as ZeRO-3 frees parameters
    assert live_bytes([a, torch.empty(5, device="meta")]) == 0


def test_nothing_is_measured_when_switched_off_or_inside_another_profiler():
    with MemoryMeter("cpu", on_cpu=False).measure() as memory:
        megabytes(1)
    assert memory.peak_bytes is None and memory.timeline == [(0.0, 0)]
    with torch.autograd.profiler.profile(), MemoryMeter("cpu").measure() as memory:
        megabytes(1)
    assert memory.peak_bytes is None


def test_an_error_inside_passes_through_and_the_next_region_is_measured():
    meter = MemoryMeter("cpu")
    with pytest.raises(ZeroDivisionError), meter.measure() as memory:
        1 / 0  # noqa: B018
    assert memory.peak_bytes is None
    with meter.measure() as memory:
        megabytes(2)
    assert memory.peak_bytes == 2 * MB


def test_measuring_prints_nothing(capfd):
    with MemoryMeter("cpu").measure():
        megabytes(1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
def test_the_peak_on_cuda():
    meter = MemoryMeter("cuda")
    before = torch.empty(4 * 2**20, dtype=torch.uint8, device="cuda")
    with meter.measure() as memory:
        inside = torch.empty(8 * 2**20, dtype=torch.uint8, device="cuda")
        del inside
    assert memory.baseline_bytes >= before.nbytes
    assert memory.peak_bytes == memory.baseline_bytes + 8 * 2**20
    assert memory.allocations == []
