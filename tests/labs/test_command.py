"""The command: from the list to the report, with a lab that takes no time."""

import json
from dataclasses import dataclass

import pytest

from common.labs import __main__ as command
from common.labs import find
from common.labs.lab import Lab, Verdict


@dataclass(frozen=True)
class Echo(Lab):
    """Passed by a file that has the student's number."""

    def start(self, folder, student):
        (folder / "answer.txt").write_text("?\n")

    def check(self, folder, student):
        right = (folder / "answer.txt").read_text().strip() == str(student)
        return Verdict(1.0 if right else 0.5, ("right.",) if right else ("look at your number.",))

    def solution(self, student):
        return f"the answer is {student}"


@pytest.fixture
def labs(monkeypatch, tmp_path, capsys):
    """Calls the command with two such labs; returns its status and what it printed."""
    lab = {
        name: Echo(name, "Echo", 1, "Write your number.", ("one", "two", "three"))
        for name in ("write-01-x", "hunt-02-x")
    }
    monkeypatch.setattr(find, "all_labs", lambda: lab)

    def call(*words):
        status = command.main([*words, "--home", str(tmp_path)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    call.home = tmp_path
    return call


def test_a_course(labs):
    assert labs()[1].endswith("0 of 2 are done. Next: python -m common.labs start write-01-x\n")
    line = "error: write-01-x has not been started: python -m common.labs start write-01-x\n"
    assert labs("check", "write-01-x") == (2, line)
    assert "Write your number." in labs("start", "write-01-x", "--student", "7")[1]
    status, printed = labs("check")  # the one that was started last
    assert status == 1 and "write-01-x: 50%" in printed and "look at your number" in printed
    assert labs("solution", "write-01-x")[0] == 2
    for number in (1, 2, 3, 3):
        printed = labs("hint", "write-01-x")[1]
        assert printed.count("hint ") == number and ("no more hints" in printed) == (number == 3)
    assert "50%, 1 check  write-01-x     Echo  (1 min)  <- current" in labs()[1]
    (labs.home / "write-01-x" / "answer.txt").write_text("7")
    assert labs("check")[0] == 0 and "the answer is 7" in labs("solution", "write-01-x")[1]
    assert "done  write-01-x" in labs()[1]
    (labs.home / "write-01-x" / "stored.jsonl").write_text('{"time": 1.0}\n')
    (labs.home / "write-01-x" / "places.jsonl").write_text('{"line": 1}\n')
    labs("reset", "write-01-x")
    labs("reset", "write-01-x")
    assert (labs.home / "write-01-x" / "answer.txt").read_text() == "?\n"
    assert (labs.home / "write-01-x" / "stored.jsonl").read_text() == '{"time": 1.0}\n', "the first prediction counts"
    assert (labs.home / "write-01-x" / "places.jsonl").read_text() == '{"line": 1}\n', "and so does what was guessed"
    assert (labs.home / "write-01-x.old" / "answer.txt").read_text() == "7"
    assert labs("check", "write-01-x")[0] == 1 and "done  write-01-x" in labs()[1]  # the best score counts
    (labs.home / "state.json").write_text("{}")
    assert labs()[0] == 2, "a damaged record is an error"


def test_who_gives_up_is_on_record(labs):
    labs("start", "hunt-02-x")
    labs("check")
    assert labs("solution", "hunt-02-x", "--give-up") == (0, "the answer is 1\n")
    labs("report")
    found = json.loads((labs.home / "report.json").read_text())
    assert found["student"] == 1 and found["labs"][1] == {
        "id": "hunt-02-x", "score": 0.0, "checks": 1, "hints": 0, "gave_up": True
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    ["start", "start zzz", "start wirte-1-x", "nothing", "strat", "start write-01-x --give-up", "list --student -1"],
)
def test_bad_input_is_one_line(labs, words):
    status, printed = labs(*words.split())
    assert status == 2 and printed.startswith("error: ") and printed.count("\n") == 1
    assert ("did you mean write-01-x?" in printed) == (words == "start wirte-1-x")
    assert ("there is no command strat; did you mean start?" in printed) == (words == "strat")


def test_a_number_is_confirmed(labs):
    assert "\nYou are student 23: " in labs("--student", "23")[1] and "You are" not in labs()[1]


def test_a_lab_that_was_started_keeps_its_number_and_says_so(labs):
    assert "was started as" not in labs("start", "write-01-x", "--student", "7")[1]
    assert "was started as" not in labs("start", "write-01-x")[1]
    line = "write-01-x was started as student 7, and stays what it was; `python -m common.labs reset write-01-x` makes"
    assert labs("start", "write-01-x", "--student", "8")[1].startswith(f"{line} the files of number 8.\n")
    labs("reset", "write-01-x")
    assert "was started as" not in labs("start", "write-01-x")[1]
