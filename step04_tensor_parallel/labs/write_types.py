"""Lab of step 4 in which the student writes a checker of types, and finds bugs with it that people have shipped."""

import re
import textwrap
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from common.errors import UsageError
from common.labs.alone import Answer, Refused, ask
from common.labs.answers import read_answers
from common.labs.find import ROOT
from common.labs.lab import Verdict
from common.labs.write import USUALLY, Writing, page
from step04_tensor_parallel.labs.typed_bugs import TypedBug, bugs_of
from step04_tensor_parallel.labs.typed_questions import ILL_TYPED, Question, questions, reason, wrong_program
from step04_tensor_parallel.type_checker import check, read

POINTS = {"gradient_of": 0.1, "computed": 0.2, "communicated": 0.2, "check": 0.2}
OF_A_BUG = 0.1
WORDS = 4  # that an explanation has at least
FAILED = "failed.txt"

ANSWER = """\
# Three programs, each with one bug. line: the first ill-typed line, in the file as you got it. has and needs: the type
# of the operand that does not fit there, and the type that would fit (R, I, V or P). Of two operands that do not fit
# together, take the one before which an operation is missing or wrong. why: in a sentence, what a training with this
# bug does wrong, and what repairs it.
"""


@dataclass(frozen=True, kw_only=True)
class TypesLab(Writing):
    def start(self, folder: Path, student: int) -> None:
        super().start(folder, student)
        text = ANSWER
        for number, bug in enumerate(bugs_of(student), start=1):
            (folder / f"bug_{number}.txt").write_text(bug.wrong, encoding="utf-8")
            text += "\n" + answers_to(number, 0, "", "", "")
        (folder / "answer.toml").write_text(text, encoding="utf-8")

    def check(self, folder: Path, student: int) -> Verdict:
        file, asked, answers = self.written(folder), list(questions()), read_answers(folder)
        try:
            answered = ask(file, ROOT / self.source, [question.code for question in asked])
        except Refused as refused:
            return Verdict(0.0, (str(refused),), unjudged=True)
        score, feedback = self._grade_functions(list(zip(asked, answered)), folder)
        if not any(answers.get(f"bug_{number}_line", "0").strip("0 ") for number in range(1, 4)):
            feedback.append("answer.toml says nothing of the three bugs yet.")
        else:
            graded = [grade_bug(number, bug, answers) for number, bug in enumerate(bugs_of(student), start=1)]
            score += sum(points for points, _ in graded)
            feedback += [said for _, said in graded if said]
        if not feedback:
            return Verdict(1.0, ("Your checker is right, and so is what you say of the three bugs.",))
        return Verdict(round(min(score, 0.99), 3), tuple(feedback))

    def _grade_functions(self, asked: list[tuple[Question, Answer]], folder: Path) -> tuple[float, list[str]]:
        """Points, and lines about the first part that is wrong: the others use it, or have to wait."""
        score, feedback, right = 0.0, [], []
        for part, pairs in groupby(asked, key=lambda pair: pair[0].part):
            said = next((lines for question, answer in pairs if (lines := self._wrong(question, answer, folder))), None)
            if said:
                feedback += [] if feedback else said
            else:
                score += POINTS[part]
                right.append(part)
        if feedback and right:
            feedback.append(f"Right so far: {', '.join(right)}.")
        return score, feedback

    def _wrong(self, question: Question, answer: Answer, folder: Path) -> list[str]:
        """Lines about a wrong answer; none if it is right."""
        if answer.raised == "NotImplementedError" and answer.text:
            return [answer.text]
        if question.part != "check":
            return _wrong_type(question, answer)
        text = f"`check` raised {answer.text}" if answer.raised else ""
        if text := text or wrong_program(question.about[0], question.right, answer.value):
            (folder / FAILED).write_text(question.about[0].text, encoding="utf-8")
            return [text, f"This program is in {FAILED} now: python {Path(self.source).name} {FAILED}"]
        return []

    def write_answers(self, folder: Path, student: int) -> None:
        """Fill in answer.toml as we would."""
        text = ""
        for number, bug in enumerate(bugs_of(student), start=1):
            text += answers_to(number, check(read(bug.wrong)).line, bug.has, bug.needs, bug.why)
        (folder / "answer.toml").write_text(text, encoding="utf-8")

    def solution(self, student: int) -> str:
        bodies, _, _ = super().solution(student).rpartition(f"\n{self.moral}")
        lines = [bodies]
        for number, bug in enumerate(bugs_of(student), start=1):
            line = check(read(bug.wrong)).line
            text = f"bug_{number}.txt, line {line}: it has {bug.has} and needs {bug.needs}. {bug.why}"
            lines += ["", textwrap.fill(text, 120, break_on_hyphens=False), f"Who: {bug.source}"]
        return "\n".join([*lines, "", self.moral])


def _wrong_type(question: Question, answer: Answer) -> list[str]:
    found = answer.raised or answer.value
    if found == question.right:
        return []
    if answer.raised not in ("", ILL_TYPED):
        return [f"`{question.code}` raised {answer.text}"]
    should = "raise IllTyped" if question.right == ILL_TYPED else f"be {question.right!r}"
    is_now = "raises IllTyped" if found == ILL_TYPED else f"is {found!r}"
    return [f"`{question.code}` should {should}, and {is_now}.", f"{USUALLY} {reason(question, found)}"]


def answers_to(number: int, line: int, has: str, needs: str, why: str) -> str:
    """Lines of answer.toml about a bug."""
    answers = f'line = {line}\nhas = "{has}"\nneeds = "{needs}"\nwhy = "{why}"\n'
    return re.sub("^", f"bug_{number}_", answers, flags=re.MULTILINE).removesuffix(f"bug_{number}_")


def grade_bug(number: int, bug: TypedBug, answers: dict[str, str]) -> tuple[float, str]:
    """Points, and what is wrong in the answers about a bug. Raises UsageError if one is missing."""
    fields = [f"bug_{number}_{field}" for field in ("line", "has", "needs", "why")]
    if missing := [field for field in fields if field not in answers]:
        raise UsageError(f"answer.toml: {missing[0]} is missing")
    line, has, needs, why = (answers[field].strip() for field in fields)
    if line in ("", "0"):
        return 0.0, f"bug_{number}.txt: answer.toml says nothing yet."
    right = check(read(bug.wrong)).line
    if line != str(right):
        return 0.0, f"bug_{number}.txt: line {line} is not the first ill-typed one. What does your checker say of it?"
    if (has.upper(), needs.upper()) != (bug.has, bug.needs):
        other = " Before which of its operands is an operation missing or wrong?" if has.upper() != bug.has else ""
        return OF_A_BUG / 2, f"bug_{number}.txt: line {line} is right, but not what an operand has and needs.{other}"
    if len(re.findall(r"\w+", why)) < WORDS:
        return OF_A_BUG / 2, f"bug_{number}.txt: line and types are right. Say in a sentence what goes wrong (why)."
    return OF_A_BUG, ""


LABS = [
    TypesLab(**page(__file__, "write-04-c"), source="step04_tensor_parallel/type_checker.py", bodies=(1, 2, 3, 4, 5, 6))
]
