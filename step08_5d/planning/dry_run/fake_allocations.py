"""Counts the storages of a dry run, and knows which of them are there for communication."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from common.collectives import Call, record
from step05_pipeline.weight_gradients import WeightGradStore
from step08_5d.planning.dry_run.allocations import Allocations


class FakeAllocations(Allocations):
    """Counts fake tensors, and notes the buffers that collectives have filled, those that they are sending, and all
    that a backward needs: what operations have saved for it, and what a split backward has put off to its second half.

    A storage is known by its `id` until it is freed.
    """

    def __init__(self, on_peak):
        super().__init__(on_peak)
        self.filled, self.sending, self.needed = set(), Counter(), set()
        self.launching: list[int] = []  # in the collective that is being launched

    def call(self, function, args: tuple, kwargs: dict):
        if function.namespace == "c10d":
            buffers = [[_key(each) for each in tree_iter(arg) if isinstance(each, torch.Tensor)] for arg in args]
            self.launching += [key for some in buffers for key in some]
            if function is not torch.ops.c10d.send.default:
                self.filled.update(buffers[0])  # all others have their output in front
        if function is torch.ops.aten._grouped_mm.default:  # torch's own idea of its shape is limited to bfloat16
            a, b, ends = args[0], args[1], (*args, kwargs.get("offs"))[2]
            return a.new_empty(len(a), b.shape[-1]) if b.dim() == 3 else a.new_empty(len(ends), len(a), b.shape[-1])
        return super().call(function, args, kwargs)

    @contextmanager
    def record(self) -> Iterator[list[Call]]:
        """Record collectives, as `common.collectives.record` does, and note their buffers and what backwards need.

        Meanwhile Python's collector rests. What it frees depends on when it runs, which all this counting changes.
        """

        def launched(handles: list, *_) -> None:
            self.sending.update(self.launching)
            weakref.finalize(handles[-1], arrived, self.launching)  # a wait lets go of the handle
            self.launching = []

        def arrived(buffers: list[int]) -> None:
            self.sending.subtract(key for key in buffers if key in self.sending)  # or it has been freed

        def put_off(store: WeightGradStore, item: tuple) -> None:
            weight, gradient, x, multiply = item
            list.append(store, (weight, need(gradient), need(x), multiply))

        def need(tensor: torch.Tensor) -> torch.Tensor:
            self.needed.add(_key(tensor))
            return tensor

        WeightGradStore.append, self.launching = put_off, []
        collects = gc.isenabled()
        gc.disable()
        try:
            with record(launched=launched) as calls, saved_tensors_hooks(need, lambda saved: saved):
                yield calls
        finally:
            del WeightGradStore.append
            if collects:
                gc.enable()

    def communication(self, states: set[int]) -> int:
        """Return the bytes in buffers that a collective has filled or is sending, and that no backward needs.

        Args:
            states: storages of parameters, gradients and optimizer state, which are other kinds.
        """
        sending = {key for key, number in self.sending.items() if number > 0}
        return sum(self.sizes[key] for key in (self.filled | sending) - self.needed - states)

    def _freed(self, key: int) -> None:
        super()._freed(key)
        for some in (self.filled, self.needed):
            some.discard(key)
        self.sending.pop(key, None)


def _key(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())
