"""`python -m tests.pins` names the lines of a file that are quoted elsewhere."""

import re
from collections import Counter

import pytest

from common.labs.find import all_labs
from tests.harness.ranks import ROOT
from tests.house import test_answers, test_lessons
from tests.labs.test_write import ANSWERS
from tests.mechanisms.step08.kernels import test_mutants as kernels
from tests.mutants.patches import EVERY
from tests.mutants.patches.mutants import Mutants
from tests.pins import __main__ as pins


@pytest.fixture(scope="module")
def found() -> list[pins.Pin]:
    return pins.all_pins()


def written(path: str) -> list[str]:
    return (ROOT / path).read_text(encoding="utf-8").splitlines()


def lean(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_pins_are_where_they_say(found):
    """The lines of the file, and the one that quotes them."""
    for file, first, last, kind, where, text in found:
        assert lean(text) in lean("".join(written(file)[first - 1 : last])), (file, first, text)
        path, _, line = where.rpartition(":")
        quoting = written(path)[int(line) - 1]
        if kind == "excerpt":
            assert quoting.strip() == text.split("\n")[0], where
        if path.startswith("tests/labs/answers/"):  # what is quoted may begin with the end of a line
            assert quoting[2:].strip() in ("", text.split("\n")[0]), where


def test_nothing_is_left_out(found):
    """Of every mutant, bug, body, answer and excerpt, each quote has one pin, an excerpt at least one."""
    places = {kind: Counter(each.where for each in found if each.kind == kind) for kind in {pin.kind for pin in found}}
    quotes = [quote for mutants in pins.patches.TABLES for quote in mutants.quotes]
    assert {quote.mutant for quote in quotes} == EVERY.keys()
    of_kernels = {where for where in places["mutant"] if where.startswith("tests/mechanisms")}
    assert len(of_kernels) == len(kernels.MUTANTS | kernels.NARROW)
    assert places["mutant"].keys() - of_kernels == {pins.place(quote.file, quote.line) for quote in quotes}
    labs = all_labs().values()
    bugs = [bug for lab in labs if lab.kind == "hunt" for bug in lab.bugs]
    assert sum(places["hunt"].values()) == len(
        {(edit.file, edit.old) for bug in bugs for edit in bug.beside + bug.edits}
    )
    assert sum(places["write"].values()) == sum(len(lab.bodies) for lab in labs if lab.kind in ("write", "gpu"))
    assert places["predict"].keys() and all(where.startswith("step02") for where in places["predict"])
    edits = [edit for answers in ANSWERS.values() for each, _ in answers for edit in each]
    assert sum(places["answer"].values()) == len(edits) + sum(map(len, test_answers.CHANGES.values()))
    shown = [(page, line) for page in pins.PAGES for line, _ in test_lessons.excerpts(page)]
    assert places["excerpt"].keys() == {pins.place(*each) for each in shown}


def test_where_a_mutant_is_written_down():
    mutants = Mutants(r"""
@ step03_zero.unit:Unit.free, step03_zero.unit:Unit.fetch
# a comment
one: old => new
    goes on
two: other => SWAPPED
two: SWAPPED => third
""")
    first = mutants.quotes[0].line
    assert written(__file__)[first - 1] == "one: old => new"
    assert [(quote.mutant, quote.old, quote.line - first) for quote in mutants.quotes] == [
        *[("one", "old", 0)] * 2,
        *[("two", "other", 2)] * 2,
    ]


def test_the_command(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert pins.main(["step03_zero/unit.py", "common/labs/rules.py"]) == 0
    printed = capsys.readouterr().out
    assert "common/labs/rules.py: 0 pins\n" in printed
    number = written("step03_zero/unit.py").index("        self.weights.untyped_storage().resize_(0)") + 1
    assert re.search(rf"^ +{number}  mutant   tests/mutants/\S+:\d+  self\.weights\.untyped", printed, re.MULTILINE)
    assert pins.main([]) == 0
    counts = [int(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert counts == sorted(counts, reverse=True) and len(counts) > 50


@pytest.mark.parametrize("file", ["nothing.py", "tests", "/etc/hosts", "--all"])
def test_bad_input_gets_one_line(file, capsys):
    assert pins.main([file]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_quote_that_is_gone_is_named(monkeypatch, capsys):
    mutants = Mutants(r"""
@ step03_zero.unit:Unit.free
one: no such code => pass
""")
    monkeypatch.setattr(pins.patches, "TABLES", [mutants])
    assert pins.main([]) == 2
    line = mutants.quotes[0].line
    assert (
        capsys.readouterr().err
        == f"error: tests/pins/test_command.py:{line} quotes what is not there any more: no such code\n"
    )
