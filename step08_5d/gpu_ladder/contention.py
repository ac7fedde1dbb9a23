"""A matrix product beside a collective: communication that is hidden still takes multiprocessors from it.

NCCL's kernels run on the same multiprocessors as the product, one for each of its channels. The model: a product is cut
into tiles, each multiprocessor computes one at a time, and all tiles take as long. With n of S multiprocessors taken,
the rest needs ceil(tiles / (S - n)) turns, or *waves*.

On a GPU the product is timed beside a stand-in for the collective: n programs that copy memory, each of which keeps a
multiprocessor busy. The product's program leaves no room for a second one, as it takes nearly all registers.
"""

import statistics
from functools import partial

import torch

from common.drawing.tables import print_table
from common.measure.gpu_time import CACHE, clock, seconds_of
from step08_5d.gpu_ladder.machine import DEVICE, NO_TRITON
from step08_5d.kernels.launching import HAS_TRITON, ceil_div, tl, triton

MULTIPROCESSORS = 132  # of an H100 or H200
TILE = 128, 256  # rows and columns of the product that one multiprocessor computes at a time
TAKEN = (0, 4, 5, 8, 16, 20, 24, 32)  # 20: DeepSeek-V3's kernels for all-to-all (arXiv:2412.19437, 3.2.2)
SIZES = (4096, 8192)  # rows and columns of the matrices
ROUNDS, HELD = 200, 10e-3  # rounds of copying, to learn how long one takes; seconds that the copying shall last
REPEATS = 10


def slowdown(size: int, taken: int, multiprocessors: int = MULTIPROCESSORS) -> float:
    """Time of a product of size x size matrices with so many multiprocessors taken, divided by the time alone."""
    tiles = ceil_div(size, TILE[0]) * ceil_div(size, TILE[1])
    return ceil_div(tiles, multiprocessors - taken) / ceil_div(tiles, multiprocessors)


def smooth_slowdown(taken: int, multiprocessors: int = MULTIPROCESSORS) -> float:
    """The same without waves: for many kernels in a row, or one that hands out smaller and smaller tiles."""
    return multiprocessors / (multiprocessors - taken)


@triton.jit
def _copy_kernel(source, target, rounds, BLOCK: tl.constexpr):
    """Copy a block of one's own, again and again, as a channel of a collective does with what arrives."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(rounds):
        tl.store(target + offsets, tl.load(source + offsets, volatile=True))


def copy_on(source: torch.Tensor, target: torch.Tensor, rounds: int) -> None:
    """Keep a multiprocessor busy for each row of `source`, of 8,192 numbers: 32 warps are half of what it can hold."""
    _copy_kernel[len(source),](source, target, rounds, source.shape[1], num_warps=32)


def measure(sizes: tuple[int, ...] = SIZES) -> dict[tuple[int, int], float]:
    """Measured slowdown of bfloat16 products on this GPU, by (size, taken)."""
    source = torch.zeros(max(TAKEN), 8192, device=DEVICE)
    target, cache = torch.empty_like(source), torch.empty(CACHE, dtype=torch.uint8, device=DEVICE)
    rounds = int(ROUNDS * HELD / seconds_of(lambda: copy_on(source, target, ROUNDS)))
    beside, found = torch.cuda.Stream(), {}
    for size in sizes:
        a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        for taken in TAKEN:
            times = []
            for _ in range(REPEATS):
                torch.cuda.synchronize()
                if taken:
                    with torch.cuda.stream(beside):
                        copy_on(source[:taken], target[:taken], rounds)
                stop = clock(partial(torch.matmul, a, b), cache)
                torch.cuda.current_stream().synchronize()
                if taken and beside.query():
                    raise AssertionError("the copying has ended before the product")
                times.append(stop())
            found[size, taken] = statistics.median(times)
    return {(size, taken): each / found[size, 0] for (size, taken), each in found.items()}


def contention(quick: bool) -> None:
    """A product beside a collective that takes n multiprocessors: predicted, and measured on a GPU."""
    if DEVICE.type == "cuda" and not HAS_TRITON:
        print(f"  {NO_TRITON}")
    found = measure(SIZES[: 1 if quick else 2]) if DEVICE.type == "cuda" and HAS_TRITON else {}
    rows = []
    for taken in TAKEN:
        cells = [f"{smooth_slowdown(taken):.3f}"]
        for size in SIZES:
            here = found.get((size, taken))
            cells += [f"{slowdown(size, taken):.3f}", "-" if here is None else f"{here:.3f}"]
        rows.append((taken, *cells))
    header = [
        "n taken",
        "without waves",
        *(f"{size:,}, {what}" for size in SIZES for what in ("predicted", "measured")),
    ]
    print_table(f"Time of a product / time alone, {MULTIPROCESSORS} multiprocessors", header, rows)
