"""The exercises of the lessons with their folded answers, and the numbers in them.

A test computes what an answer says, and hands it to `check`: each computed number must be in the exercise, as its text
writes it, and each number of the answer must have been computed (or be in the question, or before the exercises). So
neither can change without the other. Prose may change: only numbers, kinds of exercises and blocks of code count.
"""

import re
from dataclasses import dataclass
from functools import cache

from step01_single_gpu.data.token_cache import load_corpus
from tests.harness.ranks import ROOT

NUMBER = re.compile(r"(?<![\w.,])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e-?\d+)?(?!\w|\.\d)")
HEADING = re.compile(r"^\*\*(\d)\. \((bug hunt|\w+)[^)]*\)\*\*", re.MULTILINE)
FOLDED = re.compile(r"<details><summary>Answer</summary>\n(.*?)</details>", re.DOTALL)
QUICK = "--peak-tflops 1"  # which a run would measure otherwise
TEXT = "3c74a38a"  # begins the hash of the text on which the lessons' runs were made: the library of Python 3.11.7
CODE = r"^```(?:python|bash|console|diff)\n.*?^```|`[^`\n]*`"  # not what a text block shows: it calculates


@dataclass(frozen=True)
class Exercise:
    """One exercise. `before` is the lesson up to the exercises."""

    kind: str
    question: str
    answer: str
    before: str

    def blocks(self, language: str) -> list[str]:
        """The code that the answer shows, and before it what the question does."""
        pattern = rf"^```{language}\n(.*?)^```"
        return re.findall(pattern, self.question + self.answer, re.MULTILINE | re.DOTALL)


def lesson(folder: int | str) -> str:
    """The README of a step, or of a folder."""
    (path,) = ROOT.glob(f"{folder}/README.md" if isinstance(folder, str) else f"step{folder:02}_*/README.md")
    return path.read_text()


@cache
def exercises(folder: int | str) -> dict[int, Exercise]:
    """By number; 0 is the question in the middle of the lesson, if it has one."""
    before, _, after = lesson(folder).partition("\n## Exercises\n")
    starts = [*HEADING.finditer(after)]
    found = {}
    for match, following in zip(starts, [*starts[1:], None]):
        text = after[match.end() : following.start() if following else None]
        question, answer = text.split("<details>", 1)[0], FOLDED.search(text)[1]
        found[int(match[1])] = Exercise(match[2], question, answer, before)
    for middle in FOLDED.finditer(before):
        question = before[: middle.start()].rsplit("\n\n", 2)[1]
        found[0] = Exercise("before you read on", question, middle[1], before)
    return found


def exercise(folder: int | str, number: int, kind: str) -> Exercise:
    """One of them, which must still be of this kind."""
    found = exercises(folder)[number]
    assert found.kind == kind, f"exercise {number} is a {found.kind} by now"
    return found


def numbers(text: str) -> list[str]:
    return NUMBER.findall(re.sub(CODE, " ", text, flags=re.MULTILINE | re.DOTALL))


def results(text: str) -> list[str]:
    """The numbers of a text but for what it calculates with: operands, and what has but one digit beside zeros."""
    text, found = re.sub(CODE, " ", text, flags=re.MULTILINE | re.DOTALL), []
    for match in NUMBER.finditer(text):
        before, after = text[: match.start()].rstrip(), text[match.end() :].lstrip()
        operand = before.endswith(tuple("·×/+-−")) or after.startswith(tuple("·×/+-−^"))
        if not operand and len(re.sub(r"e.*|\D", "", match[0]).strip("0")) >= 2:
            found.append(match[0])
    return found


def written_as(value: float, number: str) -> bool:
    """Whether a text that means `value` may write `number`: with so few digits, if it is not too far off."""
    mantissa, _, power = number.replace(",", "").partition("e")
    decimals = len(mantissa.partition(".")[2])
    zeros = len(mantissa) - len(mantissa.rstrip("0")) if not decimals and float(mantissa) >= 1000 else -decimals
    error = abs(value - float(f"{mantissa}e{power or 0}"))
    return error <= 0.5001 * 10.0 ** (zeros + int(power or 0)) and (bool(power) or error <= 0.07 * abs(value))


@cache
def same_text() -> bool:
    """Whether the standard library, on which models train, is that of the lessons: or losses have other digits."""
    return load_corpus(None, None, 1).sha256.startswith(TEXT)


def check_trained(of: Exercise, *computed: float) -> None:
    """`check`, of what depends on the text that a model was trained on."""
    if same_text():
        check(of, *computed)


def check(of: Exercise, *computed: float) -> None:
    """Raise AssertionError for a computed number that the exercise does not have, and for a result in its answer that
    was not computed.
    """
    everywhere, known = numbers(of.question) + numbers(of.answer), {*numbers(of.question), *numbers(of.before)}
    missing = [value for value in computed if not any(written_as(value, number) for number in everywhere)]
    assert not missing, f"computed, but not written: {', '.join(f'{each:.6g}' for each in missing)}; {everywhere}"
    for number in results(of.answer):
        assert number in known or any(written_as(value, number) for value in computed), (
            f"{number} in the answer is not computed: hand it to `check`"
        )
