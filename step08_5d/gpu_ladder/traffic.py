"""Memory traffic, counted without a GPU: bytes of PyTorch's operators, and sectors that the lanes of a warp touch.

A GPU moves memory in sectors of 32 bytes. The 32 threads ("lanes") of a warp execute a load together, and the hardware
fetches each sector that any of them needs, once. So a load costs between 1 sector (all lanes read the same number) and
32 (each reads a number in a sector of its own).
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SECTOR, LANES = 32, 32  # bytes of a sector, threads of a warp


class BytesMoved(TorchDispatchMode):
    """Adds up the bytes that each operator reads and writes: its inputs, each of them once, and its outputs.

    That is what eager PyTorch moves to and from a GPU's memory, if nothing stays in a cache between two operators.
    """

    def __init__(self):
        super().__init__()
        self.calls = []  # (name of the operator, bytes), in order

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not (function.is_view or name.startswith(("empty", "detach", "_unsafe_view"))):
            sources = args[1:] if name == "copy_" else (args, kwargs)  # what it writes to, it does not read
            read = {id(item): item for item in tree_leaves(sources) if isinstance(item, torch.Tensor)}
            written = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
            self.calls.append((name, sum(item.nbytes for item in [*read.values(), *written])))
        return result

    @property
    def total(self) -> int:
        return sum(count for _, count in self.calls)


def sectors(addresses: np.ndarray) -> int:
    """How many sectors a warp touches. `addresses`: in bytes, of the active lanes."""
    return len(np.unique(addresses // SECTOR))


class KernelTraffic:
    """What the loads and stores of Triton kernels have touched: numbers, their bytes, and sectors."""

    def __init__(self):
        self.numbers = self.bytes = self.sectors = 0

    def add(self, pointers, mask) -> None:
        """Count a load or store. Its elements are given to lanes in row-major order, 32 to each warp."""
        addresses, active = pointers.data.reshape(-1).astype(np.int64), mask.data.reshape(-1).astype(bool)
        self.numbers += int(active.sum())
        self.bytes += int(active.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        for first in range(0, len(addresses), LANES):
            warp = slice(first, first + LANES)
            self.sectors += sectors(addresses[warp][active[warp]])


@contextlib.contextmanager
def kernel_traffic() -> Iterator[KernelTraffic]:
    """Watch all kernels that Triton's interpreter runs in this block."""
    from triton.runtime.interpreter import InterpreterBuilder

    counted, load, store = (
        KernelTraffic(),
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def counted_load(self, pointers, mask, *rest):
        counted.add(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self, pointers, value, mask, *rest):
        counted.add(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counted_store),
    ):
        yield counted
