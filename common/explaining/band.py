"""How far rounding drives two curves apart: a band for each type, measured once (`python -m tests.diagnosis.band`).

The same trainings of small models were run with their sums in another order: other micro-batches, another attention,
other layouts. The largest difference that was seen up to a step, of loss and of gradient norm, is the band there.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

INSIDE, OUTSIDE = 3.0, 10.0  # multiples of the band: up to the one it is rounding, from the other on it is none
FILE = Path(__file__).with_name("band.json")


@dataclass(frozen=True)
class Band:
    """What rounding did in one type.

    largest     by column and step: the largest relative difference of all measured pairs, up to this step
    jump        by column: how many times the largest difference before it a difference was at most
    settled     from the step after so many on. Before it, rounding has had no time to be amplified
    drift       by column: how one-sided the differences of a pair were at most, see `differences.drift`
    """

    dtype: str
    largest: dict[str, list[float]]
    jump: dict[str, float]
    settled: int
    drift: dict[str, float]

    def at(self, key: str, index: int) -> float:
        """The band of a column so many steps after the first one; the last measured one for what comes later."""
        values = self.largest[key]
        return values[min(index, len(values) - 1)]


@functools.cache
def bands() -> dict[str, Band]:
    """The bands of all measured types by name, the narrowest first."""
    return {name: Band(name, **each) for name, each in json.loads(FILE.read_text(encoding="utf-8"))["types"].items()}


@functools.cache
def largest_jump() -> float:
    """How many times all that came before it a difference was at most, in any type."""
    return max(jump for band in bands().values() for jump in band.jump.values())
