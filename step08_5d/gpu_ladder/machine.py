"""What this machine can do, and how a ladder's rungs are checked here and timed on a GPU."""

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from common.drawing.tables import print_table
from common.measure.gpu_time import seconds_of
from step08_5d.kernels.launching import HAS_TRITON

HERE = Path(__file__).parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_TRITON, NO_CUDA_SOURCE, NOT_HERE = "needs Triton", "needs a GPU and nvcc", "on a GPU only"
UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}


class Rung(NamedTuple):
    """One way to compute something.

    run: the function, or a few words that say why it cannot run on this machine.
    share: predicted, the share of the ceiling that it can reach at most; None if we have no prediction.
    """

    name: str
    run: Callable | str
    share: float | None = None


@functools.cache
def cuda_kernels() -> ModuleType | None:
    """Compile the CUDA C++ sources of this folder (a minute the first time). None without a GPU or a compiler."""
    from torch.utils import cpp_extension

    if DEVICE.type != "cuda" or cpp_extension.CUDA_HOME is None:
        return None
    sources = [str(HERE / name) for name in ("binding.cpp", "elu.cu", "matmul.cu")]
    try:
        return cpp_extension.load("gpu_ladder", sources)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(f"  the CUDA C++ sources do not compile here: {str(error).splitlines()[0]}")
        return None


def from_source(name: str) -> Callable | str:
    """The function `name` of the CUDA C++ sources, or why there is none."""
    return getattr(cuda_kernels(), name, NO_CUDA_SOURCE)


def with_triton(function: Callable) -> Callable | str:
    """`function` where Triton is installed, else why it cannot run."""
    return function if HAS_TRITON else NO_TRITON


def missing() -> list[str]:
    """One line for each thing that cannot be done on this machine."""
    lines = []
    if DEVICE.type == "cpu":
        lines.append("no GPU: kernels run on toy sizes, in Triton's interpreter; results are checked, nothing is timed")
    elif cuda_kernels() is None:
        lines.append("no nvcc that works: the rungs in CUDA C++ are left out")
    if not HAS_TRITON:
        lines.append("no Triton (pip install triton, Linux only): its rungs are left out")
    return lines


@functools.cache
def copy_ceiling() -> float:
    """Bytes per second of a large copy on the GPU, reading and writing: nothing that streams can be faster."""
    source = torch.empty(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(target.copy_, source)


def difference(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


def climb(
    title: str,
    rungs: list[Rung],
    inputs: tuple,
    exact: torch.Tensor,
    work: float,
    ceiling: Callable[[], float],
    unit: str = "GB/s",
) -> None:
    """Run each rung on `inputs`, compare its result with `exact`, and on a GPU print its speed.

    Args:
        work: bytes or FLOPs of one call.
        ceiling: returns the highest work per second of this machine; called on a GPU only.
        unit: of the speed, GB/s or TFLOP/s.
    """
    timed, rows, scale = DEVICE.type == "cuda", [], UNITS[unit]
    top = ceiling() if timed else None
    for rung in rungs:
        if isinstance(rung.run, str):
            rows.append((rung.name, rung.run, *["-"] * 4))
            continue
        share, measured = "-" if rung.share is None else f"{rung.share:.0%}", ["-"] * 3
        if timed:
            seconds = seconds_of(rung.run, *inputs)
            speed = work / seconds
            measured = [f"{1e3 * seconds:.3f}", f"{speed / scale:,.0f}", f"{speed / top:.0%}"]
        rows.append((rung.name, f"{difference(rung.run(*inputs), exact):.0e}", share, *measured))
    print_table(title, ("", "difference", "predicted share", "ms", unit, "measured share"), rows)
    if timed:
        print(f"  the ceiling, measured: {top / scale:,.0f} {unit}")
