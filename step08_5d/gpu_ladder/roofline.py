"""The roofline: an operation is limited by bytes or by arithmetic, and its arithmetic intensity says by which.

Arithmetic intensity is FLOPs per byte moved. With I of them, a GPU of P FLOP/s and W bytes/s reaches at most min(P, I *
W). Everything here is predicted, from formulas and from NVIDIA's data sheets.
"""

from typing import NamedTuple

from common.costs.hardware import MEMORY_BANDWIDTH, vendor_tflops
from common.drawing.figures import COLOURS, SERIES, new_figure, save_figure
from common.drawing.tables import print_table

PALE = {
    "facecolor": "white",
    "edgecolor": "none",
    "alpha": 0.7,
    "pad": 0.5,
}  # behind names, so that lines do not cross them


class Operation(NamedTuple):
    """FLOPs and bytes of one call, or of one element. `label`: where the figure puts the name, seen from the dot."""

    name: str
    flops: float
    bytes: float
    label: str = "below right"

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


def product(m: int, n: int, k: int, itemsize: int = 2) -> tuple[int, int]:
    """FLOPs and bytes of a matrix product, each matrix read or written once: `itemsize` bytes in, bfloat16 out."""
    return 2 * m * n * k, itemsize * (m * k + k * n) + 2 * m * n


def attention(tokens: int, width: int, matrices: int, itemsize: int = 2) -> tuple[float, float]:
    """FLOPs and bytes of a head's causal attention, forward; `matrices`: how often scores are written or read.

    Without them only the half below the diagonal is computed; q, k, v and the output are moved once.
    """
    flops = 4 * tokens * tokens * width / (1 if matrices else 2)
    return flops, itemsize * (4 * tokens * width + matrices * tokens * tokens)


OPERATIONS = (
    Operation("AdamW", 15, 28),  # of one parameter: read gradient, weight and two moments in float32, write three
    Operation("ELU", 3, 4, "above left"),
    Operation("RMSNorm", 4, 4, "above left"),
    Operation("decoding: 1 token x 4096 x 4096", *product(1, 4096, 4096)),
    Operation("naive attention, 4,096 tokens", *attention(4096, 128, matrices=6), "above left"),
    Operation("matmul 256 x 4096 x 4096", *product(256, 4096, 4096)),
    Operation("matmul 4096 x 4096 x 4096", *product(4096, 4096, 4096), "above right"),
    Operation("flash attention, 4,096 tokens", *attention(4096, 128, matrices=0), "above left"),
)


# FP8 in, bfloat16 out. Twice the FLOPs in a byte, but also twice the FLOPs per second: its ridge is twice as far
IN_FP8 = (
    Operation("FP8: matmul 256 x 4096 x 4096", *product(256, 4096, 4096, itemsize=1)),
    Operation("FP8: matmul 4096 x 4096 x 4096", *product(4096, 4096, 4096, itemsize=1)),
)


def peak_flops(gpu: str, kind: str = "bfloat16") -> float:
    """The vendor's FLOP/s, dense."""
    return 1e12 * vendor_tflops(gpu, kind)


def reachable(operation: Operation, gpu: str, kind: str = "bfloat16") -> float:
    """FLOP/s that the operation reaches at most."""
    return min(peak_flops(gpu, kind), operation.intensity * MEMORY_BANDWIDTH[gpu])


def roofline(quick: bool) -> None:
    """Which operations wait for memory and which for arithmetic, on H100 and H200: predicted."""
    rows = []
    for operation in OPERATIONS:
        shares = [f"{reachable(operation, gpu) / peak_flops(gpu):.1%}" for gpu in MEMORY_BANDWIDTH]
        rows.append((operation.name, f"{operation.intensity:,.1f}", *shares))
    for operation in IN_FP8:  # as a share of the same peak: beyond 100 % is what low precision gains
        shares = [f"{reachable(operation, gpu, 'float8') / peak_flops(gpu):.1%}" for gpu in MEMORY_BANDWIDTH]
        rows.append((operation.name, f"{operation.intensity:,.1f}", *shares))
    print_table("Share of the bfloat16 peak at most, predicted", ("", "FLOPs per byte", *MEMORY_BANDWIDTH), rows)
    for kind in ("bfloat16", "float8"):
        ridges = ", ".join(f"{gpu} {peak_flops(gpu, kind) / MEMORY_BANDWIDTH[gpu]:.0f}" for gpu in MEMORY_BANDWIDTH)
        print(f"  FLOPs per byte from which arithmetic is the limit, {kind}: {ridges}")
    _draw()


def _draw() -> None:
    figure, axis = new_figure(width=9, height=4.8)
    left, right = 0.1, 40_000
    for gpu, style in (("H200", "-"), ("H100", "--")):
        ridge = peak_flops(gpu) / MEMORY_BANDWIDTH[gpu]
        heights = [each / 1e12 for each in (left * MEMORY_BANDWIDTH[gpu], peak_flops(gpu), peak_flops(gpu))]
        label = f"{gpu}: {MEMORY_BANDWIDTH[gpu] / 1e12:g} TB/s, {peak_flops(gpu) / 1e12:.0f} TFLOP/s"
        axis.plot([left, ridge, right], heights, style, color=COLOURS["predicted"], label=label)
    narrow = peak_flops("H200", "float8")
    ends = [peak_flops("H200") / MEMORY_BANDWIDTH["H200"], narrow / MEMORY_BANDWIDTH["H200"], right]
    label = f"H200 in FP8: {narrow / 1e12:.0f} TFLOP/s"
    heights = [peak_flops("H200") / 1e12, narrow / 1e12, narrow / 1e12]
    axis.plot(ends, heights, ":", color=COLOURS["predicted"], label=label)
    for operation in OPERATIONS:
        x, y = operation.intensity, reachable(operation, "H200") / 1e12
        vertical, horizontal = operation.label.split()
        offset = (6 if horizontal == "right" else -6, -5 if vertical == "below" else 5)
        align = {"ha": "left" if horizontal == "right" else "right", "va": "top" if vertical == "below" else "bottom"}
        axis.plot(x, y, "o", color=SERIES[2])
        axis.annotate(operation.name, (x, y), offset, textcoords="offset points", fontsize=9, bbox=PALE, **align)
    axis.set(xscale="log", yscale="log", xlim=(left, right), ylim=(0.5, 4000))
    axis.set(xlabel="arithmetic intensity, FLOPs per byte", ylabel="TFLOP/s at most")
    axis.set_title("predicted, from data sheets and formulas; dots are on the line of the H200", fontsize=10)
    axis.legend(loc="lower right")
    save_figure(figure, "roofline")
