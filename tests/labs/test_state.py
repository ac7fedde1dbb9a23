"""What a student has done is kept: with other commands at work, without room on the disk, after a typo."""

import io
import json
import os
import queue
import threading
import time
from pathlib import Path

import pytest

from common.errors import UsageError
from common.labs import __main__ as command
from common.labs import answers, state, watch
from common.labs.lab import Verdict
from common.labs.state import Progress, State
from step05_pipeline.labs.schedule_tables import LABS as TABLES
from tests.labs.test_command import labs  # noqa: F401

ID = "write-01-x"


def test_commands_at_once_lose_nothing(tmp_path):
    """Each begins from what it has read long ago."""

    def read_on(number: int) -> None:
        mine = State.load(tmp_path)
        for _ in range(10):
            mine.update(lambda state: vars(state.labs.setdefault("a", Progress())).update(hints=one_more(state)))

    def one_more(state: State) -> int:
        return state.labs["a"].hints + 1

    threads = [threading.Thread(target=read_on, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert State.load(tmp_path).labs["a"].hints == 40


def test_a_check_keeps_what_was_written_meanwhile(labs, monkeypatch):  # noqa: F811
    labs("start", ID)
    usual = command.find.all_labs()[ID].check

    def slow(lab, folder, student):
        labs("hint", ID)  # in another terminal
        labs("solution", ID, "--give-up")
        return usual(folder, student)

    monkeypatch.setattr(type(command.find.all_labs()[ID]), "check", slow)
    labs("check", ID)
    kept = json.loads((labs.home / "state.json").read_text())["labs"][ID]
    assert (kept["hints"], kept["gave_up"], kept["checks"], kept["score"]) == (1, True, 1, 0.5)


@pytest.mark.parametrize("number", [28, 30])  # no space left; read-only
def test_a_verdict_is_printed_in_any_case(labs, monkeypatch, number):  # noqa: F811
    labs("start", ID)
    before = (labs.home / "state.json").read_text()

    def write_text(self, *_, **__):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "write_text", write_text)
    status, printed = labs("check")
    assert status == 1 and f"{ID}: 50%" in printed and "warning: this is not recorded" in printed
    assert os.strerror(number) in printed and "Traceback" not in printed
    assert (labs.home / "state.json").read_text() == before
    status, printed = labs("hint", ID)
    assert status == 2 and printed.count("\n") == 1 and os.strerror(number) in printed


def test_a_check_is_kept_before_it_is_printed(labs, monkeypatch):  # noqa: F811
    """`check | head -4` closes the pipe."""
    labs("start", ID)

    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(command, "print", closed, raising=False)
    with pytest.raises(BrokenPipeError):
        command.grade(State.load(labs.home), command.find.all_labs()[ID])
    assert State.load(labs.home).labs[ID].checks == 1


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{", '{"student": "7", "labs": {}}', '{"student": true, "labs": {}}', '{"labs": {}}',
        '{"student": 1, "labs": []}', '{"student": 1, "labs": {"a": 3}}', '{"student": -1, "labs": {}}',
        '{"student": 1, "labs": {"a": {"score": "1"}}}', '{"student": 1, "labs": {"a": {"score": 1e999}}}',
        '{"student": 1, "labs": {"a": {"hints": 1.5}}}', '{"student": 1, "labs": {"a": {"checks": [1]}}}',
        '{"student": 1, "current": 3, "labs": {}}', "[" * 100_000, '{"student": 1e400, "labs": {}}', "\x00\xff",
    ],
)  # fmt: skip
def test_a_damaged_record_is_one_line(labs, text):  # noqa: F811
    (labs.home / "state.json").write_text(text, encoding="latin-1")
    status, printed = labs()
    assert status == 2 and printed.startswith("error: ") and printed.count("\n") == 1 and len(printed) < 400
    assert labs("start", ID)[0] == 2 and not (labs.home / ID).exists() or (labs.home / "state.json").read_text()


def test_a_record_of_today_and_of_another_version_is_read(labs):  # noqa: F811
    labs("start", ID)
    path = labs.home / "state.json"
    found = json.loads(path.read_text()) | {"colour": "blue"}
    found["labs"][ID]["mood"] = 3
    del found["labs"][ID]["first"]
    path.write_text("\ufeff" + json.dumps(found), encoding="utf-8")
    assert f"started  {ID}" in labs()[1]


@pytest.mark.parametrize("number", ["9" * 30, "9" * 5000, "-1", "1.5", "seven", "", "1000000000", "٣"])
def test_a_number_that_is_none_is_one_line(labs, number):  # noqa: F811
    status, printed = labs("--student", number)
    assert status == 2 and printed.count("\n") == 1 and len(printed) < 200
    assert labs("--student", "999999999")[0] == 0


def test_a_folder_that_is_gone_comes_back(labs):  # noqa: F811
    labs("start", ID, "--student", "3")
    for each in (labs.home / ID).iterdir():
        each.unlink()
    (labs.home / ID).rmdir()
    status, printed = labs("check", ID)
    assert status == 2 and printed.count("\n") == 1
    labs("start", ID, "--student", "4")
    (labs.home / ID / "answer.txt").write_text("3")
    assert labs("check", ID)[0] == 0, "it keeps the variant with which it was started"


