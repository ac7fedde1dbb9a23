"""Labs of the kind *predict, then run*: the student answers first, then the command runs and measures.

A wrong answer that some other formula gives is told which one. What was measured is shown for right answers alone; the
commands are written into the lab's folder, so whoever wants to know can run them, with the changed code where a
training has one.
"""

import difflib
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.compare import Record
from common.labs.answers import PREDICTIONS, keep, kept, number, read_answers, unknown
from common.labs.copies import Edit, copy_project, edited, read
from common.labs.find import ROOT
from common.labs.lab import Lab, Verdict, wrapped
from common.labs.training import Launch, train

SAME = 1e-3  # relative, at least: so near, an answer is taken to come from a formula
WIDTH = 116  # of lines for the student, behind an indent
DISTURBED = "what was measured is disturbed, as on a busy machine. Close what else runs, and check again."
COMMANDS = "commands.sh"  # in a lab's folder, from the first check on


class Question(NamedTuple):
    """One number to predict."""

    name: str
    ask: str  # with the unit
    tolerance: float  # relative, of the measured value
    expected: float  # what the right formula gives: the tests hold it against what is measured
    how: str  # the right formula, with what to remember
    mistakes: dict[str, float]  # what a wrong formula forgets or counts twice -> what it gives
    above: float | None = None  # relative: so much an answer may be above what is measured, if not as much as below

    @property
    def within(self) -> str:
        """How near an answer has to be, in words."""
        if self.above is None:
            return f"to within {100 * self.tolerance:g}% of what is measured"
        room = f"up to {100 * self.tolerance:g}% less than what is measured, and {100 * self.above:g}% more"
        return f"{room}: a busy machine is late, never early"

    def is_right(self, value: float, measured: float) -> bool:
        """Whether an answer is near enough to what was measured."""
        more = (value - measured) / abs(measured) if measured else value
        return -self.tolerance <= more <= (self.tolerance if self.above is None else self.above)

    @property
    def same(self) -> float:
        """Relative: so near, an answer is taken to come from a formula, be it rounded, or without what is small."""
        return max(SAME, self.tolerance / 5)


class Experiment(NamedTuple):
    """What a student number gets: questions, and the trainings that answer them."""

    given: str  # the setting in words and numbers
    questions: tuple[Question, ...]
    trainings: tuple[Launch, ...]
    measure: Callable[[list[Record]], tuple[float, ...]]  # the trainings' records -> one value for each question
    names: tuple[str, ...] = ()  # of the trainings; without, they have numbers
    changes: tuple[tuple[Edit, ...], ...] = ()  # of the code, for each training; without, all run the project's
    where: str = ""  # in what the commands write, to find what is asked

    @property
    def runs(self) -> list[tuple[str, Launch, tuple[Edit, ...]]]:
        """Of each training: its name, what runs, and what is changed before."""
        names = self.names or tuple(map(str, range(len(self.trainings))))
        return list(zip(names, self.trainings, self.changes or ((),) * len(names), strict=True))


