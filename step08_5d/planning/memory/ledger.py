"""A ledger of the tensors that a rank holds in a backward: every event makes some, and releases others.

What lives through a step (weights, optimizer state, sums of gradients) is not in it. What is, exists for a moment:
what the forward has kept, gradients of activations, a weight's gradient until it has been added to the sums, copies in
float32, and what messages fill. `python -m step08_5d.planning memory --layer` prints the ledger of a layer.
"""

from collections.abc import Collection
from functools import cached_property
from typing import NamedTuple

Tensors = dict[str, float]  # bytes by name


class LedgerEntry(NamedTuple):
    """An event, and what is held while it lasts. Sizes in bytes."""

    name: str
    made: Tensors
    released: Tensors  # when it is over
    left: Tensors  # results that then take the place of what is released
    held: float  # of all tensors, beyond those that were there when the ledger began
    communication: float  # of all tensors: of those that a collective has filled or is sending
    stored: int  # parameters whose gradients have been added to the sums, or are just being added


class Linear(NamedTuple):
    """A matrix of a rank; sizes in bytes."""

    name: str
    inner: float  # its side within the sublayer: what columns put out, what rows take in
    weight: float

    @property
    def gradient(self) -> str:
        return f"gradient of {self.name}.weight"


class Deferred(NamedTuple):
    """The gradient of a matrix that is put off to the second half of a backward; sizes in bytes."""

    name: str
    weight: float  # of that gradient
    operands: Tensors  # which are kept for it, and released with it


class Ledger:
    """The tensors of a rank, from event to event.

    Args:
        tensors: those that are there in the beginning.
        splits: whether the backward comes in halves. Then gradients of matrices wait for the second one, and what they
            will be computed from is not released.
        in_buffers: which of the tensors a collective has filled.
    """

    def __init__(self, tensors: Tensors, splits: bool = False, in_buffers: Collection[str] = ()):
        self.begins_with, self.tensors, self.splits, self.in_buffers = tensors, dict(tensors), splits, set(in_buffers)
        self.held, self.stored = 0.0, 0
        self.entries: list[LedgerEntry] = []
        self.deferred: list[Deferred] = []
        self.put_off_tensors: set[str] = set()

    def event(
        self,
        name: str,
        makes: Tensors | None = None,
        releases: Collection[str] = (),
        *,
        buffers: Collection[str] = (),
        filled: Collection[str] = (),
        leaves: Tensors | None = None,
    ) -> None:
        """Enter an event.

        Args:
            makes: tensors that are new. releases: those that nobody needs any more when it is over.
            buffers: tensors that a collective has filled, or is sending, while the most is held.
            filled: tensors that are made before a collective fills them: they are buffers afterwards.
            leaves: results that take the place of what is released.

        Raises ValueError if a tensor is made twice, or released and not there.
        """
        makes = makes or {}
        self._make(makes)
        self.in_buffers.update(buffers)
        communication = sum(self.tensors[each] for each in self.in_buffers) if self.in_buffers else 0.0
        held = self.held
        released = self.release([each for each in releases if each not in self.put_off_tensors])
        self.entries.append(LedgerEntry(name, makes, released, leaves or {}, held, communication, self.stored))
        self._make(leaves or {})
        self.in_buffers.update(filled)

    def linear(
        self, event: str, layer: Linear, makes: Tensors, operands: Collection[str], shared: Collection[str] = ()
    ) -> None:
        """Enter the backward of a matrix: the gradient of its input, and of its weight if that is not put off.

        Args:
            operands: of the weight's gradient, which nobody else needs. shared: those that others need later.
        """
        if self.splits:
            self.event(event, makes)
            self.put_off(layer, (*operands, *shared))
        else:
            self.event(event, makes | {layer.gradient: layer.weight}, operands)

    def add_up(self, event: str, layers: Collection[Linear], releases: bool = True) -> None:
        """Enter that gradients of weights are added to the sums, if they have not been put off."""
        if not self.splits:
            self.store(len(layers))
            self.event(f"{event}, added up", releases=[each.gradient for each in layers] if releases else ())

    def store(self, number: int = 1) -> None:
        """Note that the gradients of so many more parameters are in the sums."""
        self.stored += number

    def put_off(self, layer: Linear, operands: Collection[str]) -> None:
        """Keep what the gradient of a weight will be computed from."""
        self.deferred.append(Deferred(layer.name, layer.weight, {each: self.tensors[each] for each in operands}))
        self.put_off_tensors.update(operands)
        self.in_buffers.difference_update(operands)

    @cached_property  # which ends the ledger: nothing may be entered any more
    def fullest(self) -> list[LedgerEntry]:
        """The entry with the most bytes for each number of gradients stored so far, those with most bytes first."""
        result: dict[int, LedgerEntry] = {}
        for each in self.entries:
            if each.stored not in result or each.held > result[each.stored].held:
                result[each.stored] = each
        return sorted(result.values(), key=lambda entry: -entry.held)

    @cached_property
    def rising(self) -> list[LedgerEntry]:
        """Those of `fullest` that can hold most with all gradients that are stored: after each, more are."""
        result: list[LedgerEntry] = []
        for each in self.fullest:
            if not result or each.stored > result[-1].stored:
                result.append(each)
        return result

    @cached_property
    def before(self) -> float:
        """Bytes of what it begins with."""
        return sum(self.begins_with.values())

    def _make(self, tensors: Tensors) -> None:
        if not self.tensors.keys().isdisjoint(tensors):
            raise ValueError(f"made twice: {', '.join(sorted(self.tensors.keys() & tensors.keys()))}")
        self.tensors |= tensors
        self.held += sum(tensors.values())

    def release(self, tensors: Collection[str]) -> Tensors:
        """Take tensors out, and return them. Raises ValueError if one of them is not there."""
        if missing := [each for each in tensors if each not in self.tensors]:
            raise ValueError(f"released, and not there: {', '.join(missing)}")
        self.in_buffers.difference_update(tensors)
        released = {each: self.tensors.pop(each) for each in tensors}
        self.held -= sum(released.values())
        return released
