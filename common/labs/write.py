"""Labs of the kind *write*: the student writes marked bodies of one of the project's files.

A check runs the file on ranks and on sizes that the student has not seen. It compares numbers with what one process
computes in float64, then looks at how they were computed: what was sent, kept, and in which order.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UsageError
from common.labs.cut import bodies_of, starter
from common.labs.find import ROOT
from common.labs.lab import Lab, Verdict
from common.labs.ranks import Case, Outcome, run_on_ranks
from common.labs.rules import waits_for_messages
from common.labs.seen import Notes

NUMBERS = 0.75  # of the score; the rest is for the mechanism
USUALLY = "What this usually is:"


@dataclass(frozen=True)
class Expected:
    """What one rank should return, and what it returns after known mistakes."""

    values: dict[str, Tensor]  # in the order in which they are computed: the first wrong one is reported
    mistakes: tuple[tuple[str, Tensor, str], ...] = ()  # name of a value, what it then is, what the mistake is

    @classmethod
    def of(cls, values: dict[str, Tensor], mistakes: dict[str, dict[str, Tensor] | list[dict]]) -> "Expected":
        """`mistakes`: what the mistake is -> the values that it gives, or several such dicts if there are variants."""
        variants = [(text, wrong if isinstance(wrong, list) else [wrong]) for text, wrong in mistakes.items()]
        return cls(values, tuple((*pair, text) for text, each in variants for wrong in each for pair in wrong.items()))


@dataclass(frozen=True, kw_only=True)
class Writing(Lab):
    """A lab whose starter is cut from one of the project's files. Its kinds differ in how they check."""

    moral: str  # what there is to learn from the reference
    source: str  # the file that the starter is cut from, such as "step03_zero/sketch.py"
    bodies: tuple[int, ...]  # which of its marked bodies are to be written, counted from 1
    only: tuple[str, ...] = ()  # names of functions: the starter has no more than these
    hidden: dict[str, str] = field(default_factory=dict)  # functions that run ours, out of sight -> the lab of each

    def start(self, folder: Path, student: int) -> None:
        text = (ROOT / self.source).read_text(encoding="utf-8")
        text = starter(text, self.bodies, self.only, self.hidden, self.source)
        (folder / Path(self.source).name).write_text(text, encoding="utf-8")

    def solution(self, student: int) -> str:
        bodies = bodies_of((ROOT / self.source).read_text(encoding="utf-8"))
        return "\n".join([*(bodies[number - 1] for number in self.bodies), self.moral])

    def written(self, folder: Path) -> Path:
        """The student's file, as an absolute path. Raises UsageError if it is gone."""
        file = folder / Path(self.source).name
        if not file.exists():
            raise UsageError(f"{file} is missing; `python -m common.labs reset {self.id}` makes it anew")
        return file.resolve()


@dataclass(frozen=True, kw_only=True)
class WriteLab(Writing):
    """A check runs the file on ranks."""

    cases: tuple[Case, ...]
    run: Callable[..., dict[str, Tensor]]  # (the student's module, case, rank) -> values, on each rank
    expect: Callable[[Case], list[Expected]]  # by rank, computed in one process
    judge: Callable[[Case, int, Notes], Iterable[str]]  # (case, rank, its notes) -> what is wrong with the mechanism
    errors: Callable[[Case], dict[str, str]] = lambda case: {}  # a part of an error's message -> what it comes from

    def check(self, folder: Path, student: int) -> Verdict:
        file = self.written(folder)
        cases = [type(case)(**vars(case), seed=1000 * student + number) for number, case in enumerate(self.cases)]
        return self.grade(cases, run_on_ranks(self.id, file, cases))

    def grade(self, cases: list[Case], outcome: Outcome) -> Verdict:
        right, feedback, faults = 0, [], {}
        for case, results in zip(cases, outcome.results):
            wrong = _first_wrong_value(case, self.expect(case), [values for values, _ in results])
            right += not wrong
            if wrong and not feedback:
                feedback = wrong
            for rank, (_, notes) in enumerate(results):
                for fault in (*self.judge(case, rank, notes), *waits_for_messages(notes)):
                    faults.setdefault(fault, f"With {case}, rank {rank}: {fault}")
        if outcome.failure:
            known = self.errors(cases[len(outcome.results)]).items()
            reasons = [f"{USUALLY} {text}" for message, text in known if message in outcome.failure]
            feedback += [outcome.failure, *reasons[:1]]
        score = NUMBERS * right / len(cases)
        if right == len(cases) and not faults:
            return Verdict(1.0, ("Numbers and mechanism are right.",))
        if right == len(cases):
            feedback = ["The numbers are right, but not the way to them.", *feedback]
        return Verdict(score, (*feedback, *list(faults.values())[:3]))


