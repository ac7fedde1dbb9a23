"""Fusion: an operator that keeps its intermediate results in registers reads its input once and writes its output once.

The example is the softmax over rows. Eager, it is five operators, two of which reduce a row to one number. The fused
kernel gives each row to one program, and the row fits into its registers.
"""

import math

import torch
import torch.nn.functional as F

from common.drawing.figures import COLOURS, SERIES, new_figure, save_figure
from common.drawing.tables import print_comparison
from step08_5d.gpu_ladder import elu
from step08_5d.gpu_ladder.machine import DEVICE, NOT_HERE, Rung, climb, copy_ceiling, with_triton
from step08_5d.gpu_ladder.traffic import BytesMoved, kernel_traffic
from step08_5d.kernels.launching import HAS_TRITON, next_power_of_two, tl, triton, warps_for, wide_type

GELU = 5 * 8 + 4 * 12  # bytes per number of the chain below: five operators with one input, four with two
PALE = SERIES[:6]  # on these, black words can be read


def eager(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def eager_bytes(rows: int, columns: int) -> int:
    """In float32: amax and sum read all, the other three read and write all; and one number per row, four times."""
    return 4 * rows * ((2 + 3 * 2) * columns + 4)


@triton.jit
def _softmax_kernel(x, out, columns, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    row = tl.load(x + start + offsets, mask=inside, other=float("-inf")).to(WIDE)
    e = tl.exp(row - tl.max(row, 0))
    tl.store(out + start + offsets, (e / tl.sum(e, 0)).to(out.dtype.element_ty), mask=inside)


def in_triton(x):
    rows, columns = x.shape
    out, block = torch.empty_like(x), next_power_of_two(columns)
    _softmax_kernel[rows,](x, out, columns, wide_type(x.dtype), block, num_warps=warps_for(block))
    return out


def gelu(x):
    """GELU with tanh (GPT-2's), written out: nine operators."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def fusion(quick: bool) -> None:
    """The softmax of rows, eager and fused; bytes of chains of operators, one by one and fused."""
    rows, columns = (1 << 16, 4096) if DEVICE.type == "cuda" and not quick else (16, 1000)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    least = 8 * x.numel()
    rungs = [
        Rung("eager", eager, least / eager_bytes(rows, columns)),
        Rung("torch.compile", torch.compile(eager) if DEVICE.type == "cuda" else NOT_HERE, 1.0),
        Rung("Triton", with_triton(in_triton), 1.0),
        Rung("F.softmax", lambda x: F.softmax(x, -1), 1.0),
    ]
    exact = F.softmax(x.double(), -1)
    climb(f"Softmax of {rows:,} rows of {columns:,} in float32", rungs, (x,), exact, least, copy_ceiling)
    if DEVICE.type == "cpu":
        _count(x)


def _count(x: torch.Tensor) -> None:
    """Print and draw the bytes per number of three chains."""
    chains = {"ELU": elu.eager, "softmax": eager, "GELU": gelu}
    counted = {}
    for name, chain in chains.items():
        with BytesMoved() as counted[name]:
            chain(x)
    size = x.numel()
    predicted = {"ELU": elu.EAGER, "softmax": eager_bytes(*x.shape) / size, "GELU": GELU}
    compared = [(f"{name}, eager", predicted[name], counted[name].total / size) for name in chains]
    if HAS_TRITON:
        for name, kernel in (("ELU", elu.in_triton), ("softmax", in_triton)):
            with kernel_traffic() as touched:
                kernel(x)
            compared.append((f"{name}, Triton", 8, touched.bytes / size))
    print_comparison("Bytes read and written per number", "", compared, ",.3f")
    _draw({name: [(operator, moved / size) for operator, moved in mode.calls] for name, mode in counted.items()})


def _draw(counted: dict[str, list[tuple[str, float]]]) -> None:
    """A bar per chain, cut into its operators, and below each what a fused kernel moves."""
    figure, axis = new_figure(width=8.5, height=3.4)
    labels = []
    for index, (name, operators) in enumerate(counted.items()):
        left, place = 0.0, 2.4 * index
        for number, (operator, value) in enumerate(operators):
            axis.barh(place, value, left=left, color=PALE[number % len(PALE)], edgecolor="white", height=0.9)
            if value > 3:
                axis.text(left + value / 2, place, operator, ha="center", va="center", fontsize=8)
            left += value
        axis.barh(place + 0.95, 8, color=COLOURS["other"], edgecolor="white", height=0.9)
        axis.text(8.5, place + 0.95, f"fused: 8, predicted {left / 8:.1f} times as fast", va="center", fontsize=9)
        axis.text(left + 0.5, place, f"{left:.0f}", va="center", fontsize=9)
        labels.append((place + 0.45, name))
    axis.set_yticks(*zip(*labels))
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("bytes read and written per number, in float32")
    save_figure(figure, "fusion")
