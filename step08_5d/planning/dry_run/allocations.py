"""Counts the bytes of all storages that exist, and the operations: of real tensors, or of fake ones without memory."""

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from step01_single_gpu.running.slow_device import count


class Allocations(TorchDispatchMode):
    """In this context, also in backwards, every storage is counted from the operation that makes it until it is freed.

    bytes   of all storages that exist now
    peak    the most that existed at a time
    flops   of matrix products and attention
    number  of operations that compute or copy something

    What has no name of its own in an operation (a buffer inside a kernel) is not seen.

    Args:
        on_peak: called whenever there are more bytes than ever.
    """

    def __init__(self, on_peak: Callable[[], None] = lambda: None):
        super().__init__()
        self.on_peak, self.sizes, self.bytes = on_peak, {}, 0
        self.start_over()

    def start_over(self) -> None:
        """Forget all but the storages that exist."""
        self.peak = self.flops = self.number = 0

    def __enter__(self) -> "Allocations":
        self.resize = torch.UntypedStorage.resize_
        mode, resize = self, self.resize

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)  # no operation, so the mode does not see it: ZeRO's `free` and `fetch`
            mode.see(storage)
            return result

        torch.UntypedStorage.resize_ = resized
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch.UntypedStorage.resize_ = self.resize
        super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = self.call(function, args, kwargs or {})
        self.flops += count(function, args)
        self.number += not function.is_view
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                self.see(each.untyped_storage())
        return result

    def call(self, function, args: tuple, kwargs: dict):
        return function(*args, **kwargs)

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count the storage as large as it is now."""
        key, size = id(storage), storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, self._freed, key).atexit = False
        self.bytes += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        if self.bytes > self.peak:
            self.peak = self.bytes
            self.on_peak()

    def _freed(self, key: int) -> None:
        self.bytes -= self.sizes.pop(key)
