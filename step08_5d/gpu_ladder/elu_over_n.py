"""ELU over the size of the matrix: why a small kernel is slow, and what of it is the kernel.

A kernel takes a fixed time, to start and to end, and then the time of its bytes. So a speed in GB/s grows with the
size, and its inverse is a straight line in 1/N: two numbers describe the playbook's whole curve.
"""

import numpy as np
import torch

from common.drawing.figures import COLOURS, SERIES, new_figure, save_figure
from common.drawing.tables import print_table
from common.measure.gpu_time import seconds_of
from step08_5d.gpu_ladder import elu
from step08_5d.gpu_ladder.machine import DEVICE

# N: GB/s of eager PyTorch, torch.compile and Triton, read off the figure of the playbook's section "Improving
# performance with kernels" to about 5 GB/s. The number of rows is not given; Triton's tutorials, on which it builds,
# take 4,096.
PUBLISHED = {
    1024: (553, 1278, 1914),
    1536: (519, 1325, 2174),
    2048: (498, 1816, 2347),
    2560: (511, 2200, 2460),
    3072: (519, 2464, 2549),
    4096: (536, 2650, 2656),
    6144: (553, 2756, 2756),
    8192: (562, 2831, 2831),
    12288: (570, 2912, 2912),
    15872: (575, 2937, 2937),
}
NAMES = ("eager", "torch.compile", "Triton")
ROWS, OPERATORS = 4096, 5  # operators of eager ELU: a kernel for each


def fit(curve: dict[int, float]) -> tuple[float, float]:
    """Bytes per second of an endless kernel, and the fixed seconds of a short one, by least squares.

    curve: N and GB/s of a kernel that reads and writes `ROWS` x N numbers once.
    """
    sizes, speeds = np.array([*curve]), 1e9 * np.array([*curve.values()])
    slope, intercept = np.polyfit(1 / sizes, 1 / speeds, 1)
    return 1 / intercept, slope * elu.LEAST * ROWS


def predicted(columns: int, bandwidth: float, fixed: float, eager: bool = False) -> float:
    """GB/s, counting 8 bytes per number; eager PyTorch moves 42 and has five kernels to start."""
    size, launches = ROWS * columns, OPERATORS if eager else 1
    return 1e-9 * elu.LEAST * size / (launches * fixed + (elu.EAGER if eager else elu.LEAST) * size / bandwidth)


def published_seconds(columns: int, name: str) -> float:
    """How long the playbook's call took, if its matrix had `ROWS` rows."""
    return elu.LEAST * ROWS * columns / (1e9 * PUBLISHED[columns][NAMES.index(name)])


def measure(sizes: list[int], rows: int = ROWS) -> dict[int, tuple[float, ...]]:
    """GB/s of eager, compiled and Triton's kernels on this GPU, without the time that the CPU takes to launch them."""
    found, compiled = {}, torch.compile(elu.eager, dynamic=False)
    for columns in sizes:
        x = torch.randn(rows, columns, device=DEVICE)
        seconds = (seconds_of(function, x) for function in (elu.eager, compiled, elu.in_triton))
        found[columns] = tuple(1e-9 * elu.LEAST * x.numel() / each for each in seconds)
    return found


def elu_over_n(quick: bool) -> None:
    """ELU of N columns: the playbook's curve, what bytes and a fixed cost predict, and this GPU's."""
    bandwidth, fixed = fit({n: speeds[2] for n, speeds in PUBLISHED.items()})
    print(f"\n  Triton's published curve: {1e-9 * bandwidth:,.0f} GB/s, {1e6 * fixed:.1f} us for each kernel")
    rows = []
    for n, speeds in PUBLISHED.items():
        ours = [predicted(n, bandwidth, fixed, eager) for eager in (False, True)]
        calls = [f"{1e6 * published_seconds(n, name):.1f}" for name in NAMES[1:]]
        rows.append((f"{n:,}", speeds[2], f"{ours[0]:,.0f}", speeds[1], speeds[0], f"{ours[1]:,.0f}", *calls))
    header = ("N", "Triton", "predicted", "compiled", "eager", "predicted", "compiled, us", "Triton, us")
    print_table("GB/s, published and predicted; last, the time of a call with 4,096 rows", header, rows)
    found = measure([*PUBLISHED][:: 3 if quick else 1]) if DEVICE.type == "cuda" else {}
    if found:
        cells = [(f"{n:,}", *(f"{speed:,.0f}" for speed in speeds)) for n, speeds in found.items()]
        print_table("GB/s on this GPU, launches hidden", ("N", *NAMES), cells)
    _draw(bandwidth, fixed, found)


def _draw(bandwidth: float, fixed: float, found: dict[int, tuple[float, ...]]) -> None:
    figure, axis = new_figure(width=8, height=4)
    sizes = np.linspace(min(PUBLISHED), max(PUBLISHED), 200)
    for eager in (False, True):
        speeds = [predicted(n, bandwidth, fixed, eager) for n in sizes]
        label = "predicted from both" if eager else f"{1e-9 * bandwidth:,.0f} GB/s and {1e6 * fixed:.1f} us, fitted"
        axis.plot(sizes, speeds, "--" if eager else "-", color=COLOURS["predicted"], label=label)
    for index, name in enumerate(NAMES):
        published = [speeds[index] for speeds in PUBLISHED.values()]
        axis.plot([*PUBLISHED], published, "o", color=SERIES[index], label=f"{name}, published")
        if found:
            axis.plot(
                [*found], [each[index] for each in found.values()], "x", color=SERIES[index], label=f"{name}, here"
            )
    axis.set(xlabel="columns N of the matrix", ylabel="GB/s, at 8 bytes per number", ylim=(0, None))
    axis.legend(loc="center right")
    save_figure(figure, "elu_over_n")
