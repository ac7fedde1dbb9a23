"""How far one curve is from another, step by step, beside what rounding may do."""

import functools
import math
import statistics
from dataclasses import dataclass

from common.errors import UsageError
from common.explaining.band import INSIDE, Band, largest_jump
from common.explaining.logs import Log

KEYS = "loss", "grad_norm"


@dataclass(frozen=True)
class Differences:
    """One column of two runs, over the steps that both have.

    relative    (b - a) / |a| of each step; infinite if one of them alone is finite
    limits      what rounding may do to it there: the band (and in steps later than those measured, what it may make of
                the largest difference so far), or half a unit of the last digit that was written
    """

    key: str
    steps: list[int]
    a: list[float]
    b: list[float]
    relative: list[float]
    limits: list[float]

    @property
    def name(self) -> str:
        return self.key.replace("grad_norm", "gradient norm")

    @functools.cached_property
    def excess(self) -> list[float]:
        """Each difference as a multiple of its limit."""
        return [abs(each) / limit for each, limit in zip(self.relative, self.limits)]

    def ratio(self, index: int) -> float:
        """The second run's value divided by the first's."""
        return self.b[index] / self.a[index] if self.a[index] else math.nan

    def jumps(self) -> list[float]:
        """Each difference as a multiple of the largest one before it, or of the first limit if that is larger."""
        found, largest = [0.0], max(abs(self.relative[0]), self.limits[0])
        for each in map(abs, self.relative[1:]):
            found.append(each / largest)
            largest = max(each, largest)
        return found


def drift(relative: list[float]) -> float:
    """How one-sided differences are: their mean as a multiple of its standard error (Student's t). Rounding is not."""
    if len(relative) < 8 or not all(map(math.isfinite, relative)) or len(set(relative)) == 1:
        return 0.0
    return statistics.fmean(relative) / statistics.stdev(relative) * math.sqrt(len(relative))


def relative_to(a: float, b: float) -> float:
    """(b - a) / |a|; 0 if both are NaN or the same infinity, infinite if only one of them is finite."""
    if a == b or math.isnan(a) and math.isnan(b):
        return 0.0
    difference = (b - a) / max(abs(a), 1e-300)
    return difference if math.isfinite(difference) else math.inf


def differences(a: Log, b: Log, band: Band, shift: int = 0, limit: int | None = None) -> list[Differences]:
    """Those of the loss, and of the gradient norm if both have written it, of steps below `limit`.

    Step k of `a` is compared with step k + shift of `b`. Raises UsageError if the runs have no step in common.
    """
    found, keys = [], [key for key in KEYS if a.values.get(key) and b.values.get(key)]
    steps = set(a.values["loss"]) if limit is None else {step for step in a.values["loss"] if step < limit}
    for key in keys:
        steps &= a.values[key].keys() & {step - shift for step in b.values[key]}
    if not steps:
        spans = " and ".join(f"{min(each.values['loss'])} to {max(each.values['loss'])}" for each in (a, b))
        raise UsageError(f"{a.path} and {b.path} have no step to compare in common: they have {spans}")
    steps = sorted(steps)
    start = steps[0] - updates_before(steps)
    for key in keys:
        first, second = [a.values[key][step] for step in steps], [b.values[key][step + shift] for step in steps]
        written = max(a.resolution(key), b.resolution(key))
        relative, limits, largest = [*map(relative_to, first, second)], [], 0.0
        for step, each in zip(steps, relative):
            limits.append(max(band.at(key, step - start), written))
            if step - start >= len(band.largest[key]):  # it may go on growing, but not faster than was ever measured
                limits[-1] = max(limits[-1], largest_jump() / INSIDE * largest)
            largest = max(largest, abs(each))
        found.append(Differences(key, steps, first, second, relative, limits))
    return found


def updates_before(steps: list[int]) -> int:
    """How many updates were made before the first step that is written: none, or those of the first interval."""
    interval = min((after - before for before, after in zip(steps, steps[1:])), default=1)
    return interval if interval > 1 and steps[0] > 1 else 0


def shift_of(a: Log, b: Log) -> int:
    """By how many steps `b` counts later than `a`: one program's first step is 0, another's is 1, or comes after a
    resume that counts from 0 again.

    Not 0 only if the shifted curve fits a thousand times better, at the first ten steps.
    """

    def distance(shift: int) -> float:
        steps = [step for step in a.values["loss"] if step + shift in b.values["loss"]][:10]
        pairs = [(a.values["loss"][step], b.values["loss"][step + shift]) for step in steps]
        return statistics.median(abs(relative_to(*pair)) for pair in pairs) if len(pairs) > 2 else math.inf

    best = min((-1, 1, min(b.values["loss"]) - min(a.values["loss"])), key=distance)
    return best if distance(best) * 1000 < min(distance(0), 1.0) else 0


def common_wiggle(a: list[float], b: list[float]) -> float | None:
    """How alike the ups and downs of two curves are: the correlation of how far values are from their neighbours' mean.

    They come from the batches: runs that see the same ones wiggle alike (nearly 1), others do not (about 0). None if
    there are fewer than eight steps.
    """
    bends = [[y - (x + z) / 2 for x, y, z in zip(each, each[1:], each[2:])] for each in (a, b)]
    if len(bends[0]) < 6 or not all(map(math.isfinite, [*a, *b])):
        return None
    try:
        return statistics.correlation(*bends)
    except statistics.StatisticsError:  # a curve without any
        return None
