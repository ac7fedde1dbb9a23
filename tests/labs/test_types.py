"""The lab on types: what it asks of a checker, what answers about bugs are worth, and files that cannot be asked."""

import re
import subprocess
import sys

import pytest

from common.errors import UsageError
from common.labs.alone import Answer, Refused, ask
from common.labs.answers import read_answers
from common.labs.find import ROOT, all_labs
from step04_tensor_parallel import type_checker
from step04_tensor_parallel.labs.typed_bugs import PAIRS, bugs_of
from step04_tensor_parallel.labs.typed_programs import RIGHT, WRONG
from step04_tensor_parallel.labs.typed_questions import ILL_TYPED, questions
from step04_tensor_parallel.labs.write_types import OF_A_BUG, POINTS, grade_bug
from step04_tensor_parallel.type_checker import check, read

LAB = all_labs()["write-04-c"]
BUGS = [bug for pair in PAIRS for bug in pair]


def types_after(program: str) -> dict[str, str]:
    found = check(read(program))
    assert found.line == 0, found
    return found.types


def test_the_page_is_what_the_checker_says():
    """Its tables of gradients and of operators, and the sublayer that it checks line by line."""
    page = (ROOT / "step04_tensor_parallel/types_of_gradients.md").read_text()
    gradients = re.search(r"^\| type of its gradient \| (.) \| (.) \| (.) \| (.) \|", page, re.MULTILINE).groups()
    assert [type_checker.gradient_of(kind) for kind in "RIVP"] == list(gradients)
    rows = re.findall(
        r"^\| (?:f|g)(?:\\\*)? \| (.) to (.) \| ([\w-]+) \| (.) to (.) \| ([\w-]+) \|", page, re.MULTILINE
    )
    assert len(rows) == 4
    for before, after, forward, gradient, returned, backward in rows:
        assert type_checker.communicated(before, forward, backward) == after
        assert type_checker.gradient_of(after) == gradient and type_checker.gradient_of(before) == returned
    types = types_after(type_checker.EXAMPLE)
    named = {"scaled": "V", "tokens": "R", "inside": "V", "hidden": "V", "summand": "P", "y": "V", "dscale": "P"}
    assert types.items() >= named.items() and types["total"] == types["scale"] == "R"


def test_a_backward_leaves_no_doubt():
    """A collective and that of its backward allow one type at most, so the language needs no further word."""
    for kind in "RIVP":
        for forward in type_checker.COLLECTIVES:
            for backward in type_checker.COLLECTIVES:
                after = type_checker.results(forward, kind)
                wanted = type_checker.gradient_of(kind)
                fits = [to for to in after if wanted in type_checker.results(backward, type_checker.gradient_of(to))]
                assert len(fits) <= 1, (kind, forward, backward)


def test_questions_ask_for_everything():
    asked = list(questions())
    assert {question.part for question in asked} == POINTS.keys()
    assert sum(POINTS.values()) + 3 * OF_A_BUG == pytest.approx(1)
    assert len({question.code for question in asked}) == len(asked)
    for part in ("computed", "communicated"):
        rights = [question.right for question in asked if question.part == part]
        assert {*"RIVP", ILL_TYPED} == set(rights) and rights.count(ILL_TYPED) < 0.9 * len(rights)
    assert not any(check(read(program.text)).line for program in RIGHT)
    assert all(check(read(program.text)).line for program in WRONG)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.source.split(",")[0].split(" (")[0])
def test_a_bug(bug):
    assert bug.right.count(bug.old) == 1 and "https://github.com/" in bug.source
    types_after(bug.right)
    found = check(read(bug.wrong))
    assert found.line and {bug.has, bug.needs} <= {*"RIVP"}
    statement = next(each for each in read(bug.wrong) if each.line == found.line)
    assert bug.has in [found.types[name] for name in statement.operands]


def test_neighbors_have_other_bugs():
    assert {bug for student in range(8) for bug in bugs_of(student)} == set(BUGS)
    assert len({bugs_of(student) for student in range(8)}) == 8
    lines = [[check(read(bug.wrong)).line for bug in pair] for pair in PAIRS]
    assert all(first != second for first, second in lines), "a number that one can copy"


