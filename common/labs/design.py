"""Labs of the kind *design*: the fastest layout for given hardware, with a local score board."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from common.labs.answers import keep, kept, read_answers, unknown
from common.labs.lab import Lab, Verdict

GOOD = 0.98  # of the best speed that we know: passed
WORTH = 0.9  # of the share of that speed: the score of a design that has not passed
BEYOND = 1.02  # times that speed: no honest row of a score board has more (of the planner's best, one may have 1.01)
SHOWN = 5  # rows of the score board
BOARD = "Score board:"  # the line above them


class Judged(NamedTuple):
    """What a design is worth."""

    name: str  # the layout in a few words
    speed: float  # tokens/s, predicted
    best: float  # of the best layout that we know
    lines: tuple[str, ...]  # what limits it
    measured: float | None = None  # tokens/s


@dataclass(frozen=True)
class Design(Lab):
    """`judge(answers, student)` raises UsageError, with the rule, for a layout that cannot run."""

    given: Callable[[int], str]  # the hardware and the model of a student number
    fields: dict[str, str]  # what is to be chosen, with its value at the start
    judge: Callable[[dict[str, str], int], Judged]
    reveal: Callable[[int], str]  # the best layout, and why
    variants: int  # student numbers with the same remainder have the same hardware
    best: Callable[[int], float]  # tokens/s of the best layout that we know, by student number
    begins: Callable[[int], dict[str, str]] = lambda student: {}  # fields that begin otherwise for a student number

    def start(self, folder: Path, student: int) -> None:
        lines = [f"# {line}" for line in self.given(student).splitlines()]
        for name, value in (self.fields | self.begins(student)).items():
            lines.append(f"{name} = {value}" if value.isdecimal() else f'{name} = "{value}"')
        (folder / "answer.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def check(self, folder: Path, student: int) -> Verdict:
        answers = read_answers(folder)
        if missing := self.fields.keys() - answers.keys():
            more = unknown(answers, self.fields)
            raise UsageError(f"answer.toml: {' and '.join(sorted(missing))} must be there. {more}".rstrip())
        try:
            judged = self.judge(answers, student)
        except UsageError as error:
            return Verdict(0.0, (f"It cannot run: {error}",))
        share = judged.speed / judged.best
        passed = share >= GOOD
        score = 1.0 if passed else WORTH * share
        lines = [f"{judged.name}: {judged.speed:,.0f} tokens/s (predicted), {share:.1%} of the best that we know"]
        if not passed:
            lines.append(
                f"score: {score:.0%}, which is {WORTH:g} times that share; from {GOOD:.0%} of the best on, passed"
            )
        if more := unknown(answers, self.fields):
            lines.append(more)
        if judged.measured is not None:
            lines.append(f"measured: {judged.measured:,.0f} tokens/s")
        board = self._enter(folder.parent / "scores.jsonl", judged, student)
        return Verdict(score, (*lines, *judged.lines, "", *board))

    def _enter(self, path: Path, judged: Judged, student: int) -> list[str]:
        """Enter the design on the score board of all labs beside this one, and return the rows for this hardware."""
        variant = student % self.variants
        row = {"lab": self.id, "variant": variant, "student": student, "layout": judged.name, "speed": judged.speed}
        keep(path, row)  # or else this board has one design
        others = [each for each in kept(path) if is_score(each)]
        others = [each for each in others if (each["lab"], each["variant"]) == (self.id, variant)]
        ours = [row, *(each for each in others if self.is_possible(each))]
        best = {(each["student"], each["layout"]): each for each in ours}.values()
        ranked = sorted(best, key=lambda each: -each["speed"])[:SHOWN]
        return [BOARD] + [
            f"{place}. {each['speed']:>12,.0f} tokens/s  student {each['student']}: {each['layout']}"
            for place, each in enumerate(ranked, 1)
        ]

    def is_possible(self, row: dict) -> bool:
        """Whether a row of a score board is of hardware of this lab, and hardly faster than the best layout there."""
        return 0 <= row["variant"] < self.variants and row["speed"] <= self.best(row["variant"]) * BEYOND

    def solution(self, student: int) -> str:
        return self.reveal(student)


def is_score(row: dict) -> bool:
    """Whether a row of a score board has all that is drawn of it: anybody may have written into such a file."""
    whole, text = (row.get("variant"), row.get("student")), (row.get("lab"), row.get("layout"))
    speed = row.get("speed")
    right = all(type(each) is int for each in whole) and all(isinstance(each, str) for each in text)
    return right and type(speed) in (int, float) and 0 < speed < math.inf


def whole(answers: dict[str, str], name: str) -> int:
    """An answer as a positive number. Raises UsageError if it is none."""
    if not answers[name].isdecimal() or int(answers[name]) < 1:
        raise UsageError(f"{name} = {answers[name]} must be a whole number, at least 1")
    return int(answers[name])