@dataclass(frozen=True)
class Predict(Lab):
    """`experiment(student)` says what this student is asked."""

    experiment: Callable[[int], Experiment]
    base: str  # flags of all trainings

    def start(self, folder: Path, student: int) -> None:
        asked = self.experiment(student)
        lines = commented(asked.given)
        for question in asked.questions:
            lines += ["", *commented(question.ask)]
            lines += [f"# ({question.within})", f"{question.name} = "]
        (folder / "answer.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def check(self, folder: Path, student: int) -> Verdict:
        asked = self.experiment(student)
        answers = read_answers(folder)
        names = [question.name for question in asked.questions]
        values = [number(answers, name) for name in names]
        lines = [line] if (line := unknown(answers, names)) else []
        if all(value is None for value in values):
            none = "No answer yet: predict at least one number in answer.toml, then check."
            return Verdict(0.0, (none, *lines), unjudged=True)
        row = dict(zip(names, values))
        first = next(iter(kept(folder / PREDICTIONS)), None)
        lost = keep(folder / PREDICTIONS, row)  # before anything is measured
        stored = f"Your answer is not stored: {lost}." if lost else "Your answer is stored."
        stored += " The score is of your last answer."
        if first:
            given = {name: first[name] for name in row if isinstance(first.get(name), int | float)}
            stored += " Your first prediction is kept, and your teacher sees it: "
            stored += ", ".join(f"{name} = {digits(value)}" for name, value in given.items()) or "none"
        elif not lost:
            stored += " This one is your first prediction: it is kept, and your teacher sees it."
        lines, right = [*lines, *wrapped(stored, width=WIDTH).splitlines(), *self._what_runs(folder, asked)], 0
        unsure = False
        for question, value, measured in zip(asked.questions, values, self.measured(asked)):
            passed, line = grade(question, value, measured)
            right += passed
            unsure |= line.endswith(DISTURBED)
            lines.append(line)
        return Verdict(right / len(values), tuple(lines), unsure)

    def _what_runs(self, folder: Path, asked: Experiment) -> list[str]:
        """Lines that say what measures the answers; the commands themselves go into a file."""
        lines = [line for name, _, edits in asked.runs for line in changed_lines(name, edits)]
        if lines:
            lines.insert(0, "These trainings have changed lines:")
        try:
            (folder / COMMANDS).write_text(script(asked, self.base), encoding="utf-8")
        except OSError:  # a full disk, a read-only folder
            commands = (f"  {training.command(f'runs/{name}', self.base)}" for name, training, _ in asked.runs)
            return [*lines, "What measures it:", *commands]
        return [*lines, f"`{command_of(folder / COMMANDS)}` runs what measures it once more."]

    def measured(self, asked: Experiment) -> tuple[float, ...]:
        """Run what there is to run. Returns a value for each question."""
        with tempfile.TemporaryDirectory(prefix="predict-") as folder:
            roots = [
                copy_project(Path(folder, f"code-{name}"), self.step, edits) if edits else ROOT
                for name, _, edits in asked.runs
            ]
            return asked.measure(train(list(zip(asked.trainings, roots)), Path(folder), self.base))

    def solution(self, student: int) -> str:
        asked = self.experiment(student)
        lines = [f"{each.name}: {digits(each.expected)}\n{wrapped(each.how, '  ')}\n" for each in asked.questions]
        return "\n".join([wrapped(asked.given), "", *lines])


def command_of(file: Path) -> str:
    """What runs a file from the top of the project, where students' terminals and notebooks are."""
    file = file.resolve()
    return f"bash {shlex.quote(str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file))}"


def commented(text: str) -> list[str]:
    """As comments of a file, in lines that fit."""
    return [f"# {line}" for line in wrapped(text).splitlines()]


def changed_lines(name: str, edits: tuple[Edit, ...]) -> list[str]:
    """The lines that a training's code has in place of ours, under the file and the number of the first."""
    lines = []
    for file, text in edited(edits).items():
        for line in list(difflib.unified_diff(read(ROOT / file).splitlines(), text.splitlines(), n=0, lineterm=""))[2:]:
            if line.startswith("@@"):
                lines.append(f"  {name}: {file}, line {line.split()[2][1:].partition(',')[0]}")
            else:
                lines.append(f"    {line[0]} {line[1:].strip()}")
    return lines


def script(asked: Experiment, base: str) -> str:
    """A file for bash that runs the trainings of `check`: records go to `runs` beside it, changed code is a copy."""
    lines = ["#!/usr/bin/env bash", "# What `check` runs. The records are in runs/, beside this file."]
    lines += commented(asked.where)
    lines += ['here=$(cd "$(dirname "$0")" && pwd)', f"cd {shlex.quote(str(ROOT))}"]
    lines += ["export OMP_NUM_THREADS=1", "set -e"]
    for name, training, edits in asked.runs:
        command = training.command(f'"$here/runs/{name}"', base)
        if edits:
            lines += ["", f"# {name}: a copy with a changed line", "copy=$(mktemp -d)", 'cp -r common step0* "$copy"']
            lines.append("patch -s -p1 -d \"$copy\" <<'END'")
            for file, text in edited(edits).items():
                pair = read(ROOT / file).splitlines(), text.splitlines()
                lines += difflib.unified_diff(*pair, f"a/{file}", f"b/{file}", n=1, lineterm="")
            lines += ["END", f'(cd "$copy" && PYTHONPATH=$copy {command})', 'rm -r "$copy"']
        else:
            lines += ["", command]
    return "\n".join(lines) + "\n"


def grade(question: Question, value: float | None, measured: float) -> tuple[bool, str]:
    """Whether the answer is near enough to what was measured, and what to tell the student."""
    if value is None:
        return False, f"{question.name}: no answer yet."
    if question.is_right(value, measured):
        return True, f"{question.name}: right. Measured: {digits(measured)}."
    near = question.same
    known = [mistake for mistake, wrong in question.mistakes.items() if abs(value - wrong) <= near * abs(wrong)]
    if known:
        return False, f"{question.name}: {digits(value)} is what one gets who {', or who '.join(known)}."
    if not question.is_right(question.expected, measured):
        return False, f"{question.name}: {DISTURBED}"
    size = "too large" if abs(value) > abs(measured) else "too small"
    factor = max(abs(value), abs(measured)) / max(min(abs(value), abs(measured)), 1e-300)
    hint = f"by more than {10 ** (len(str(int(factor))) - 1):,} times" if factor >= 10 else "by a factor below 10"
    hint = "by a factor below 2" if factor < 2 else hint
    return False, f"{question.name}: {digits(value)} is {size}, {hint}."


def digits(value: float) -> str:
    """A number as one writes it: 1,732,608, all of it, but 0.0312 s."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
