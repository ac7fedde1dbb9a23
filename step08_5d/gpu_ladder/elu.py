"""Rungs 1 to 4, one kernel four ways: ELU(x) = x where x >= 0, and alpha (exp(x) - 1) elsewhere.

There is nothing to compute but an exponential, so time is bytes. A number is read once and written once at least: 8
bytes in float32. Eager PyTorch runs five operators, each of which reads and writes whole tensors: 42 bytes.
"""

import torch
import torch.nn.functional as F

from common.drawing.tables import print_comparison
from step08_5d.gpu_ladder.machine import DEVICE, NOT_HERE, Rung, climb, copy_ceiling, from_source, with_triton
from step08_5d.gpu_ladder.traffic import BytesMoved, kernel_traffic
from step08_5d.kernels.launching import HAS_TRITON, ceil_div, tl, triton, warps_for, wide_type

ALPHA = 1.5  # not 1, so that a kernel that forgets it fails
LEAST, EAGER = 8, 42  # bytes per element in float32; 42 = 5 (x < 0) + 3 * 8 (exp, - 1, * alpha) + 13 (where)


def eager(x, alpha=ALPHA):
    return torch.where(x < 0, alpha * (torch.exp(x) - 1), x)


@triton.jit
def _elu_kernel(x, out, size, alpha, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    value = tl.load(x + offsets, mask=inside, other=0.0).to(WIDE)
    value = tl.where(value < 0, alpha * (tl.exp(value) - 1), value)
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)


def in_triton(x, alpha=ALPHA, block=1024):
    out = torch.empty_like(x)
    _elu_kernel[ceil_div(x.numel(), block),](
        x, out, x.numel(), alpha, wide_type(x.dtype), block, num_warps=warps_for(block)
    )
    return out


def in_cuda(x, alpha=ALPHA):
    return from_source("elu")(x, alpha)


def elu(quick: bool) -> None:
    """ELU eager, compiled, in Triton and in CUDA C++; bytes that the first and the third move."""
    size = 1 << (28 if DEVICE.type == "cuda" and not quick else 14)
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    cuda = from_source("elu")
    rungs = [
        Rung("eager", eager, LEAST / EAGER),
        Rung("torch.compile", torch.compile(eager) if DEVICE.type == "cuda" else NOT_HERE, 1.0),
        Rung("Triton", with_triton(in_triton), 1.0),
        Rung("CUDA C++", cuda if isinstance(cuda, str) else in_cuda, 1.0),
        Rung("F.elu", lambda x: F.elu(x, ALPHA), 1.0),
    ]
    exact = F.elu(x.double(), ALPHA)
    climb(f"ELU of {size:,} numbers in float32", rungs, (x,), exact, LEAST * size, copy_ceiling)
    if DEVICE.type == "cuda":
        return
    with BytesMoved() as counted:
        eager(x)
    rows = [("eager, by operator", EAGER, counted.total / size)]
    if HAS_TRITON:
        with kernel_traffic() as touched:
            in_triton(x)
        rows.append(("Triton, by load and store", LEAST, touched.bytes / size))
    print_comparison("Bytes read and written per number", "", rows)
