"""A class hands in, and is graded: ten submissions, of which two cheat, one hangs, one is empty, one is no archive."""

import csv
import io
import json
import os
import re
import shutil
import stat
import zipfile
from datetime import datetime

import pytest

from common.errors import UsageError
from common.labs import __main__ as command
from common.labs import checkout, confined, grade, grades, recheck, submit
from common.labs.checkout import Checked
from common.labs.find import ROOT, lab
from common.labs.roster import hours_late, read_roster
from common.labs.state import State
from step05_pipeline.labs import tables
from tests.harness.ranks import run_command, run_ranks

TABLE, TYPES = lab("schedule-05-a"), lab("write-04-c")
slow = pytest.mark.skipif(not os.environ.get("TEST_ALL"), reason="TEST_ALL")


def student(folder, number: int, *ids: str):
    """Start labs as a student, and return the home."""
    home = folder / f"student{number}"
    for id in ids:
        words = ["start", id, "--student", str(number), "--name", f"S{number}", "--home", str(home)]
        assert command.main(words) == 0
    return home


def edit(home, change) -> None:
    """Edit submission.json within a submission, as somebody who cheats."""
    (path,) = home.glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    about = json.loads(files["submission.json"])
    change(about)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (files | {"submission.json": json.dumps(about)}).items():
            archive.writestr(name, content)