def test_answers_about_bugs(tmp_path):
    LAB.start(tmp_path, 5)
    bug = bugs_of(5)[1]
    assert grade_bug(2, bug, read_answers(tmp_path)) == (0.0, "bug_2.txt: answer.toml says nothing yet.")
    LAB.write_answers(tmp_path, 5)
    right = read_answers(tmp_path)
    assert grade_bug(2, bug, right) == (OF_A_BUG, "")
    for wrong, points, said in (
        ({"line": "3"}, 0.0, "line 3 is not the first ill-typed one"),
        ({"has": bug.needs, "needs": bug.has}, OF_A_BUG / 2, "Before which of its operands is an operation missing"),
        ({"needs": "V"}, OF_A_BUG / 2, "not what an operand has and needs."),
        ({"why": "because"}, OF_A_BUG / 2, "Say in a sentence what goes wrong"),
    ):
        changed = right | {f"bug_2_{name}": value for name, value in wrong.items()}
        found, text = grade_bug(2, bug, changed)
        assert found == points and said in text
    assert grade_bug(2, bug, right | {"bug_2_has": bug.has.lower()})[0] == OF_A_BUG
    with pytest.raises(UsageError, match="bug_2_why is missing"):
        grade_bug(2, bug, {name: value for name, value in right.items() if name != "bug_2_why"})


def test_no_file_of_the_lab_says_what_is_asked(tmp_path):
    LAB.start(tmp_path, 1)
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    solution = LAB.solution(1)
    assert solution.count(LAB.moral) == 1 and all(bug.why in " ".join(solution.split()) for bug in bugs_of(1))
    assert not any(bug.why[:40] in text or "github" in text for bug in BUGS)
    assert "PIVR" not in text and '"R": "P"' not in text and "RI" not in text.split("results")[1].split('"""')[2]


@pytest.mark.parametrize(
    "body, said",
    [
        ("while True:\n        pass", r"it does not end: after 0\.3 s it is at line [23]: `(while True:|pass)`\."),
        ("__import__('os')._exit(3)", "it ended the process before it had answered"),
        ("open(__file__[:-4] + 'source.py')", "your file reads the one that it was cut from"),
    ],
)
def test_files_that_cannot_be_asked(body, said, tmp_path):
    (tmp_path / "a.py").write_text(f"def f():\n    {body}\n")
    (tmp_path / "source.py").write_text("")
    with pytest.raises(Refused, match=said):
        ask(tmp_path / "a.py", tmp_path / "source.py", ["f()"], seconds=0.3)


def test_what_is_asked_is_answered(tmp_path):
    (tmp_path / "a.py").write_text("print('hello')\nx = (1, {'a': 2})\ndef f():\n    print('again')\n    return x[2]\n")
    found = ask(tmp_path / "a.py", tmp_path / "other.py", ["x", "f()", "y"])
    assert found[0] == Answer([1, {"a": 2}])
    assert found[1].raised == "IndexError" and "in line 5: `return x[2]`" in found[1].text
    assert found[2].raised == "NameError"


@pytest.mark.parametrize(
    "program, said",
    [
        ("x : Q", "line 1 is no statement: x : Q"),
        ("# what\n\nx : V\ny = relu z", "line 4 uses z, which no line before it assigns"),
        ("x : V\nx = relu x", "line 2 assigns x again"),
        ("x : V\ny = relu x x", "line 2 is no statement"),
        ("x : V\ny = add x", "line 2 is no statement"),
        ("x : V\ny = all-reduce|nothing|nothing x", "line 2 is no statement"),
        ("x : V\ny = all-gather|gather x", "line 2 is no statement"),
        ("w -= w", "line 1 uses w"),
        (None, "No such file"),
    ],
)
def test_the_command_says_in_one_line_what_it_cannot_read(program, said, tmp_path, capsys):
    if program:
        (tmp_path / "program.txt").write_text(program)
    assert type_checker.main([str(tmp_path / "program.txt")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_the_command_marks_the_first_ill_typed_line(tmp_path, capsys):
    (tmp_path / "program.txt").write_text(BUGS[3].wrong)
    assert type_checker.main([str(tmp_path / "program.txt")]) == 1
    printed = capsys.readouterr().out
    assert " 14  !  shared -= dshared\n" in printed and printed.endswith("ill-typed: shared is R, and dshared is P\n")
    assert type_checker.main([]) == 0 and "All types agree." in capsys.readouterr().out
    done = subprocess.run([sys.executable, type_checker.__file__], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("\n") == 15
