"""What is noted of one rank while it runs a student's file: `seen.py` takes these notes, and labs judge them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from common.costs.vocabulary import sent


class SeenCall(NamedTuple):
    """One call of a collective, or one message."""

    op: str
    bytes: int  # of the whole: what is summed, or what has been gathered
    members: tuple[int, ...]  # ranks of the group
    line: int  # of the student's file
    products: int  # matrix products that this rank had computed before
    peer: int | None = None  # of a message: the other rank

    @property
    def sent(self) -> float:
        """Bytes that one rank sends in the best algorithm; to nobody else, none."""
        alone = len(self.members) == 1 or self.op in ("receive", "barrier")
        return 0.0 if alone else sent(self.op, self.bytes, len(self.members))

    def __str__(self) -> str:
        to = "" if self.peer is None else f" {'to' if self.op == 'send' else 'from'} rank {self.peer}"
        return f"{self.op} of {self.bytes:,} bytes{to}"


class Held(NamedTuple):
    """A tensor that lived when the memory was fullest."""

    bytes: int
    shape: tuple[int, ...]
    line: int  # of the student's file, that made it; 0: it was given

    def __str__(self) -> str:
        where = f"of line {self.line}" if self.line else "that you were given"
        return f"{self.bytes:,} bytes ({' x '.join(map(str, self.shape)) or 'a number'}) {where}"


@dataclass
class Notes:
    """Of one rank."""

    calls: list[SeenCall] = field(default_factory=list)
    # line and products at each wait; a call that blocks waits itself
    waits: list[tuple[int, int]] = field(default_factory=list)
    products: int = 0  # matrix products; a batched one counts as many as it holds
    peak: int = 0  # the most bytes of tensors made here that lived at the same time
    largest: list[Held] = field(default_factory=list)  # of what lived at the peak, the largest first
    unwaited: list[SeenCall] = field(default_factory=list)  # messages that were never waited for
    changed: list[tuple[str, int]] = field(default_factory=list)  # what the caller still needs; line that wrote into it
    multiplied: int = 0  # pairs of numbers, in all matrix products
    counts: Counter = field(default_factory=Counter)  # what the lab itself counts, by `count`
    allowed: float = 0.0  # how many bytes of memory are enough, once a rule has looked

    def of(self, *ops: str, least: int = 0) -> list[SeenCall]:
        """The calls of these collectives of at least so many bytes."""
        return [call for call in self.calls if call.op in ops and call.bytes >= least]

    @property
    def sent(self) -> float:
        """Bytes that this rank sends in all of them."""
        return sum(call.sent for call in self.calls)