def make_class(folder):
    """Ten students. Returns the folder of what they have handed in, and the roster."""
    inbox, reference = folder / "inbox", (ROOT / TYPES.source).read_text()
    inbox.mkdir()
    for number in range(1, 11):
        home = student(folder, number, TYPES.id, TABLE.id)
        file = home / TYPES.id / os.path.basename(TYPES.source)
        starter = file.read_text()
        if number in (1, 2, 8, 9):
            file.write_text(f"# {number}\n{reference}")  # right
            TABLE.write_best(home / TABLE.id, number)
        if number == 3:  # the record says what is not so
            file.write_text(f"{starter}\nx = 1\n")
            State.load(home).update(lambda state: setattr(state.labs[TYPES.id], "score", 1.0))
        if number == 4:
            file.write_text(f"exec(open({str(ROOT / TYPES.source)!r}).read())\n")
        if number == 5:
            file.write_text("import time\ntime.sleep(1000)\n")
            TABLE.write_best(home / TABLE.id, number)
        if number == 10:
            file.write_text(f"{reference}\nimport os\nos._exit(3)\n")
        assert command.main(["submit", "--home", str(home)]) == 0
        if number == 9:
            edit(home, lambda about: about["labs"][TABLE.id].update(student=1))
        if number != 7:
            shutil.copy(home / f"submission-{number}.zip", inbox / f"upload_{number}.zip")
    (inbox / "upload_7.zip").write_text("I am no archive")
    lines = [f"{number};S{number};{'2030-03-01 19:30' if number == 8 else ''}" for number in range(1, 12)]
    (folder / "class.csv").write_text("\ufeffNumber;Name;Submitted\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return inbox, folder / "class.csv"


def check_job(labs, folder, seconds, memory):
    tables.draw = lambda panels, path, unit: path  # in this process, which ends soon
    job = {"folder": folder, "seconds": seconds, "memory": memory, "hidden": []}
    return [{"id": each["id"]} | recheck.check_confined(job, each) for each in labs]


def forked(copy, scratch, labs, limits, before):
    """In place of a process that imports all labs: one of the harness, which has done that."""
    (found,) = run_ranks(1, check_job, labs, str(scratch), limits.seconds, limits.memory)
    return [Checked(**each) for each in found]


def graded(folder, *words):
    inbox, roster = make_class(folder)
    out = ["--out", str(folder / "out"), "--deadline", "2030-03-01 18:00", "--roster", str(roster)]
    assert command.main(["grade", str(inbox), *out, *words]) == 0
    with (folder / "out" / "grades.csv").open(encoding="utf-8-sig", newline="") as file:
        return {row["number"] or row["file"]: row for row in csv.DictReader(file)}


def assert_grades(folder, rows):
    scores = {number: (row[TYPES.id], row[TABLE.id]) for number, row in rows.items()}
    for number in "128":  # the types without the bugs
        assert scores[number] == ("0.700", "1.000"), rows[number]
    assert float(scores["3"][0]) < 1 and "its record says 100%" in rows["3"]["notes"]
    assert scores["4"][0] == "0.000" and "reads the" in (folder / "out/results/4.json").read_text()
    assert scores["5"] == ("0.000", "1.000"), "a lab that hangs does not take the others along"
    assert scores["10"][0] == "0.000"
    assert "it is empty" in rows["6"]["notes"] and rows["6"]["file"] == "upload_6.zip"
    assert rows["7"]["notes"] == rows["11"]["notes"] == "nothing was handed in"
    assert "no ZIP archive" in rows["upload_7.zip"]["notes"]
    assert (rows["8"]["late_hours"], rows["1"]["late_hours"]) == ("1.5", "0.0")
    assert scores["9"] == ("0.700", "0.000") and "variant of number 1" in rows["9"]["notes"]
    assert "the same code as number 1, 8, 9" in rows["2"]["notes"]
    found = json.loads((folder / "out/results/1.json").read_text())
    assert found["score"] == 1.7 and {(test["name"], test["status"]) for test in found["tests"]} == {
        (TYPES.id, "failed"), (TABLE.id, "passed")
    }  # fmt: skip
    page = (folder / "out" / "marker.html").read_text()
    assert "<script" not in page and "1 S1: 1.70" in page and "the same code" in page


def test_a_class(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkout, "_run", forked)
    monkeypatch.setattr(checkout.OURS, "begin", lambda: None)  # the tests go on in this process
    (tmp_path / "nothing").mkdir()
    monkeypatch.setattr(grade, "clean_checkout", lambda: checkout.packed(tmp_path / "nothing"))
    monkeypatch.setattr(grade, "try_out", lambda *_: None)
    rows = graded(tmp_path, "--seconds", "4")
    assert_grades(tmp_path, rows)
    assert re.search(r"^(Each submission|Only Python's) .*\. It saw .*\.$", capsys.readouterr().out, re.MULTILINE)


@slow
def test_a_class_in_clean_checkouts(tmp_path):
    assert_grades(tmp_path, graded(tmp_path, "--seconds", "40"))


# ---- one file --------------------------------------------------------------------------------------------------------


def archive(path, **files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in files.items():
            target.writestr(name, content)
    return path


ABOUT = '{"student": 7, "name": "A", "made": "2030-01-01T00:00:00+00:00", "labs": {}}'


def test_what_is_submitted(tmp_path):
    home = student(tmp_path, 7, TABLE.id, "hunt-01-a")
    (home / TABLE.id / "schedule.csv").write_text("F0,B0\n")
    (home / "hunt-01-a" / "common" / "model.py").write_text("# repaired\n")
    (home / "hunt-01-a" / "runs").mkdir()
    (home / "hunt-01-a" / "runs" / "x.csv").write_text("left by a run")
    State.load(home).update(lambda state: vars(state.labs[TABLE.id]).update(hints=2, first={"bytes": 3.0}))
    assert command.main(["submit", "--home", str(home)]) == 0
    found = submit.read_submission(home / "submission-7.zip")
    assert {id: set(files) for id, files in found.files.items()} == {
        TABLE.id: {"schedule.csv"}, "hunt-01-a": {"common/model.py"}
    }  # fmt: skip
    assert found.about["name"] == "S7" and found.about["labs"][TABLE.id]["hints"] == 2
    assert found.about["labs"][TABLE.id]["first"] == {"bytes": "3.0"} and not found.left_out
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(home / "submission-7.zip").extractall(unpacked)
    assert submit.read_submission(unpacked)[1:] == found[1:], "Gradescope unpacks what it is given"
    (home / TABLE.id / "schedule.csv").write_text("F0" * submit.LARGEST)
    assert command.main(["submit", "--home", str(home)]) == 2
    assert command.main(["submit", "--home", str(tmp_path / "nobody")]) == 2


def test_a_lab_that_has_changed_since_its_check_is_named(tmp_path, capsys):
    """A folder may hold a right answer whose check was of a wrong one."""
    home = student(tmp_path, 7, TABLE.id, "hunt-01-a")

    def changed() -> str:
        assert command.main(["submit", "--home", str(home)]) == 0
        return capsys.readouterr().out.rpartition("never checked: ")[2]

    assert "Hand in" in changed(), "as they were at the start, there is nothing to check"
    (home / TABLE.id / "schedule.csv").write_text("F0,B0\n")
    assert changed() == f"{TABLE.id}.\n"
    assert command.main(["check", TABLE.id, "--home", str(home)]) == 1
    assert "Hand in" in changed()
    (home / TABLE.id / "schedule.csv").write_text("F0,B0,\n")
    assert changed() == f"{TABLE.id}.\n"


@pytest.mark.parametrize(
    "name",
    [
        "../evil.py", "/etc/evil.py", f"{TABLE.id}/../../evil.py", f"{TABLE.id}\\..\\evil.py", "C:/evil.py",
        f"{TABLE.id}/./a.py", f"{TABLE.id}//a.py", "write-99-z/a.py", f"{TABLE.id}/a.sh", f"{TABLE.id}/a\n.py", "a.py",
    ],
)  # fmt: skip
def test_paths_that_are_not_taken(name, tmp_path):
    found = submit.read_submission(archive(tmp_path / "a.zip", **{"submission.json": ABOUT, name: "x"}))
    assert not found.files and len(found.left_out) == 1


def test_archives_that_are_refused(tmp_path):
    path = tmp_path / "a.zip"
    many = {f"{TABLE.id}/{number}.py": "" for number in range(submit.FILES)}
    large = {f"{TABLE.id}/{number}.py": "0" * submit.LARGEST for number in range(17)}
    for files, message in (
        ({}, "no submission.json"), (many | {"submission.json": ABOUT}, "files"),
        (large | {"submission.json": ABOUT}, "unpacked"), ({"submission.json": "{"}, "damaged"),
        ({"submission.json": "[1]"}, "damaged"), ({"submission.json": '{"student": 1e9}'}, "damaged"),
        ({"submission.json": '{"student": "7"}'}, "damaged"), ({"submission.json": "[" * 90_000}, "damaged"),
    ):  # fmt: skip
        with pytest.raises(submit.Unreadable, match=message):
            submit.read_submission(archive(path, **files))
    content = path.read_bytes()
    for broken in (b"", content[:-30], b"PK\x03\x04" + content, os.urandom(1000)):
        path.write_bytes(broken)
        with pytest.raises(submit.Unreadable):
            submit.read_submission(path)
    archive(path, **{"submission.json": ABOUT, f"{TABLE.id}/a.py": "0" * (submit.LARGEST + 1)})
    assert "more than" in submit.read_submission(path).left_out[0]
    link = zipfile.ZipInfo(f"{TABLE.id}/a.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        target.writestr("submission.json", ABOUT)
        target.writestr(link, "/etc/passwd")
    path.write_bytes(buffer.getvalue())
    assert not submit.read_submission(path).files


def test_what_a_submission_says_of_itself(tmp_path):
    labs = {TABLE.id: {"student": "x", "hints": -1, "checks": 1e99, "score": "1", "gave_up": 1, "first": [1]}, "x": {}}
    about = json.dumps({"student": 7, "name": "=cmd()\n" + "x" * 999, "commit": 3, "labs": labs})
    found = submit.read_submission(archive(tmp_path / "a.zip", **{"submission.json": about}))
    usual = {"student": 7, "hints": 0, "checks": 0, "score": 0.0, "gave_up": False, "first": {}}
    assert found.about["labs"] == {TABLE.id: usual} and len(found.about["name"]) == 80
    assert grades.harmless("=cmd()") == "'=cmd()" and grades.harmless(3) == 3


# ---- roster, limits, board -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line"), ("name,points\n", "first line"), ("number,name\nx,A\n", "line 2"),
        ("number,name\n1,A\n1,B\n", "is A's already"),
        ("number,name,deadline\n1,A,soon\n", "line 2: 'soon' is no time"),
        ("number,name\n99999999999999999999,A\n", "line 2"),
    ],
)  # fmt: skip
def test_rosters_that_are_refused_in_a_line(text, message, tmp_path):
    (tmp_path / "class.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_roster(tmp_path / "class.csv")


def test_how_late_is_late(tmp_path):
    (tmp_path / "class.csv").write_text("Email,number,name,Deadline\nx,7,Ada,2030-01-02T12:00:00Z\n,,,\n")
    deadline = read_roster(tmp_path / "class.csv")[7].deadline
    for text, hours in (("2030-01-02T12:00:00+00:00", 0), ("2030-01-02T12:01:00+00:00", 0.1)):
        assert hours_late(datetime.fromisoformat(text), deadline) == hours
    assert hours_late(datetime.fromisoformat("2030-01-03T07:00:00-06:00"), deadline) == 25
    assert hours_late(None, deadline) == 0


CONNECTS = """
import pathlib, socket, sys
from common.labs import confined
if sys.argv[2] == "guard":
    confined.own_network = lambda: False
print(confined.confine(pathlib.Path(sys.argv[1]), 5, 1))
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
for address in (("192.0.2.1", 9), ("example.org", 80)):
    try:
        socket.create_connection(address, 1)
    except TimeoutError:
        print("OPEN")
    except OSError as error:
        print(type(error).__name__, error)
try:
    bytearray(2 * 10**9)
except MemoryError:
    print("no memory")
"""


@pytest.mark.parametrize("way", ["as it can", "guard"])
def test_a_confined_process(way, tmp_path):
    done = run_command([os.sys.executable, "-c", CONNECTS, str(tmp_path), way], cwd=ROOT, timeout=60)
    assert "OPEN" not in done.stdout and done.returncode == 0, done
    assert done.stdout.startswith(confined.GUARD if way == "guard" else (confined.GUARD, confined.NAMESPACE))
    if os.sys.platform == "linux":
        assert done.stdout.endswith("no memory\n"), done


@pytest.mark.parametrize(
    "words", ["", "nowhere", ". --labs write-99-z", ". --deadline soon", ". --jobs 0", ". --roster nowhere", ". --x"]
)
def test_bad_flags_of_grade_are_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["grade", *words.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1
