"""What every kernel of this folder needs before its launch: Triton itself, block sizes, and how wide to compute.

A kernel file imports `triton` and `tl` from here. Without Triton it can still be imported and its plain PyTorch
reference used; only a launch of the kernel fails. Without a GPU, Triton interprets the kernels: slowly, with NumPy, but
line by line as they are written.
"""

import os

import torch

# Triton is told to interpret before anything, also torch's compiler, loads it: some of its own functions are kernels
INTERPRET = "TRITON_INTERPRET"
interprets = not torch.cuda.device_count() and INTERPRET not in os.environ
if interprets:
    os.environ[INTERPRET] = "1"

try:
    import triton
    import triton.language as tl

    if interprets:  # from here on without the variable, which other programs could see
        vars(triton.knobs.runtime)["interpret"] = True
except ImportError:

    class _WithoutTriton:
        """Stands in for the names that a kernel file uses while it is imported, as one class for both modules.

        `triton.jit` is the class itself, so a kernel with this decorator becomes an object that raises when it is
        launched. The other names are annotations, or arguments of a launch that fails: None will do.
        """

        constexpr = float32 = float64 = None

        def __init__(self, kernel):
            self.name = kernel.__name__

        def __getitem__(self, grid):
            raise ImportError(f"{self.name} is a Triton kernel, and Triton is not installed (pip install triton)")

    _WithoutTriton.jit = _WithoutTriton
    triton = tl = _WithoutTriton

finally:
    if interprets:
        del os.environ[INTERPRET]

HAS_TRITON = hasattr(tl, "load")


def wide_type(dtype: torch.dtype):
    """The Triton type to compute in: float64 for float64, else float32 (`common.layers.at_least_float32` in Triton)."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def ceil_div(size: int, part: int) -> int:
    """How many parts of `part` elements cover `size` elements."""
    return -(-size // part)


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`: tl.arange takes no other length."""
    return 1 << max(0, size - 1).bit_length()


def warps_for(elements: int) -> int:
    """Warps (of 32 threads) for a program that handles a block of `elements`: eight elements per thread, 16 bytes in
    bfloat16, which is the widest load of one thread."""
    return min(32, max(4, elements // 256))


def processors(device: torch.device) -> int:
    """The streaming multiprocessors of a GPU. For the interpreter 2, so that work is split there as well."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def capability(device: torch.device) -> int:
    """The compute capability of a GPU: 90 for sm_90. The interpreter is taken for one as well."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor
