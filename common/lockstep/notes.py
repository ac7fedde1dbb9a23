"""What a run leaves behind to be compared: tensors by name, each with its place in the whole.

A place has an array of indices for every axis: which samples, which positions of the sequence, which features. With
context parallelism and zigzag, a rank may hold the positions 0, 1, 6 and 7 of eight, which are no slice.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Place = tuple[np.ndarray, ...]

WORDS = {  # what is recorded of a step, in no order: `Note.phase`
    "forward": "the value of {}",
    "backward": "the gradient of {}",
    "own": "the ranks' own gradients of {}, added up",
    "gradient": "the summed gradient of {}",
    "number": "the number {}",
    "update": "{} after the update",
}
AFTERWARDS = ("gradient", "number", "update")  # follow the last backward; "own" gradients come along with it


class Note(NamedTuple):
    """One tensor of one micro-batch, or one weight.

    phase: one of WORDS; or first or last, which are of a rank's own gradients those of its first or last micro-batch.
    place: where its elements are in the tensor of a run in one process.
    value: in float64, or int64 for tokens.
    summand: only the sum over all ranks with the same place is what one process has.
    total: a single number, which is the sum over all elements of the place.
    """

    step: int
    phase: str
    name: str
    place: Place
    value: np.ndarray
    summand: bool = False
    total: bool = False

    @property
    def key(self) -> tuple[int, str, str]:
        """What this is, on whichever rank."""
        return self.step, self.phase, self.name


@dataclass
class Seen:
    """All that a rank has recorded.

    coordinates: its place in the mesh, such as {"dp": 0, "tp": 1}; dimensions of size 1 may be left out.
    groups: the ranks of each of its groups, by name.
    counts: other numbers that a wrong factor may come from, such as the number of micro-batches.
    """

    rank: int = 0
    coordinates: dict[str, int] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)


class Whole:
    """The tensors of a run in one process, put together from its micro-batches.

    `order` lists their keys in the order of computation: what follows the last backward comes last.
    """

    def __init__(self, notes: Iterable[Note]):
        parts: dict[tuple, list[Note]] = {}
        for note in notes:
            if note.phase in WORDS and not note.total:
                parts.setdefault(note.key, []).append(note)
        self.values = {key: _joined(some) for key, some in parts.items()}
        place = {key: index for index, key in enumerate(parts)}
        phases = {phase: 1 + index for index, phase in enumerate(AFTERWARDS)}
        self.order = sorted(parts, key=lambda key: (key[0], phases.get(key[1], 0), place[key]))

    def at(self, note: Note) -> np.ndarray | None:
        """Return what a note should hold; None if this run has no such tensor, or a smaller one."""
        whole = self.values.get(note.key)
        if whole is None or len(note.place) != whole.ndim:
            return None
        if any(len(indices) and indices.max() >= size for indices, size in zip(note.place, whole.shape, strict=True)):
            return None
        found = whole[np.ix_(*note.place)]
        return found.sum() if note.total else found


def _joined(notes: list[Note]) -> np.ndarray:
    """One array of notes that are beside each other. Where several have one place, they are equal."""
    axes = range(len(notes[0].place))
    shape = [1 + max(int(each.place[axis].max(initial=-1)) for each in notes) for axis in axes]
    whole = np.zeros(shape, notes[0].value.dtype)
    for each in notes:
        whole[np.ix_(*each.place)] = each.value
    return whole
