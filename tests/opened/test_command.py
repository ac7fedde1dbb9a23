"""`python -m tests.opened` counts what a micro-batch goes through, and nothing else."""

import pytest

from tests.harness.ranks import ROOT
from tests.opened import __main__ as command
from tests.opened.entered import Function, default_command, on_ranks, table, totals

STEP = "step02_data_parallel"


@pytest.fixture(scope="module")
def entered() -> set[Function]:
    return on_ranks(2, *default_command(2))


def test_functions_of_a_step(entered):
    """The loop, the model, the mechanism and the collectives are entered; what builds and records them is not."""
    names = set()
    for file, first, last in entered:
        lines = (ROOT / file).read_text().splitlines()[first - 1 : last]
        names |= {(file, line.split("def ")[1].split("(")[0]) for line in lines if line.lstrip().startswith("def ")}
    some = [
        (f"{STEP}/train.py", "train_step"),
        (f"{STEP}/data_parallel.py", "accumulate"),
        ("common/model.py", "forward"),
    ]
    assert names >= {*some, ("common/collectives.py", "all_reduce")}
    others = [(f"{STEP}/train.py", "build"), (f"{STEP}/data_parallel.py", "fill_buckets")]
    assert not names & {*others, ("common/process_groups.py", "build_mesh")}
    assert all(file.startswith(("common/", "step01", "step02")) for file, *_ in entered)


def test_lines_are_counted_once(entered):
    rows = table(entered)
    assert [file for file, *_ in rows] == sorted({each.file for each in entered})
    for file, lines, functions, covered in rows:
        assert lines == len((ROOT / file).read_text().splitlines()) and 0 < functions <= covered <= lines
    inner, outer = Function("Makefile", 3, 5), Function("Makefile", 2, 9)
    assert [row[2:] for row in table([inner, outer, Function("Makefile", 11, 11)])] == [[2, 9]]
    assert totals([["a", 10, 2, 5], ["b", 20, 1, 7]]) == [2, 30, 3, 12]


def test_the_command(capsys, monkeypatch):
    functions = {Function("Makefile", 2, 9), Function("README.md", 1, 1)}
    monkeypatch.setattr(command, "on_ranks", lambda step, ranks, flags: functions if (step, ranks) == (4, 2) else None)
    assert command.main(["4"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["file", "Makefile", "README.md", "files:"]
    assert printed[-1].split()[-2:] == ["2", "9"]
    monkeypatch.setattr(command, "on_ranks", lambda step, ranks, flags: functions)
    assert command.main([]) == 0 and len(capsys.readouterr().out.splitlines()) == 9


def test_flags_in_place_of_the_default_command(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(command, "on_ranks", lambda *given: seen.append(given) or {Function("Makefile", 2, 9)})
    for line in ("5", "5 --ranks 4 --pp 2 --tp 2", "5 --zero 1", "1"):
        assert command.main(line.split()) == 0
    assert seen == [(5, 2, "--pp 2"), (5, 4, "--pp 2 --tp 2"), (5, 1, "--zero 1"), (1, 1, "")]


@pytest.mark.parametrize("line", ["9", "x", "--pp 2", "--ranks 2", "5 --ranks no"])
def test_bad_input_gets_one_line(line, capsys):
    assert command.main(line.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1
