"""Constant factors between two runs: which number of the layout they are, and which known mistake makes them.

A mean where there should be a sum, or a sum where there should be a mean, leaves a factor that is a number of the
layout, exactly. Squares that are counted several times leave its square root.
"""

import math
from dataclasses import dataclass

MOST = 64  # the largest number that is tried where no run record says which numbers there are
SUMS = {  # gradients are n times too large, or n times too small
    "micro-batches": (
        "each micro-batch's loss is the mean of its own tokens, and their gradients are added up: divide each loss by "
        "the target tokens of the whole step",
        "the loss is divided by the number of micro-batches twice: once in its mean, and once more before the backward",
    ),
    "dp": (
        "each rank's loss is the mean of its own tokens, and gradients are summed over dp instead of averaged",
        "each rank's loss is a share of the global mean already, and gradients are averaged over dp once more",
    ),
    "cp": (
        "each rank's loss is the mean of its part of the sequence, and gradients are summed over cp",
        "each rank's loss is a share already, and gradients are averaged over cp as if it were dp",
    ),
    "tp": (
        "all ranks of tp hold the same loss, and a backward adds up the gradients of all of them",
        "the loss is averaged over tp, whose ranks all hold the same one",
    ),
    "dp x cp": (
        "each rank's loss is the mean of its own tokens, and gradients are summed over dp and cp",
        "each rank's loss is a share of the global mean already, and gradients are averaged over dp and cp once more",
    ),
    "pp": ("gradients are summed over stages that do not share them", "the loss is averaged over the stages"),
    "ep": (
        "experts have seen the tokens of all ep ranks, and their gradients are summed over these ranks again",
        "experts' gradients are averaged over ep, whose ranks hold other experts",
    ),
    "replicas": (
        "gradients are divided by the shards alone, and summed over the copies of the model",
        "gradients are averaged over the copies of the model, though each loss is a share",
    ),
}
COUNTED = "each rank counts what other ranks hold a copy of, so the squares of the norm are added up {n} times"
PARTLY = "only one of {n} parts is counted: the squares of the norm are not summed over the ranks"
UNNAMED = (
    "a mean in place of a sum, or a sum in place of a mean, over micro-batches or over the ranks of a group. Which "
    "number of your layout is it?"
)


@dataclass(frozen=True)
class Factor:
    """`ratio` is n, 1/n, sqrt(n) or 1/sqrt(n), which `spelled` says; `names` are those of n in the layout."""

    ratio: float
    n: int
    root: bool
    inverse: bool
    names: tuple[str, ...]

    @property
    def spelled(self) -> str:
        n = f"√{self.n}" if self.root else f"{self.n}"
        return f"1/{n}" if self.inverse else n

    def mistakes(self) -> list[str]:
        """What is known to make a gradient norm differ by this factor."""
        if self.root:
            return [(PARTLY if self.inverse else COUNTED).format(n=self.n)]
        known = [f"{name}: {SUMS[name][self.inverse]}" for name in self.names if name in SUMS]
        return known or [UNNAMED]


def numbers_of(*configs: dict) -> dict[str, int]:
    """The numbers of a layout by name: degrees, and micro-batches per step. Of several runs, the larger ones."""
    found: dict[str, int] = {}
    for config in configs:
        mine = {name: config.get(name) for name in ("dp", "tp", "pp", "cp", "ep")}
        mine |= {"replicas": config.get("zero_replicas"), "world": config.get("world_size")}
        mine["dp x cp"] = (mine["dp"] or 1) * (mine["cp"] or 1) if mine["cp"] else None
        batch, micro = config.get("global_batch"), config.get("micro_batch")
        if batch and micro:
            mine["micro-batches"] = batch // (micro * (config.get("dp") or 1))
        for name, size in mine.items():
            if isinstance(size, int) and size > 1:
                found[name] = max(size, found.get(name, 1))
    return found


def factor_of(ratio: float, tolerance: float, numbers: dict[str, int]) -> Factor | None:
    """The factor that a ratio is, to within a relative tolerance; those of the layout come first. None if it is none.

    Where no layout is known, any whole number up to `MOST`, and the roots of small ones, are taken for one.
    """
    if not (math.isfinite(ratio) and ratio > 0):
        return None
    known = sorted(set(numbers.values()) | {2})
    for candidates in [known] if numbers else [known, range(2, MOST + 1)]:
        for root in (False, True):
            for n in candidates:
                if root and (n > 16 or math.isqrt(n) ** 2 == n and math.isqrt(n) in candidates):
                    continue  # √4 is 2
                for inverse in (False, True):
                    value = (math.sqrt(n) if root else n) ** (-1 if inverse else 1)
                    if abs(ratio / value - 1) <= tolerance:
                        names = tuple(name for name, size in numbers.items() if size == n)
                        return Factor(value, n, root, inverse, names)
    return None
