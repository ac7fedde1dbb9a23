"""What holds for every lesson: its length, that its excerpts are the code, and that its numbers were measured."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.ranks import ROOT

LESSONS = [ROOT / "step08_5d" / name / "README.md" for name in ("planning", "narrow_numbers")]
LESSONS = sorted([*ROOT.glob("step*/README.md"), *LESSONS])
LADDER = ROOT / "step08_5d" / "gpu_ladder"
BESIDE = sorted([*ROOT.glob("step*/[a-l]*.md"), *LADDER.glob("*.md")])  # pages beside a lesson
PAGES = [
    ROOT / "README.md",
    ROOT / "common" / "glossary.md",
    *LESSONS,
    *BESIDE,
    *sorted(ROOT.glob("step*/measurements.md")),
]
CODE = {path: path.read_text() for folder in ("common", "step*") for path in sorted(ROOT.glob(f"{folder}/**/*.py"))}
NUMBER = re.compile(r"(?<![\w.,/-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")
CALCULATION = re.compile(r"[=·×+≥]|/ ?\d|/N")
NO_MEASUREMENTS = r"arXiv:[\d.]+|\]\([^)]*\)|`[^`]*`|\([A-Z]+ \d{4}\)|[Ss]ections? [\d.]+|Llama 3\.\d"


@pytest.fixture(params=LESSONS, ids=[path.parent.name for path in LESSONS])
def lesson(request):
    return request.param


@pytest.mark.parametrize("page", [*LESSONS, LADDER / "README.md"], ids=lambda path: path.parent.name)
def test_it_has_at_most_6500_words_and_320_numbers(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"[A-Za-z0-9]\S*", text)) <= 6500
    assert len(NUMBER.findall(text)) <= 320


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_no_line_of_a_paragraph_looks_like_a_list(page):
    """A line break before a minus would start a list in the middle of a sentence."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    item = re.compile(r" *([-+*]|\d+[.)]) ")
    for paragraph in re.split(r"\n\s*\n", text):
        first, *others = paragraph.strip("\n").split("\n")
        assert item.match(first) or not any(item.match(line) for line in others), paragraph


def without_indentation(text: str) -> str:
    return re.sub(r"^ +", "", text, flags=re.MULTILINE)


DEDENTED = {path: without_indentation(text) for path, text in CODE.items()}


def excerpts(page: Path) -> Iterator[tuple[int, str]]:
    """The code that a page shows, without its indentation, and the line where it begins.

    A line ... stands for lines that are left out.
    """
    text, _, _ = page.read_text().partition("## Exercises")
    for block in re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, block.start(1)) + 1
        for part in re.split(r"^ *\.\.\.\n", block[1], flags=re.MULTILINE):
            yield line, without_indentation(part)
            line += part.count("\n") + 1


@pytest.mark.parametrize("page", [*LESSONS, *BESIDE], ids=lambda path: str(path.relative_to(ROOT)))
def test_excerpts_are_the_code(page):
    """Word for word, but for their indentation."""
    for _, part in excerpts(page):
        assert any(part in text for text in DEDENTED.values()), f"nowhere in the code:\n{part}"


def value(number: str) -> float:
    return float(number.replace(",", ""))


def rounds_to(measured: float, number: str) -> bool:
    """Whether `number`, as the lesson writes it, is `measured` with fewer digits, or in thousands, millions, ..."""
    decimals = len(number.partition(".")[2])
    zeros = len(number) - len(number.rstrip("0")) if value(number) >= 1000 and not decimals else -decimals
    return any(abs(measured / 1000**power - value(number)) <= 0.501 * 10**zeros for power in range(4))


def claims(text: str) -> Iterator[tuple[str, str]]:
    """Numbers of the text with two digits and a point, or three digits, and the paragraphs where they stand.

    Not those in code, nor in paragraphs that show a calculation.
    """
    text = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    for paragraph in text.split("\n\n"):
        paragraph = re.sub(NO_MEASUREMENTS, " ", paragraph.replace("\n", " "))
        if not CALCULATION.search(paragraph):
            for number in NUMBER.findall(paragraph):
                digits = re.sub(r"[.,]", "", number).strip("0")
                if len(digits) >= (2 if "." in number else 3):
                    yield number, paragraph


def test_its_numbers_stand_in_measurements(lesson):
    shapes = (ROOT / "common" / "presets.py").read_text()  # of the published models
    sources = shapes + lesson.with_name("measurements.md").read_text()
    measured = {value(number) for number in NUMBER.findall(sources)}
    missing = [claim for claim in claims(lesson.read_text()) if not any(rounds_to(each, claim[0]) for each in measured)]
    assert not missing, "\n".join(f"{number} in: {paragraph}" for number, paragraph in missing)
