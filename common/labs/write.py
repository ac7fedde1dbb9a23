"""Labs of the kind *write*: the student writes marked bodies of one of the project's files.

A check runs the file on ranks and on sizes that the student has not seen. It compares numbers with what one process
computes in float64, then looks at how they were computed: what was sent, kept, and in which order.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from common.errors import UsageError
from common.labs import picture
from common.labs.cut import bodies_of, starter
from common.labs.find import ROOT
from common.labs.graded import USUALLY, Expected, Graded
from common.labs.lab import Lab, Verdict
from common.labs.notes import Notes
from common.labs.ranks import Case, Outcome, run_on_ranks
from common.labs.rules import leaves_inputs, waits_for_messages

NUMBERS = 0.75  # of the score; the rest is for the mechanism


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
        outcome = run_on_ranks(self.id, file, cases)
        verdict = self.grade(cases, outcome)
        if verdict.passed or not outcome.results:
            return verdict
        shown = self._to_show(cases, outcome)
        if shown is None:
            return verdict
        notes = [notes for _, notes in outcome.results[cases.index(shown.case)]]
        lines = picture.in_words(shown, notes)
        if picture.draw(shown, notes, folder / picture.NAME):
            lines.append(f"As a picture: {folder / picture.NAME}")
        return replace(verdict, feedback=(*verdict.feedback, *lines))

    def _to_show(self, cases: list[Case], outcome: Outcome) -> Graded | None:
        """The first case with a wrong value, else the first of whose way there is something to say."""
        graded = self._graded(cases, outcome)
        odd = (
            each
            for each, results in zip(graded, outcome.results)
            if any(self._faults(each.case, rank, notes) for rank, (_, notes) in enumerate(results))
        )
        return next((each for each in graded if each.wrong), next(odd, None))

    def _graded(self, cases: list[Case], outcome: Outcome) -> list[Graded]:
        pairs = zip(cases, outcome.results)
        return [Graded(case, self.expect(case), [values for values, _ in results]) for case, results in pairs]

    def _faults(self, case: Case, rank: int, notes: Notes) -> list[str]:
        return [*leaves_inputs(notes), *self.judge(case, rank, notes), *waits_for_messages(notes)]

    def grade(self, cases: list[Case], outcome: Outcome) -> Verdict:
        """The verdict on what ranks returned, and what they did."""
        faults, graded = {}, self._graded(cases, outcome)
        for case, results in zip(cases, outcome.results):
            for rank, (_, notes) in enumerate(results):
                for fault in self._faults(case, rank, notes):
                    kind = re.sub(r"\d[\d,]*", "#", fault)  # the same in other sizes need not be said again
                    faults.setdefault(kind, f"With {case}, rank {rank}: {fault}")
        right = sum(not each.wrong for each in graded)
        first = next((each for each in graded if each.wrong), None)
        feedback = first.lines(graded) if first else []
        if outcome.failure:
            known = self.errors(cases[len(outcome.results)]).items()
            reasons = [f"{USUALLY} {text}" for message, text in known if message in outcome.failure]
            failed = [outcome.failure, *reasons[:1]]
            feedback += failed if not outcome.too_busy else []
        score = NUMBERS * right / len(cases)
        if right == len(cases) and not faults:
            return Verdict(1.0, ("Numbers and mechanism are right.",))
        if right == len(cases):
            feedback = ["The numbers are right, but not the way to them.", *feedback]
        certain = (*feedback, *list(faults.values())[:3])
        told = certain if not outcome.failure or outcome.failure in certain else (*certain, *failed)
        return Verdict(score, told, outcome.too_busy, unjudged=not outcome.results)


def page(module: str, id: str) -> dict:
    """What ID.md, beside the module, says: the fields of a lab that are prose."""
    text = Path(module).with_name(f"{id}.md").read_text(encoding="utf-8")
    head, *parts = re.split(r"^## .*\n+", text, flags=re.MULTILINE)
    title, _, task = head.partition("\n")
    *hints, moral = (part.strip() for part in parts)
    minutes = int(re.search(r"\*(\d+) minutes", task)[1])
    texts = {"title": title.removeprefix("# "), "task": task.strip(), "hints": tuple(hints), "moral": moral}
    return {"id": id, "minutes": minutes} | texts