def page(module: str, id: str) -> dict:
    """What ID.md, beside the module, says: the fields of a lab that are prose."""
    text = Path(module).with_name(f"{id}.md").read_text(encoding="utf-8")
    head, *parts = re.split(r"^## .*\n+", text, flags=re.MULTILINE)
    title, _, task = head.partition("\n")
    *hints, moral = (part.strip() for part in parts)
    minutes = int(re.search(r"\*(\d+) minutes", task)[1])
    texts = {"title": title.removeprefix("# "), "task": task.strip(), "hints": tuple(hints), "moral": moral}
    return {"id": id, "minutes": minutes} | texts


def _first_wrong_value(case: Case, expected: list[Expected], found: list[dict[str, Tensor]]) -> list[str]:
    """Lines about the first value that differs: on which rank, how, and what it probably comes from."""
    for name in expected[0].values:
        for rank, (right, values) in enumerate(zip(expected, found, strict=True)):
            if line := _difference(right.values[name], values.get(name)):
                where = f"`{name}` on rank {rank}" if case.ranks > 1 else f"`{name}`"
                hints = [f"{USUALLY} {text}" for text in _reasons(name, rank, expected, found, case)]
                return [f"With {case}: {where} {line}", *hints]
    return []


def _difference(right: Tensor, found: Tensor | None) -> str:
    if not isinstance(found, Tensor):
        return f"should be a tensor, and is {found!r}."
    if found.shape != right.shape:
        return f"should have the shape {tuple(right.shape)}, and has {tuple(found.shape)}."
    off = (found.to(right.dtype) - right).abs()
    bad = ~(off <= 1e-11 + 1e-9 * right.abs())
    if not bad.any():
        return ""
    place = tuple(bad.nonzero()[0].tolist())
    at = f" at {list(place)}" if place else ""
    return f"differs first{at}: {found[place].item():.6g} instead of {right[place].item():.6g}."


def _reasons(name: str, rank: int, expected: list[Expected], found: list[dict[str, Tensor]], case: Case) -> list[str]:
    """The known mistake that gives just this value, if there is one; of several, the one that fits the others best."""
    value, wanted, fits = found[rank].get(name), expected[rank].values[name], Counter()
    for right, values in zip(expected, found):
        for of, wrong, text in right.mistakes:
            fits[text] -= not _alike(values.get(of), wrong)
    known = [text for of, wrong, text in expected[rank].mistakes if of == name and _alike(value, wrong)]
    if known:
        return [max(known, key=fits.get)]
    if not isinstance(value, Tensor) or value.shape != wanted.shape:
        return []
    if not value.any():
        return ["it was never filled."]
    for factor in {case.ranks, 1 / case.ranks, 2, 0.5, -1}:
        if factor != 1 and _alike(value, factor * wanted):
            return [f"all of it is {factor:.4g} times what it should be: is a sum or a mean taken once too often?"]
    return []


def _alike(found: Tensor | None, value: Tensor) -> bool:
    same = isinstance(found, Tensor) and found.shape == value.shape
    return same and torch.allclose(found.to(value.dtype), value, rtol=1e-8, equal_nan=True)
