"""The memory behind tensors, counted by storage: views of one are counted once."""

from collections.abc import Iterable

import torch


def live_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind `tensors`, each storage once, however many views of it there are."""
    return sum(storages_of(tensors).values())


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes. Storage without memory (meta tensors, released parameters) has address 0."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr()}
