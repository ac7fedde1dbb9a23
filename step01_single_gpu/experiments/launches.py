"""How many kernels a step launches, and how often the host waits for the device: on a GPU both can cost more than work.

Counted on the CPU. PyTorch hands every operator to a dispatch mode, which counts those that a GPU would launch kernels
for: not views, which compute nothing, and not allocations. A foreach operator counts as one, although on a GPU it
launches one kernel for every few dozen tensors.
"""

import tempfile
from contextlib import ExitStack
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.experiments.tables import print_table
from step01_single_gpu.experiments.tools import train_in

READS = ("item", "tolist", "__bool__", "__float__")  # of a tensor: on a GPU the host waits for its value
FLAGS = {"layers": 2, "seq_len": 64, "micro_batch": 2, "global_batch": 4, "peak_tflops": 1.0}


class _Launches(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += not (function.is_view or name.startswith(("empty", "new_empty", "_local_scalar")))
        return function(*args, **(kwargs or {}))


def _count(dtype: str, steps: int) -> tuple[int, int]:
    """Launches and reads of a run of train.py."""
    reads = []
    with ExitStack() as stack:
        for name in READS:
            real = getattr(torch.Tensor, name)
            counting = mock.patch.object(torch.Tensor, name, lambda self, real=real: reads.append(0) or real(self))
            stack.enter_context(counting)
        counted = stack.enter_context(_Launches())
        train_in(
            stack.enter_context(tempfile.TemporaryDirectory()), dtype=dtype, data="synthetic", steps=steps, **FLAGS
        )
    return counted.count, len(reads)


def launches(quick: bool) -> None:
    """What one step adds to a run: a run of three steps minus a run of two."""
    rows = []
    for dtype in ("float32", "bfloat16", "float16"):
        (few, fewer_reads), (many, reads) = (_count(dtype, steps) for steps in (2, 3))
        rows.append((dtype, f"{many - few:,}", reads - fewer_reads))
    title = "One step of 2 layers and 2 micro-batches, counted on the CPU"
    print_table(title, ("", "kernels launched", "times that the host waits"), rows)
