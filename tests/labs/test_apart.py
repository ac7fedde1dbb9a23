"""What runs a student's file sees no process of ours, and nobody's solutions; what is found is kept as it is found."""

import csv
import sys
from pathlib import Path

import pytest

from common.labs import checkout, grade
from common.labs.checkout import OURS, Checked, Limits, Stopped, check_in_copy, packed
from common.labs.find import ROOT
from common.labs.submit import printable
from tests.harness.ranks import run_command
from tests.labs.test_course import ABOUT, TABLE, archive

LOOKS = """
import os, pathlib, signal, sys
from common.labs import apart

folder = pathlib.Path(sys.argv[1])
(folder / "solution.py").write_text("x = 1")
(folder / "labs").mkdir()
(folder / "labs" / "a.py").write_text("x = 1")
reading, writing = os.pipe()
grader = os.getpid()


def look():
    apart.leave_out([folder / "solution.py", folder / "labs"])
    apart.give_up_rights()
    found = sorted(each for each in os.listdir("/proc") if each.isdecimal())
    ways = lambda: os.kill(grader, signal.SIGKILL), lambda: open(f"/proc/{grader}/mem"), lambda: os.write(writing, b"1")
    for way in ways:
        try:
            way()
            found.append("DONE")
        except OSError:
            pass
    found += [(folder / "solution.py").read_text(), *os.listdir(folder / "labs")]
    rights = next(line for line in open("/proc/self/status") if line.startswith("CapEff"))
    (folder / "found").write_text(" ".join([*found, rights]))


print(apart.begin())
apart.apart(look)
print((folder / "found").read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_what_runs_apart(tmp_path):
    done = run_command([sys.executable, "-c", LOOKS, str(tmp_path)], cwd=ROOT, timeout=60)
    if done.stdout.startswith("False"):
        pytest.skip("this system gives no namespace of processes")
    assert done.stdout.split() == ["True", "1", "CapEff:", "0" * 16], done


def hand_in(folder: Path):
    """Two submissions, and the call that grades them."""
    (folder / "inbox").mkdir()
    for number in (7, 8):
        about = ABOUT.replace('"student": 7, "name": "A"', f'"student": {number}, "name": "A\\u001b[31m"')
        files = {"submission.json": about, f"{TABLE.id}/schedule.csv": f"F{number}"}
        archive(folder / "inbox" / f"{number}.zip", **files)
    return lambda *words: grade.main([str(folder / "inbox"), "--out", str(folder / "out"), *words])


def table(folder: Path) -> dict[str, dict]:
    with (folder / "out/grades.csv").open(encoding="utf-8-sig", newline="") as file:
        return {row["number"]: row for row in csv.DictReader(file)}


def test_a_class_that_is_interrupted(tmp_path, monkeypatch, capsys):
    """What was found before is in the table, and `--resume` checks the others alone."""
    checked, run = [], hand_in(tmp_path)

    def check(pristine, asked, limits):
        checked.append(asked[0]["student"])
        if len(checked) == 2:
            OURS.stopped.set()
            raise Stopped
        return [Checked(TABLE.id, 0.5, ["ok: your file starts a process (os.fork), which it need not."])], []

    monkeypatch.setattr(grade, "check_in_copy", check)
    monkeypatch.setattr(grade, "clean_checkout", lambda: None)
    monkeypatch.setattr(OURS, "begin", lambda: None)
    monkeypatch.setattr(grade, "keep_to_itself", lambda: None)
    monkeypatch.setattr(grade.signal, "signal", lambda *_: None)
    assert run() == 143 and "--resume" in capsys.readouterr().err
    rows = table(tmp_path)
    assert (rows["7"]["total"], rows["8"]["total"]) == ("0.500", "0.000") and rows["8"]["notes"].startswith(
        "not checked"
    )
    assert "REFUSED" in rows["7"]["notes"] and rows["7"]["name"] == "A[31m"
    assert run("--resume") == 0 and checked == [7, 8, 8]
    assert table(tmp_path)["8"]["total"] == "0.500" and "REFUSED" in table(tmp_path)["7"]["notes"]
    assert run() == 0 and checked == [7, 8, 8, 7, 8]


def test_a_copy_is_looked_at_after_every_lab(tmp_path, monkeypatch):
    """Whoever changes it in one lab, and changes it back in the next, is found out after the first."""
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean" / "a.py").write_text("x = 1")

    def run(copy, scratch, labs, limits, before):
        (copy / "a.py").write_text("x = 2")
        changed = checkout.changes(copy, before)
        (copy / "a.py").write_text("x = 1")
        return [Checked(labs[0]["id"], 1.0, changed=changed)]

    monkeypatch.setattr(checkout, "_run", run)
    asked = [{"id": id, "student": 1, "files": {}} for id in "ab"]
    results, changed = check_in_copy(packed(tmp_path / "clean"), asked, Limits())
    assert changed == ["a.py"] and [each.fault[:11] for each in results] == ["", "not checked"]


def test_names_do_not_command_a_terminal():
    assert printable("A\x1b[2J\x07\u202eß") == "A[2Jß" and grade.harmless("a\x1b") == "a"
