"""Labs of the kind *predict, then run*: the student answers first, then the command runs and measures.

A wrong answer that some other formula gives is told which one. What was measured is shown for right answers alone, and
the command for all: whoever wants to know can run it.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.compare import Record
from common.labs.answers import keep, kept, number, read_answers
from common.labs.find import ROOT
from common.labs.lab import Lab, Verdict
from common.labs.training import Launch, train

SAME = 1e-3  # relative: so near, an answer is taken to come from a formula


class Question(NamedTuple):
    """One number to predict."""

    name: str
    ask: str  # with the unit
    tolerance: float  # relative, of the measured value
    expected: float  # what the right formula gives: the tests hold it against what is measured
    how: str  # the right formula, with what to remember
    mistakes: dict[str, float]  # what a wrong formula forgets or counts twice -> what it gives


class Experiment(NamedTuple):
    """What a student number gets: questions, and the trainings that answer them."""

    given: str  # the setting in words and numbers
    questions: tuple[Question, ...]
    trainings: tuple[Launch, ...]
    measure: Callable[[list[Record]], tuple[float, ...]]  # the trainings' records -> one value for each question
    root: Callable[[Path, int], Path] = lambda folder, index: ROOT  # (an empty folder, training) -> whose code runs


@dataclass(frozen=True)
class Predict(Lab):
    """`experiment(student)` says what this student is asked."""

    experiment: Callable[[int], Experiment]
    base: str  # flags of all trainings

    def start(self, folder: Path, student: int) -> None:
        asked = self.experiment(student)
        lines = [f"# {line}" for line in asked.given.splitlines()]
        for question in asked.questions:
            lines += ["", *(f"# {line}" for line in question.ask.splitlines())]
            lines += [f"# (to within {question.tolerance:.0%} of what is measured)", f"{question.name} = "]
        (folder / "answer.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def check(self, folder: Path, student: int) -> Verdict:
        asked = self.experiment(student)
        answers = read_answers(folder)
        values = [number(answers, question.name) for question in asked.questions]
        if all(value is None for value in values):
            return Verdict(0.0, ("No answer yet: predict at least one number in answer.toml, then check.",))
        row = {question.name: value for question, value in zip(asked.questions, values)}
        first = next(iter(kept(folder / "stored.jsonl")), None)
        lost = keep(folder / "stored.jsonl", row)  # before anything is measured
        commands = [
            f"  {training.command(f'runs/{self.id}-{index}', self.base)}"
            for index, training in enumerate(asked.trainings)
        ]
        stored = f"Your answer is not stored: {lost}." if lost else "Your answer is stored."
        if first:
            was = ", ".join(f"{name} = {first[name]}" for name in row if first.get(name) is not None) or "none"
            stored += f" What counts as your prediction is the first one: {was}."
        lines, right = [f"{stored} What measures it:", *commands], 0
        for question, value, measured in zip(asked.questions, values, self.measured(asked)):
            passed, line = grade(question, value, measured)
            right += passed
            lines.append(line)
        return Verdict(right / len(values), tuple(lines))

    def measured(self, asked: Experiment) -> tuple[float, ...]:
        """Run what there is to run. Returns a value for each question."""
        with tempfile.TemporaryDirectory(prefix="predict-") as folder:
            roots = [asked.root(Path(folder), index) for index in range(len(asked.trainings))]
            return asked.measure(train(list(zip(asked.trainings, roots)), Path(folder), self.base))

    def solution(self, student: int) -> str:
        asked = self.experiment(student)
        lines = [f"{each.name}: {digits(each.expected)}\n  {each.how}\n" for each in asked.questions]
        return "\n".join([asked.given, "", *lines])


def grade(question: Question, value: float | None, measured: float) -> tuple[bool, str]:
    """Whether the answer is near enough to what was measured, and what to tell the student."""
    if value is None:
        return False, f"{question.name}: no answer yet."
    if abs(value - measured) <= question.tolerance * abs(measured):
        return True, f"{question.name}: right. Measured: {digits(measured)}."
    known = [mistake for mistake, wrong in question.mistakes.items() if abs(value - wrong) <= SAME * abs(wrong)]
    if known:
        return False, f"{question.name}: {digits(value)} is what one gets who {', or who '.join(known)}."
    size = "too large" if abs(value) > abs(measured) else "too small"
    factor = max(abs(value), abs(measured)) / max(min(abs(value), abs(measured)), 1e-300)
    hint = f"by more than {10 ** (len(str(int(factor))) - 1):,} times" if factor >= 10 else "by a factor below 10"
    return False, f"{question.name}: {digits(value)} is {size}, {hint}."


def digits(value: float) -> str:
    """A number as one writes it: 1,732,608, all of it, but 0.0312 s."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
