"""Labs of the kind *design*: the fastest layout for given hardware, with a local score board."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from common.labs.answers import keep, kept, read_answers
from common.labs.lab import Lab, Verdict

GOOD = 0.98  # of the best speed that we know: passed
FASTEST = 1e10  # tokens/s; no machine has more
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

    def start(self, folder: Path, student: int) -> None:
        lines = [f"# {line}" for line in self.given(student).splitlines()]
        for name, value in self.fields.items():
            lines.append(f"{name} = {value}" if value.isdecimal() else f'{name} = "{value}"')
        (folder / "answer.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def check(self, folder: Path, student: int) -> Verdict:
        answers = read_answers(folder)
        if missing := self.fields.keys() - answers.keys():
            raise UsageError(f"answer.toml: {min(missing)} is missing")
        try:
            judged = self.judge(answers, student)
        except UsageError as error:
            return Verdict(0.0, (f"It cannot run: {error}",))
        share = judged.speed / judged.best
        lines = [f"{judged.name}: {judged.speed:,.0f} tokens/s (predicted), {share:.0%} of the best that we know"]
        if judged.measured is not None:
            lines.append(f"measured: {judged.measured:,.0f} tokens/s")
        board = self._enter(folder.parent / "scores.jsonl", judged, student)
        return Verdict(1.0 if share >= GOOD else 0.9 * share, (*lines, *judged.lines, "", *board))

    def _enter(self, path: Path, judged: Judged, student: int) -> list[str]:
        """Enter the design on the score board of all labs beside this one, and return the rows for this hardware."""
        variant = student % self.variants
        row = {"lab": self.id, "variant": variant, "student": student, "layout": judged.name, "speed": judged.speed}
        keep(path, row)  # or else this board has one design
        ours = [each for each in (row, *kept(path)) if is_score(each)]
        ours = [each for each in ours if (each["lab"], each["variant"]) == (self.id, variant)]
        best = {(each["student"], each["layout"]): each for each in ours}.values()
        ranked = sorted(best, key=lambda each: -each["speed"])[:SHOWN]
        return [BOARD] + [
            f"{place}. {each['speed']:>12,.0f} tokens/s  student {each['student']}: {each['layout']}"
            for place, each in enumerate(ranked, 1)
        ]

    def solution(self, student: int) -> str:
        return self.reveal(student)


def is_score(row: dict) -> bool:
    """Whether a row of a score board has all that is drawn of it: anybody may have written into such a file."""
    whole, text = (row.get("variant"), row.get("student")), (row.get("lab"), row.get("layout"))
    speed = row.get("speed")
    right = all(type(each) is int for each in whole) and all(isinstance(each, str) for each in text)
    return right and type(speed) in (int, float) and 0 < speed <= FASTEST


def whole(answers: dict[str, str], name: str) -> int:
    """An answer as a positive number. Raises UsageError if it is none."""
    if not answers[name].isdecimal() or int(answers[name]) < 1:
        raise UsageError(f"{name} = {answers[name]} must be a whole number, at least 1")
    return int(answers[name])
