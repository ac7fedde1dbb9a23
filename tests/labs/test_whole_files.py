"""What a full disk, another command, or Ctrl-C leaves of a student's files: all of them, and nothing by halves."""

import errno
import itertools
import json
import os
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from common.labs import __main__ as command
from common.labs import answers, ctrl_c, submit, watch, whole_files
from common.labs.lab import Verdict
from common.labs.state import Progress, State
from common.labs.whole_files import replace
from tests.labs.test_command import Echo, labs  # noqa: F401

ID = "write-01-x"


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "state.lock"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_fails_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "a.txt"
    replace(path, lambda part: part.write_text("old"))

    def write(part):
        part.write_text("ha")
        raise error

    with pytest.raises(error):
        replace(path, write)
    assert everything(tmp_path) == {path: b"old"}


def test_a_full_disk_leaves_a_lab_as_it_was(labs, monkeypatch):  # noqa: F811
    """No half of a new one is left, and `reset` moves nothing away before it has another one."""
    labs("start", ID)
    (labs.home / ID / "answer.txt").write_text("7")
    before = everything(labs.home)
    monkeypatch.setattr(Echo, "start", full)
    for words in (("start", "hunt-02-x"), ("reset", ID)):
        status, printed = labs(*words)
        assert status == 2 and printed == "error: a file of the labs: No space left on device\n"
        assert everything(labs.home) == before and not list(labs.home.glob("*.part"))


def test_another_start_was_faster(labs, monkeypatch):  # noqa: F811
    usual = Echo.start

    def slow(lab, folder, student):
        monkeypatch.setattr(Echo, "start", usual)
        assert labs("start", ID, "--student", "5")[0] == 0  # in another terminal
        usual(lab, folder, student)

    monkeypatch.setattr(whole_files, "os", SimpleNamespace(getpid=itertools.count(1).__next__))
    monkeypatch.setattr(Echo, "start", slow)
    assert labs("start", ID)[0] == 0 and sorted(path.name for path in (labs.home / ID).iterdir()) == [
        "TASK.md", "answer.txt"
    ]  # fmt: skip
    assert not list(labs.home.glob("*.part"))


def test_a_report_is_shown_if_it_cannot_be_written(labs, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Path, "write_text", full)
    status, printed = labs("report")
    assert status == 0 and ID in printed and "; not written to " in printed and "No space left" in printed


def test_half_a_line_of_rows_costs_no_other(tmp_path):
    """It is what a full disk leaves of a prediction."""
    path = tmp_path / "stored.jsonl"
    path.write_text('{"bytes": 1}\n{"byt')
    answers.keep(path, {"bytes": 3})
    answers.keep(path, {"bytes": 4})
    assert answers.kept(path) == [{"bytes": 1}, {"bytes": 3}, {"bytes": 4}]


def test_a_verdict_is_printed_although_the_record_was_damaged_meanwhile(labs, monkeypatch):  # noqa: F811
    labs("start", ID)

    def check(lab, folder, student):
        (labs.home / "state.json").write_text("{")
        return Verdict(0.25, ("look again.",))

    monkeypatch.setattr(Echo, "check", check)
    status, printed = labs("check")
    assert status == 1 and f"{ID}: 25%" in printed and "warning: this is not recorded: " in printed
    assert (labs.home / "state.json").read_text() == "{", "whoever has damaged it may want to repair it"


def test_watch_checks_the_variant_that_another_command_has_made(labs, monkeypatch):  # noqa: F811
    labs("start", ID)
    looks = []

    def pause(seconds):
        looks.append(seconds)
        if len(looks) == 1:
            labs("reset", ID, "--student", "7")
            (labs.home / ID / "answer.txt").write_text("7")
            (labs.home / ID / "saved.toml").touch()
        if len(looks) == 2:
            (labs.home / "state.json").unlink()
            (labs.home / ID / "more.toml").touch()
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch, "listen", lambda: None)
    monkeypatch.setattr(watch.time, "sleep", pause)
    printed = labs("watch")[1]
    assert printed.count(f"{ID}: passed") == 2, printed


def test_a_prediction_for_another_variant_is_not_the_first_one(labs):  # noqa: F811
    labs("start", ID)
    State.load(labs.home).update(lambda state: setattr(state.labs[ID], "first", {"bytes": 3.0}))
    labs("reset", ID)
    assert State.load(labs.home).labs[ID].first == {"bytes": 3.0}
    labs("reset", ID, "--student", "7")
    assert State.load(labs.home).labs[ID] == Progress(student=7)


@pytest.mark.parametrize("name", [b"\xff.py", b"a:b.py", b"a\nb.csv", b"a\\b.toml"])
def test_a_name_that_nobody_reads_is_one_line(labs, name):  # noqa: F811
    labs("start", ID)
    (labs.home / ID / os.fsdecode(name)).write_text("x = 1\n")
    status, printed = labs("submit")
    assert status == 2 and printed.endswith("rename or remove it\n") and printed.count("\n") == 1
    assert not list(labs.home.glob("submission*"))


def test_a_full_disk_leaves_the_last_submission(labs, monkeypatch):  # noqa: F811
    labs("start", ID)
    (labs.home / ID / "a.py").write_text("x = 1\n")
    labs("submit")
    before = everything(labs.home)
    usual = zipfile.ZipFile.writestr
    monkeypatch.setattr(zipfile.ZipFile, "writestr", lambda *words: usual(*words) or full())
    assert labs("submit") == (2, "error: a file of the labs: No space left on device\n")
    assert everything(labs.home) == before
    monkeypatch.setattr(submit, "WHOLE", 100)
    assert "nobody reads more than" in labs("submit")[1]
    with zipfile.ZipFile(labs.home / "submission-1.zip") as archive:
        assert json.loads(archive.read("submission.json"))["labs"][ID]["files"] == ["a.py"]


def test_ctrl_c_is_put_off_until_all_is_loaded():
    usual = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ctrl_c.put_off()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c.loaded()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ctrl_c.loaded()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctrl_c.put_off()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "in a shell's background"
    finally:
        signal.signal(signal.SIGINT, usual)


def test_a_record_that_cannot_be_read_ends_a_look(labs):  # noqa: F811
    labs("start", ID)
    state = State.load(labs.home)
    (labs.home / "state.json").write_text("[]")
    with pytest.raises(UsageError, match="is damaged"):
        state.look_again(command.find.all_labs()[ID])
