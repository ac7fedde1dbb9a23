"""The matrix product C = A B in three steps: naive, coalesced, tiled. In Triton here, in CUDA C++ in matmul.cu.

All three do the same 2 M N K operations. They differ in what they ask memory for: see transactions.py.
"""

from collections.abc import Callable

import torch

from common.costs.hardware import vendor_tflops
from common.drawing.figures import COLOURS, SERIES, new_figure, save_figure
from common.drawing.tables import print_comparison
from common.measure.gpu_time import seconds_of
from step08_5d.gpu_ladder.machine import DEVICE, Rung, climb, from_source, with_triton
from step08_5d.gpu_ladder.traffic import LANES, SECTOR, kernel_traffic
from step08_5d.gpu_ladder.transactions import (
    KERNELS,
    ProductShape,
    count,
    excess,
    predicted_excess,
    predicted_loads,
    predicted_sectors,
)
from step08_5d.kernels.launching import HAS_TRITON, ceil_div, tl, triton

# What Nsight Compute said of the playbook's naive kernel: sectors in total, and excessive ones ("Memory coalescing")
PUBLISHED_SECTORS, PUBLISHED_EXCESS = 70_883_737_600, 60_144_222_208
PUBLISHED_HITS = {"naive": 0.991, "coalesced": 0.950}  # of the L1 cache, by the same profiler
PUBLISHED_TILED = 6.6  # TFLOP/s; its warps wait most for the queue of shared memory's pipe ("MIO throttle", about 9.2)
FULL = ProductShape(4096, 4096, 4096)
TOY = ProductShape(32, 32, 32)  # the interpreter takes a millisecond for each turn of a kernel's loop


@triton.jit
def _naive_kernel(a, b, c, M, N, K, LANES: tl.constexpr):
    """One program is one warp, and its lanes are neighbors in a column: each reads from a row of its own."""
    rows = tl.program_id(0) * LANES + tl.arange(0, LANES)
    column = tl.program_id(1)
    inside = rows < M
    total = tl.zeros((LANES,), tl.float32)
    for k in range(K):
        total += tl.load(a + rows * K + k, mask=inside, other=0.0) * tl.load(b + k * N + column)
    tl.store(c + rows * N + column, total, mask=inside)


@triton.jit
def _coalesced_kernel(a, b, c, M, N, K, LANES: tl.constexpr):
    """The same with neighbors in a row: the lanes read numbers that are neighbors in memory."""
    columns = tl.program_id(0) * LANES + tl.arange(0, LANES)
    row = tl.program_id(1)
    inside = columns < N
    total = tl.zeros((LANES,), tl.float32)
    for k in range(K):
        total += tl.load(a + row * K + k) * tl.load(b + k * N + columns, mask=inside, other=0.0)
    tl.store(c + row * N + columns, total, mask=inside)