def test_ctrl_c_is_one_line(labs, monkeypatch):  # noqa: F811
    labs("start", ID)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(command.find.all_labs()[ID]), "check", interrupted)
    assert labs("check") == (130, "\nended by Ctrl-C\n")


def test_watch(labs, monkeypatch):  # noqa: F811
    """It goes on after a typo, shows a hint where somebody types `h`, and keeps what others have written."""
    labs("start", ID)
    file, typed, looks = labs.home / ID / "answer.txt", queue.Queue(), []
    lab, usual = command.find.all_labs()[ID], command.find.all_labs()[ID].check

    def check(self, folder, student):
        if file.read_text() == "typo":
            raise UsageError("answer.toml, line 1: no")
        return usual(folder, student)

    def pause(seconds):
        looks.append(seconds)
        for number, text in ((1, "typo"), (2, "1"), (4, None)):
            if len(looks) == number:
                if text is None:
                    raise KeyboardInterrupt
                file.write_text(text)
                (file.parent / f"saved{number}.toml").touch()
        if len(looks) == 3:
            typed.put("h\n")

    monkeypatch.setattr(type(lab), "check", check)
    monkeypatch.setattr(watch, "listen", lambda: typed)
    monkeypatch.setattr(watch.time, "sleep", pause)
    State.load(labs.home).update(lambda state: setattr(state.progress(lab), "hints", 1))
    printed = labs("watch")[1]
    found = [printed.find(part) for part in (f"{ID}: 50%", "line 1: no", f"{ID}: passed", "hint 2 of 3: two")]
    assert -1 not in found and found == sorted(found), printed
    kept = State.load(labs.home).labs[ID]
    assert (kept.hints, kept.checks, kept.score) == (2, 2, 1.0)


def test_what_is_typed_is_heard(monkeypatch):
    terminal = io.StringIO("h\nq\n")
    monkeypatch.setattr("sys.stdin", terminal)
    assert watch.listen() is None, "nobody types into a file"
    terminal.isatty = lambda: True
    lines, deadline = watch.listen(), time.monotonic() + 5
    assert [lines.get(timeout=deadline - time.monotonic()) for _ in "hq"] == ["h\n", "q\n"]


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("271616", 271616), ("271_616", 271616), ("271,616", 271616), ("2 * 4 * 33952", 271616), ("1.5e3", 1500),
        ("2 * 4 * 33,952  # bytes", 271616), ('"135,808"', 135808), ("-(3 - 1) / 4", -0.5), ("2**0.5", 2**0.5),
        ("2^10", 1024), ("3 × 5", 15), ("", None), (".5", 0.5),
    ],
)  # fmt: skip
def test_numbers_that_are_understood(text, value, tmp_path):
    (tmp_path / "answer.toml").write_text(f"\ufeffbytes = {text}\n", encoding="utf-8")
    assert answers.number(answers.read_answers(tmp_path), "bytes") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e999", "too large"), ("9**9**9**9", "too large"), ("inf", "not a number"), ("nan", "not a number"),
        ("1/0", "divides by zero"), ("1,5", "decimal point"), ("12,34", "decimal point"), ("open('x')", "form"),
        ("__import__", "not a number"), ("(" * 3000, "not a number"), ("1" * 5000, "digits"), ("2 *", "not a number"),
        ("1j", "not a number"), ("(-1) ** 0.5", "not a number"), ("True", "not a number"), ('"a" * 9', "form"),
    ],
)  # fmt: skip
def test_numbers_that_are_refused_in_a_line(text, message, tmp_path):
    (tmp_path / "answer.toml").write_text(f"bytes = {text}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=message) as error:
        answers.number(answers.read_answers(tmp_path), "bytes")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "answer.toml").write_bytes(b"why = \xff\xfe\n")
    with pytest.raises(UsageError, match="no text in UTF-8"):
        answers.read_answers(tmp_path)
    (tmp_path / "rows").write_text('{"a": 1}\n{"a": \n[]\n' + "[" * 100_000 + '\n{"b": 2}\n')
    assert answers.kept(tmp_path / "rows") == [{"a": 1}, {"b": 2}]
    assert answers.kept(tmp_path / "none") == []
    assert "cannot be written" in answers.keep(tmp_path, {})


def test_a_table_from_a_spreadsheet(tmp_path, monkeypatch):
    monkeypatch.setattr("step05_pipeline.labs.tables.draw", lambda panels, path, unit: path)
    TABLES[0].write_best(tmp_path, 0)
    path = tmp_path / "schedule.csv"
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")
    assert TABLES[0].check(tmp_path, 0).passed
    path.write_bytes(b"\xff\xfe0")
    assert "UTF-8" in TABLES[0].check(tmp_path, 0).feedback[0]


def test_a_first_answer_stays(labs):  # noqa: F811
    progress = Progress()
    progress.note(Verdict(0.5, ()), 1.0, {"bytes": 3.0}, "")
    progress.note(Verdict(0.2, ()), 1.0, {"bytes": 4.0}, "")
    assert (progress.first, progress.score, progress.checks) == ({"bytes": 3.0}, 0.5, 2)


def test_a_lock_that_never_comes_is_one_line(labs, monkeypatch):  # noqa: F811
    monkeypatch.setattr(state, "PATIENCE", 0.05)
    lock = state.FileLock(labs.home / "state.lock")
    with lock:
        status, printed = labs("start", ID)
    assert status == 2 and "another command" in printed and printed.count("\n") == 1
