"""Where a rank's tensors are in the whole: which samples, which positions, which features.

Written down from what the layouts promise, and not from the code that divides: that may be what is wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from common.config import TrainConfig
from common.lockstep.notes import Place
from common.parameter import ParameterSpec
from common.process_groups import Mesh


@dataclass(frozen=True)
class Tokens:
    """What a rank holds of a global batch.

    rows: the samples; or a function that returns those of a micro-batch, by its number.
    positions: of its tokens in their sequence, in the order in which it holds them; None: samples have no such axis.
    chunks, chunk: with sequence parallelism, some tensors hold only this one of so many equal parts of `positions`.
    adds: whether this rank's own gradient of a parameter is one of the summands, and not the same as another rank's.
    """

    rows: Sequence[int] | Callable[[int], Sequence[int]]
    positions: Sequence[int] | None = None
    chunks: int = 1
    chunk: int = 0
    adds: Callable[[ParameterSpec], bool] = lambda spec: True

    def samples(self, micro_batch: int) -> np.ndarray:
        """The samples of a micro-batch."""
        return np.asarray(self.rows(micro_batch) if callable(self.rows) else self.rows)

    def along(self, length: int) -> np.ndarray | None:
        """The positions that an axis of this length holds; None if it cannot be an axis of tokens."""
        own = np.asarray(self.positions)
        if length == len(own):
            return own
        if self.chunks > 1 and length * self.chunks == len(own):
            return own[self.chunk * length : (self.chunk + 1) * length]
        return None

    def place(self, shape: Sequence[int], micro_batch: int, features: np.ndarray | None = None) -> Place | None:
        """The place of a tensor (samples, tokens, ..., features), by default with all features; None if it has another
        shape.
        """
        rows = self.samples(micro_batch)
        if not shape or shape[0] != len(rows):
            return None
        found = [rows]
        if self.positions is not None:
            if len(shape) < 2 or (tokens := self.along(shape[1])) is None:
                return None
            found.append(tokens)
        found += [np.arange(size) for size in shape[len(found) :]]
        if features is not None:
            if len(features) != shape[-1]:
                return None
            found[-1] = features
        return tuple(found)


def positions_of(split: str, seq_len: int, ranks: int, rank: int) -> np.ndarray:
    """The positions of the tokens that a rank of context parallelism holds: (seq_len / ranks,)."""
    every = np.arange(seq_len)
    if split == "striped":
        return every[rank::ranks]
    if split == "contiguous":
        return np.split(every, ranks)[rank]
    parts = np.split(every, 2 * ranks)  # zigzag: an early part and the late one that mirrors it
    return np.concatenate((parts[rank], parts[2 * ranks - 1 - rank]))


def tokens_of(config: TrainConfig, mesh: Mesh) -> Tokens:
    """What this rank holds under these flags."""

    def rows(micro_batch: int) -> range:
        first = (micro_batch * mesh.dp.size + mesh.dp.rank) * config.micro_batch
        return range(first, first + config.micro_batch)

    def adds(spec: ParameterSpec) -> bool:
        divided = any(high - low < size for (low, high), size in zip(spec.box, spec.global_shape, strict=True))
        of_expert = spec.shard_groups[0].startswith("expert")  # no two ranks have sent it the same tokens
        # These ranks have seen other tokens, or other queries
        other = config.sequence_parallel or "kv_replica" in spec.extra_groups
        return mesh.tp.rank == 0 or divided or of_expert or other

    cut = positions_of(config.cp_split, config.seq_len, mesh.cp.size, mesh.cp.rank) if config.cp > 1 else None
    return Tokens(rows, range(config.seq_len) if cut is None else cut, mesh.tp.size, mesh.tp.rank, adds)


def indices(bounds: tuple[int, int], unit: int = 1) -> np.ndarray:
    """The indices in [start, stop), counted in units: the heads of so many columns, say."""
    return np.arange(bounds[0] // unit, bounds[1] // unit)


def features_of(module: nn.Module) -> np.ndarray | None:
    """Which features of the whole output a layer's output has, by its weight's spec; None: all, or nobody knows."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear | nn.Embedding) or not hasattr(weight, "spec"):
        return None
    return indices(weight.spec.box[1 if isinstance(module, nn.Embedding) else 0])


def boxes(spec: ParameterSpec, tensor: torch.Tensor) -> list[tuple[Place, torch.Tensor]]:
    """The places of a parameter, a shard or a gradient, each with its values; rows that pad are left out."""
    found = []
    for box, part in spec.boxes(tensor):
        bounds = [(low, min(high, size)) for (low, high), size in zip(box, spec.global_shape, strict=True)]
        sizes = [max(0, high - low) for low, high in bounds]
        if all(sizes):
            found.append((tuple(map(indices, bounds)), part[tuple(map(slice, sizes))]))
    return found
