"""Numbers of a model are fitted to measurements, and predictions are judged by how they rank them."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple


def descend(
    start: NamedTuple, names: Iterable[str], error: Callable[[NamedTuple], float], sweeps: int = 5
) -> NamedTuple:
    """Return `start` with these numbers multiplied or divided, one after the other, as long as the error falls."""
    best, factor = error(start), 2.0
    for _ in range(sweeps):
        for name, step in itertools.product(names, (factor, 1 / factor)):
            while (found := error(tried := start._replace(**{name: step * getattr(start, name)}))) < best:
                best, start = found, tried
        factor = math.sqrt(factor)
    return start


def spearman(a: list[float], b: list[float]) -> float:
    """The correlation of the ranks of two lists."""
    return statistics.correlation(*(ranks(each) for each in (a, b)))


def ranks(values: list[float]) -> list[float]:
    """The place of each value among all; equal ones share theirs."""
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered)))}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]


def kendall(a: list[float], b: list[float]) -> float:
    """Kendall's tau: the share of pairs that two lists put into the same order, less that of pairs that they do not."""
    pairs = itertools.combinations(range(len(a)), 2)
    return statistics.mean(math.copysign(1, (a[i] - a[j]) * (b[i] - b[j])) for i, j in pairs)
