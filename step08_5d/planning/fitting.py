"""Numbers of a model are fitted to measurements, and predictions are judged by how they rank them."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np


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


def nonnegative_least_squares(rows: list[list[float]], targets: list[float], weights: list[float]) -> list[float]:
    """Return the x, none of them negative, with the least sum of weight * (row @ x - target)^2.

    The sum is convex, so any way down leads there: the best value of one x after the other, or 0 if it is negative.
    """
    scale = np.linalg.norm(rows, axis=0)  # columns are as different as FLOPs and seconds
    scale[scale == 0] = 1.0
    a, weighted = np.array(rows) / scale, (np.array(rows) / scale).T * weights
    products, wanted, x = weighted @ a, weighted @ targets, np.zeros(len(scale))
    for _ in range(10_000):
        before = x.copy()
        for j in np.flatnonzero(products.diagonal()):
            x[j] = max(0.0, x[j] + (wanted[j] - products[j] @ x) / products[j, j])
        if abs(x - before).max() <= 1e-12 * abs(x).max():
            break
    return (x / scale).tolist()


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
    return statistics.mean(np.sign((a[i] - a[j]) * (b[i] - b[j])).item() for i, j in pairs)
