"""Checkpoints that are written while the training goes on."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from common.checkpoints import checkpoint
from common.checkpoints.boxes import SavedBox
from common.process_groups import Mesh, separate


class BackgroundSaves:
    """Saves copies while the training goes on, one checkpoint at a time.

    A save's collectives fall between those of the training, at other moments on every rank. So they have a process
    group of their own, on gloo since what they exchange is on the CPU.
    """

    def __init__(self, mesh: Mesh, timeout: float = 600.0):
        self.mesh = replace(mesh, world=separate(mesh.world, timeout))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future | None = None
        self.copies: list[torch.Tensor] = []  # kept from save to save, since new memory costs more time than the copy

    def save(self, run_dir: str | Path, step: int, held: Iterable[SavedBox], extra: dict, keep: int = 0) -> None:
        """Return when the tensors may change again: the previous save is complete, and this one has its copies.

        Arguments are those of `checkpoint.save`, whose errors the next `wait` raises.
        """
        self.wait()
        owned = [replace(each, tensor=each.tensor.detach()) for each in held if each.owner]
        if [copy.shape for copy in self.copies] != [box.tensor.shape for box in owned]:
            # A GPU writes to pinned memory without the host's help
            self.copies = [torch.empty_like(box.tensor, device="cpu", pin_memory=box.tensor.is_cuda) for box in owned]
        for copy, box in zip(self.copies, owned, strict=True):
            copy.copy_(box.tensor, non_blocking=True)
        if any(copy.is_pinned() for copy in self.copies):
            torch.cuda.current_stream().synchronize()
        owned = [replace(box, tensor=copy) for copy, box in zip(self.copies, owned, strict=True)]
        self.pending = self.thread.submit(checkpoint.save, run_dir, step, owned, extra, self.mesh, keep)

    def wait(self) -> None:
        """Return when the last checkpoint is complete. Raises what went wrong with it, the same on all ranks."""
        if self.pending is not None:
            self.pending.result()