@triton.jit
def _tiled_kernel(a, b, c, M, N, K, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """One program computes a whole tile of C. Triton keeps the tiles of A and B in shared memory."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, DEPTH):
        depths = start + tl.arange(0, DEPTH)
        inside_a, inside_b = (rows < M)[:, None] & (depths < K), (depths < K)[:, None] & (columns < N)
        a_tile = tl.load(a + rows[:, None] * K + depths, mask=inside_a, other=0.0)
        b_tile = tl.load(b + depths[:, None] * N + columns, mask=inside_b, other=0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")  # no rounding to TF32
    inside = (rows < M)[:, None] & (columns < N)
    tl.store(c + rows[:, None] * N + columns, total.to(c.dtype.element_ty), mask=inside)


def naive(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    _naive_kernel[ceil_div(M, LANES), N](a, b, c, M, N, K, LANES, num_warps=1)
    return c


def coalesced(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    _coalesced_kernel[ceil_div(N, LANES), M](a, b, c, M, N, K, LANES, num_warps=1)
    return c


def tiled(a, b, tile=32, depth=32):
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    grid, warps = (ceil_div(M, tile), ceil_div(N, tile)), max(4, tile * tile // 2048)
    _tiled_kernel[grid](a, b, c, M, N, K, tile, depth, num_warps=warps)
    return c


IN_TRITON = {"naive": naive, "coalesced": coalesced, "tiled": tiled}


def matmul(quick: bool) -> None:
    """A matrix product naive, coalesced and tiled; the sectors of memory that each of them touches."""
    size = FULL if DEVICE.type == "cuda" and not quick else TOY
    # Triton's interpreter takes the bits of a bfloat16 for an integer
    for dtype in (torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16):
        _climb(size, dtype)
    rows, loads = [], []
    for name in KERNELS:
        numbers, counted = count(name, TOY)
        loads.append((name, predicted_loads(name, TOY), numbers))
        rows.append((f"{name}, CUDA C++ by its addresses", predicted_sectors(name, TOY), counted))
        if HAS_TRITON and DEVICE.type == "cpu":
            a, b = torch.zeros(TOY.M, TOY.K), torch.zeros(TOY.K, TOY.N)
            with kernel_traffic() as touched:
                IN_TRITON[name](a, b)
            rows.append((f"{name}, Triton in its interpreter", predicted_sectors(name, TOY), touched.sectors))
    shape = f"{TOY.M} x {TOY.K} times {TOY.K} x {TOY.N}"
    print_comparison(f"Numbers that the threads load, {shape}", "", loads)
    print_comparison(f"Sectors of 32 bytes, {shape}", "", rows)
    excesses = [(name, predicted_excess(name, TOY), excess(name, TOY)) for name in KERNELS]
    print_comparison(f"Of them in excess of what neighbors would need, {shape}", "", excesses)
    profiled = [("in total", predicted_sectors("naive", FULL), PUBLISHED_SECTORS)]
    profiled.append(("in excess", predicted_excess("naive", FULL), PUBLISHED_EXCESS))
    print_comparison("Sectors, naive, 4096 x 4096 x 4096; measured: the playbook's profiler", "", profiled)
    hits = [(name, hit_rate(name), published) for name, published in PUBLISHED_HITS.items()]
    print_comparison("Hit rate of L1, if all miss as often as naive; measured: the same", "", hits, ".1%")
    limit = tiled_limit(vendor_tflops("H100", "float32"))
    print_comparison(
        "TFLOP/s, tiled; predicted: at most; measured: the same", "", [("", limit, PUBLISHED_TILED)], ".1f"
    )
    _draw()


def hit_rate(name: str) -> float:
    """The L1 cache's hit rate for a kernel, if it misses as many sectors as the naive one with its published rate."""
    missed = (1 - PUBLISHED_HITS["naive"]) * predicted_sectors("naive", FULL)
    return 1 - missed / predicted_sectors(name, FULL)


def tiled_limit(peak: float) -> float:
    """FLOP/s at most of `tiled` in matmul.cu, whose threads load two numbers from shared memory per multiply-add.

    In a cycle a multiprocessor answers one warp's load, and could do the multiply-adds of four (CUDA C++ Programming
    Guide: 128 bytes, and 128 float32 operations). So two loads take eight times as long as their multiply-add.
    """
    return peak / (2 * 4)


def _climb(size: ProductShape, dtype: torch.dtype) -> None:
    """The rungs on `size`: all of them in float32; in 16 bits, where GPUs have tensor cores, the tiled one."""
    generator = torch.Generator().manual_seed(0)
    shapes = (size.M, size.K), (size.K, size.N)
    a, b = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    rungs, flops = [], 2 * size.M * size.N * size.K
    if dtype == torch.float32:
        rungs = [Rung(f"{name}, Triton", with_triton(IN_TRITON[name])) for name in ("naive", "coalesced")]
        rungs += [Rung(f"{name}, CUDA C++", from_source(name)) for name in KERNELS]
    for tile in (32, 64, 128)[: 1 if size == TOY else 3]:
        rungs.append(Rung(f"tiles of {tile}, Triton", with_triton(_of_tile(tile))))
    rungs.append(Rung("torch.matmul", torch.matmul, 1.0))
    exact = (a.double() @ b.double()).to(dtype)
    title = f"{size.M} x {size.K} times {size.K} x {size.N} in {str(dtype).removeprefix('torch.')}"
    climb(title, rungs, (a, b), exact, flops, lambda: flops / seconds_of(torch.matmul, a, b), "TFLOP/s")


def _of_tile(tile: int) -> Callable:
    return lambda a, b: tiled(a, b, tile)


def _draw() -> None:
    """What one load of a warp asks for and what it gets, and the sectors of the three kernels."""
    figure, (down, across, bars) = new_figure(1, 3, width=10, height=3.9, width_ratios=(1, 1, 1.15))
    for axis, title, cells in ((down, "naive: a column of A", "column"), (across, "coalesced: a row of B", "row")):
        places = [(12, i) if cells == "column" else (i, 12) for i in range(LANES)]
        for x, y in {(x // 8 * 8, y) for x, y in places}:
            axis.add_patch(_box(x, y, 8, COLOURS["recompute"]))
        for x, y in places:
            axis.add_patch(_box(x, y, 1, COLOURS["backward"]))
        moved = LANES * SECTOR if cells == "column" else 4 * SECTOR
        axis.set(xlim=(0, 32), ylim=(32, 0), aspect="equal", xticks=range(0, 33, 8), yticks=range(0, 33, 8))
        axis.set_title(f"{title}\n128 bytes needed, {moved:,} moved", fontsize=10)
        axis.set_xlabel("numbers that are neighbors in memory")
    down.set_ylabel("rows of the matrix")
    values = [predicted_sectors(name, ProductShape(1024, 1024, 1024)) / 1024**3 * 32 for name in KERNELS]
    bars.bar(list(KERNELS), values, color=SERIES[0])
    for index, value in enumerate(values):
        bars.text(index, value * 1.1, f"{value:.2g}", ha="center")
    bars.set(yscale="log", ylim=(0.1, 100))
    bars.set_title("sectors for each multiply-add\nof a warp (1,024 x 1,024 matrices)", fontsize=10)
    bars.grid(visible=False, axis="x")
    save_figure(figure, "coalescing")


def _box(x: float, y: float, width: float, colour: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, 1, facecolor=colour, edgecolor="white", linewidth=0.5)
