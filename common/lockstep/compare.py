"""The first tensor, in the order of computation, in which ranks differ from one process."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.lockstep.notes import Note, Place, Seen, Whole

TOLERANCE = 1e-11  # of the largest element of the whole tensor; sums in another order differ by some 1e-15


@dataclass(frozen=True)
class Finding:
    """A tensor that some ranks hold: what it is, and what it should be.

    ranks: those that hold it or, if it is a sum over ranks, those whose summands it has.
    wrong: of each element, whether it is.
    """

    ranks: tuple[int, ...]
    place: Place
    value: np.ndarray
    expected: np.ndarray
    wrong: np.ndarray


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs: of all that is recorded under one key, what is wrong and what is right.

    scale: the largest element of the whole tensor.
    """

    key: tuple[int, str, str]
    scale: float
    wrong: list[Finding]
    right: list[Finding]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold something wrong."""
        return tuple(sorted({rank for each in self.wrong for rank in each.ranks}))

    def close(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Whether two arrays are the same, but for rounding."""
        return a.shape == b.shape and not differs(a, b, self.scale).any()


def differs(value: np.ndarray, expected: np.ndarray, scale: float) -> np.ndarray:
    """Of each element, whether it differs by more than rounding."""
    return ~(np.abs(value - expected) <= TOLERANCE * scale)  # NaN differs


def size_of(whole: np.ndarray) -> float:
    """The largest element; 1 if there is none but zeros."""
    return float(np.abs(whole).max(initial=0)) or 1.0


def by_key(ranks: Sequence[Seen]) -> dict[tuple, list[tuple[int, Note]]]:
    """The notes of all ranks, each with its rank."""
    found: dict[tuple, list[tuple[int, Note]]] = {}
    for seen in ranks:
        for note in seen.notes:
            found.setdefault(note.key, []).append((seen.rank, note))
    return found


def same_place(place: Place) -> tuple[bytes, ...]:
    """Equal for equal places."""
    return tuple(np.asarray(each, np.int64).tobytes() for each in place)


def first_difference(whole: Whole, ranks: Sequence[Seen]) -> tuple[Difference | None, list[tuple]]:
    """Return the first tensor that differs, or None if none does, and the keys of those that are equal until then."""
    notes, equal = by_key(ranks), []
    for key in whole.order:
        scale = size_of(whole.values[key])
        findings = [_finding(whole, scale, *each) for each in _added_up(notes.get(key, []))]
        findings = [each for each in findings if each is not None]
        if wrong := [each for each in findings if each.wrong.any()]:
            return Difference(key, scale, wrong, [each for each in findings if not each.wrong.any()]), equal
        equal += [key] * bool(findings)
    return None, equal


def _finding(whole: Whole, scale: float, ranks: tuple[int, ...], note: Note) -> Finding | None:
    expected = whole.at(note)
    if expected is None:
        return None
    wrong = np.asarray(differs(note.value, expected, scale))
    return Finding(ranks, note.place, note.value, np.asarray(expected), wrong)


def _added_up(notes: list[tuple[int, Note]]) -> list[tuple[tuple[int, ...], Note]]:
    """The same, with the sums of summands in their place."""
    found, summands = [], {}
    for rank, note in notes:
        if note.summand:
            summands.setdefault(same_place(note.place), []).append((rank, note))
        else:
            found.append(((rank,), note))
    for some in summands.values():
        total = some[0][1]._replace(value=sum(note.value for _, note in some))
        found.append((tuple(sorted({rank for rank, _ in some})), total))
    return found
