"""Numbers that a student's file has returned, beside those that it should: which differs first, and why."""

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from common.labs.ranks import Case

USUALLY = "What this usually is:"
FEW_DIGITS = 1e-5  # the share of a norm by which what was computed in float32 may err
SIMPLE = 8  # the largest denominator of a factor that says something of one number alone


@dataclass(frozen=True)
class Expected:
    """What one rank should return, and what it returns after known mistakes."""

    values: dict[str, Tensor]  # in the order in which they are computed: the first wrong one is reported
    mistakes: tuple[tuple[str, Tensor | None, str], ...] = ()  # name of a value, what it then is, what the mistake is
    rough: dict[str, float] = field(default_factory=dict)  # a value of few digits -> share of its norm it may err by
    infinite: str = ""  # what makes a value nan or infinite, if no known mistake does

    @classmethod
    def of(
        cls,
        values: dict[str, Tensor],
        mistakes: dict[str, dict | list[dict]],
        rough: dict | None = None,
        infinite: str = "",
    ) -> "Expected":
        """`mistakes`: what the mistake is -> the values that it gives, or several such dicts if there are variants."""
        variants = [(text, wrong if isinstance(wrong, list) else [wrong]) for text, wrong in mistakes.items()]
        known = tuple((*pair, text) for text, each in variants for wrong in each for pair in wrong.items())
        return cls(values, known, rough or {}, infinite)


@dataclass(frozen=True)
class Graded:
    """One case: what each rank should have returned, and what it has."""

    case: Case
    expected: list[Expected]
    found: list[dict[str, Tensor]]

    @property
    def wrong(self) -> tuple[str, int, str] | None:
        """The first value that differs: its name, the rank, and how; None if there is none."""
        for name in self.expected[0].values:
            for rank, (right, values) in enumerate(zip(self.expected, self.found, strict=True)):
                if how := _difference(right.values[name], values.get(name), right.rough.get(name, 0)):
                    return name, rank, how
        return None

    def lines(self, cases: list["Graded"]) -> list[str]:
        """About the first value that differs: on which rank, how, and what it probably comes from; among all cases."""
        name, rank, how = self.wrong
        where = f"`{name}` on rank {rank}" if self.case.ranks > 1 else f"`{name}`"
        return [f"With {self.case}: {where} {how}", *(f"{USUALLY} {text}" for text in self._reasons(name, rank, cases))]

    def _reasons(self, name: str, rank: int, cases: list["Graded"]) -> list[str]:
        """The known mistake that gives just this value, if there is one; of several, what fits the others best."""
        value, wanted, fits = self.found[rank].get(name), self.expected[rank].values[name], Counter()
        for each in cases:
            for right, values in zip(each.expected, each.found):
                for of, wrong, text in right.mistakes:
                    fits[text] -= not alike(values.get(of), wrong)
        known = [
            text
            for of, wrong, text in self.expected[rank].mistakes
            if of == name and alike(value, wrong) and not alike(wanted, wrong)  # it may be none here
        ]
        if known:
            return [max(known, key=fits.get)]
        if not isinstance(value, Tensor) or value.shape != wanted.shape:
            return []
        if not value.any():
            return ["it was never filled."]
        if (infinite := self.expected[rank].infinite) and not value.isfinite().all():
            return [infinite]
        if wanted.dtype == torch.float64 and (value - wanted).norm() < FEW_DIGITS * wanted.norm():
            return [
                "this is nearly right, as if something was computed in float32: stay with the type that you are given."
            ]
        factor = self.factor
        return [] if factor in (None, 1.0) else _about_factor(factor, int(wanted.count_nonzero()), self.case, cases)

    @property
    def factor(self) -> float | None:
        """By which number the first wrong value was multiplied, all of it; 1 if none is wrong, None if by none.

        Numbers of ranks and counts are no sums, so a factor says nothing of them.
        """
        if not self.wrong:
            return 1.0
        name, rank, _ = self.wrong
        found, wanted = self.found[rank].get(name), self.expected[rank].values[name]
        if not isinstance(found, Tensor) or found.shape != wanted.shape or not wanted.any():
            return None
        if not wanted.is_floating_point():
            return None
        place = wanted.abs().argmax()
        factor = (found.flatten()[place] / wanted.flatten()[place]).item()
        return factor if math.isfinite(factor) and alike(found, factor * wanted) else None


def _about_factor(factor: float, numbers: int, case: Case, cases: list[Graded]) -> list[str]:
    """What a factor says, if it is a size of every case, or the same in all that are wrong, or that of many `numbers`.

    Any number is some multiple of another, so of one number alone a factor says nothing, unless it is a simple ratio.
    """
    if abs(factor + 1) < 1e-6:
        return ["all of it has the wrong sign."]
    text = f"all of it is {factor:.4g} times what it should be"
    pairs = [(each.factor, vars(each.case)) for each in cases]

    def is_size(name: str) -> bool:
        return all(
            found and name in size and min(abs(found / size[name] - 1), abs(found * size[name] - 1)) < 1e-6
            for found, size in pairs
        )

    whole = [name for name, size in vars(case).items() if isinstance(size, int) and size > 1 and name != "seed"]
    for name in sorted(whole, key=lambda each: each != "ranks"):
        if is_size(name):
            there = "there are as many ranks" if name == "ranks" else f"{name.replace('_', '-')} has the same number"
            return [f"{text}, and {there}: is a sum or a mean over them taken once too often, or forgotten?"]
    if len(pairs) > 1 and all(found and abs(found / factor - 1) < 1e-6 for found, _ in pairs):
        return [f"{text}, whatever the sizes: is a constant factor missing, or something counted twice?"]
    simple = abs(float(Fraction(factor).limit_denominator(SIMPLE)) / factor - 1) < 1e-6
    return [f"{text}."] if numbers > 1 or simple else []


def _difference(right: Tensor, found: Tensor | None, rough: float) -> str:
    if not isinstance(found, Tensor):
        return f"should be a tensor, and is {found!r}."
    if found.shape != right.shape:
        return f"should have the shape {tuple(right.shape)}, and has {tuple(found.shape)}."
    off = (found.to(right.dtype) - right).abs()
    if rough and off.norm() <= rough * right.norm():
        return ""
    bad = ~(off <= (0.5 * off.max() if rough else 1e-11 + 1e-9 * right.abs()))
    if not bad.any():
        return ""
    place = tuple(bad.nonzero()[0].tolist())
    at = f" at {list(place)}" if place else ""
    return f"differs first{at}: {' instead of '.join(_told_apart(found[place].item(), right[place].item()))}."


def _told_apart(found: float, right: float) -> tuple[str, str]:
    """Both, with as many digits as it takes to see that they are not the same: six, or more."""
    pairs = [(f"{found:.{digits}g}", f"{right:.{digits}g}") for digits in range(6, 18)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


def alike(found: Tensor | None, value: Tensor | None) -> bool:
    """Whether a value is the one that a mistake gives."""
    if found is None or value is None:
        return found is value
    same = isinstance(found, Tensor) and found.shape == value.shape
    return same and torch.allclose(found.to(value.dtype), value, rtol=1e-8, equal_nan=True)
