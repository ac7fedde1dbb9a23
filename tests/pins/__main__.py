"""Which lines of a file are quoted elsewhere, so that whoever changes one knows what has to follow.

    python -m tests.pins step03_zero/unit.py    # one row per quote
    python -m tests.pins                        # how many there are of each file

Known-wrong variants (`mutant`) and the bugs of labs (`hunt`, `predict`) change code that they name; labs (`write`) cut
bodies between two marks out of a file; `answer` is what a solution of a lab or of an exercise changes in it; and pages
show code (`excerpt`). An excerpt may be found at several places: one of them is enough.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.drawing.tables import aligned
from common.errors import UsageError
from common.labs.copies import Edit
from common.labs.cut import MARKED, starter
from common.labs.find import ROOT, all_labs, lab_modules
from common.labs.write import Writing
from common.launching.command_line import OneLineParser, one_line_errors, summary
from tests.house import test_answers, test_lessons
from tests.labs import test_write
from tests.mechanisms.step08.kernels import test_mutants as kernels
from tests.mutants import patches
from tests.mutants.patches.mutants import at, function_of

PAGES = [*test_lessons.LESSONS, *test_lessons.BESIDE]
WIDTH = 80  # characters of a quote that are shown


class Pin(NamedTuple):
    """Lines `first` to `last` of a file are quoted at `where` (path:line); paths begin at the top of the project."""

    file: str
    first: int
    last: int
    kind: str
    where: str
    text: str


def short(text: str) -> str:
    """On one line."""
    text = " ".join(text.split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 4]} ..."


def place(path: str | Path, line: int) -> str:
    return f"{Path(path).resolve().relative_to(ROOT)}:{line}"


def pin(kind: str, where: str, path: str | Path, source: str, start: int, text: str, before: int = 0) -> Pin:
    """The pin of `text`, which is at `start` in `source`, a part of the file that has `before` lines before it."""
    start += len(text) - len(text.lstrip("\n"))
    first = before + source.count("\n", 0, start) + 1
    file = str(Path(path).resolve().relative_to(ROOT))
    return Pin(file, first, first + text.strip("\n").count("\n"), kind, where, text.strip())


def position(source: str, text: str, where: str) -> int:
    """Where a text begins. Raises UsageError if it is gone: the code has been changed, and not what quotes it."""
    if text not in source:
        raise UsageError(f"{where} quotes what is not there any more: {short(text)}")
    return source.index(text)


def in_object(kind: str, where: str, thing: object, text: str) -> Pin:
    """The pin of a text in a function or class; of its whole head if the text is empty."""
    lines, first = inspect.getsourcelines(thing)
    source = textwrap.dedent("".join(lines))
    text = text or re.search(r"^( *(?:def|class) .*)", source, re.MULTILINE)[1]
    return pin(kind, where, inspect.getsourcefile(thing), source, position(source, text, where), text, first - 1)


def constants(path: str | Path) -> dict[str, int]:
    """The strings in a Python file, and the line where each stands first."""
    nodes = ast.walk(ast.parse(Path(path).read_text(encoding="utf-8")))
    strings = [(node.lineno, node.value) for node in nodes if isinstance(node, ast.Constant) and node.value]
    return {text: line for line, text in sorted(strings, key=lambda each: -each[0]) if isinstance(text, str)}


def of_mutants() -> Iterator[Pin]:
    for quote in (quote for table in patches.TABLES for quote in table.quotes):
        owner, attribute = at(quote.place)
        where = place(quote.file, quote.line)
        if not hasattr(owner, attribute):
            raise UsageError(f"{where} names what is not there any more: {quote.place}")
        real = function_of(inspect.getattr_static(owner, attribute))
        if quote.old or inspect.getsourcefile(real) == inspect.getsourcefile(owner):
            yield in_object("mutant", where, real, quote.old)
        else:  # a module's own name for what it imports
            source = Path(inspect.getsourcefile(owner)).read_text(encoding="utf-8")
            start = re.search(rf"\b{attribute}\b", source).start()
            yield pin("mutant", where, inspect.getsourcefile(owner), source, start, attribute)
    lines = constants(kernels.__file__)
    for name, (kernel, right, _) in (kernels.MUTANTS | kernels.NARROW).items():
        yield in_object("mutant", place(kernels.__file__, lines[name]), getattr(kernel, "fn", kernel), right)


def of_labs() -> Iterator[Pin]:
    for module in lab_modules():
        lines = constants(module.__file__)
        for lab in getattr(module, "LABS", []):
            edits = [edit for bug in getattr(lab, "bugs", ()) for edit in bug.beside + bug.edits]
            if lab.kind == "predict":
                edits = [edit for each in vars(module).values() if isinstance(each, tuple) for edit in each]
            for file, old, _ in (edit for edit in edits if isinstance(edit, Edit)):
                source, where = (ROOT / file).read_text(encoding="utf-8"), place(module.__file__, lines[old])
                yield pin(lab.kind, where, ROOT / file, source, position(source, old, where), old)
            if isinstance(lab, Writing):
                source = (ROOT / lab.source).read_text(encoding="utf-8")
                bodies = list(MARKED.finditer(source))
                for match in (bodies[number - 1] for number in lab.bodies):
                    where = place(module.__file__, lines[lab.id])
                    yield pin("write", where, ROOT / lab.source, source, match.start(), match[0])


def of_answers() -> Iterator[Pin]:
    for id, answers in test_write.ANSWERS.items():
        lab, path = all_labs()[id], Path(test_write.__file__).with_name("answers") / f"{id}.txt"
        written, end = path.read_text(encoding="utf-8"), 0
        source = (ROOT / lab.source).read_text(encoding="utf-8")
        given = starter(source, (), lab.only, lab.hidden, lab.source)
        for old in (old for edits, _ in answers for old, _ in edits):
            line, _, _ = old.partition("\n")
            end = written.index(f"\n< {line}\n" if line else "\n<\n", end) + 1
            where = place(path, written.count("\n", 0, end) + 1)
            start = position(given, old, where)
            line = given.rfind("\n", 0, start) + 1  # the student has a part of the file: the same line of the whole
            start += source.index(given[line : given.index("\n", start + len(old.rstrip()))]) - line
            yield pin("answer", where, ROOT / lab.source, source, start, old)
    lines = constants(test_answers.__file__)
    for step, changes in test_answers.CHANGES.items():
        sketch = test_answers.sketch_of(step)
        source = sketch.read_text(encoding="utf-8")
        for before, _ in changes:
            where = place(test_answers.__file__, lines[before])
            if (match := re.search(test_answers.pattern(before), source)) is None:
                raise UsageError(f"{where} quotes what is not there any more: {short(before)}")
            yield pin("answer", where, sketch, source, match.start(), match[0])


def of_excerpts() -> Iterator[Pin]:
    for page in PAGES:
        for line, part in test_lessons.excerpts(page):
            for path, source in test_lessons.DEDENTED.items():
                for match in re.finditer(re.escape(part), source):
                    yield pin("excerpt", place(page, line), path, source, match.start(), part)


def all_pins() -> list[Pin]:
    """All pins, by file and line."""
    return sorted({*of_mutants(), *of_labs(), *of_answers(), *of_excerpts()})


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Print the pins of the files that the command line names, or how many each file has."""
    parser = OneLineParser(prog="python -m tests.pins", description=summary(__doc__))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="of this project")
    files, named = parser.parse_args(argv).files, {}
    for path in files:
        if not path.is_file():
            raise UsageError(f"{path} is not a file")
        if ROOT not in path.resolve().parents:
            raise UsageError(f"{path} is not in {ROOT}")
        named[str(path.resolve().relative_to(ROOT))] = path
    pins = all_pins()
    if not files:
        rows = [[file, str(count)] for file, count in Counter(pin.file for pin in pins).most_common()]
        print("\n".join(aligned(rows)))
    for file in named:
        rows = [each for each in pins if each.file == file]
        print(f"{file}: {len(rows)} pins")
        for _, first, last, kind, where, text in rows:
            lines = f"{first}-{last}" if last > first else str(first)
            print(f"{lines:>9}  {kind:7}  {where}  {short(text)}")


if __name__ == "__main__":
    sys.exit(main())
