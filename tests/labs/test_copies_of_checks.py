"""What one submission does to the checks, or leaves running, does not reach the submissions after it."""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.labs import apart, checkout
from common.labs.find import ROOT, lab
from common.launching.process_tree import processes
from tests.harness.ranks import run_command

TABLE, TYPES, HUNT = lab("schedule-05-a"), lab("write-04-c"), lab("hunt-01-a")
slow = pytest.mark.skipif(not os.environ.get("TEST_ALL"), reason="TEST_ALL")


def test_a_change_holds_for_one_submission_alone(tmp_path, monkeypatch):
    """Whoever runs changes each copy of the checks that it finds, wherever the grader may have put one."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "checks.py").write_text("right = 1\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    pristine, seen = checkout.packed(tmp_path / "project"), []

    def changes(copy, scratch, labs, limits, before):
        seen.append((copy / "checks.py").read_text())
        for path in (tmp_path / "tmp").rglob("checks.py"):
            path.write_text("right = 0\n")
        return [checkout.Checked(each["id"], score=1.0) for each in labs]

    asked = [{"id": TABLE.id, "student": 1, "files": {}}]
    monkeypatch.setattr(checkout, "_run", changes)
    for _ in range(3):
        assert checkout.check_in_copy(pristine, asked, checkout.Limits())[1] == ["checks.py"]
    assert seen == ["right = 1\n"] * 3, "a submission has changed the checks of the next one"
    monkeypatch.setattr(checkout, "_run", lambda copy, *others: [checkout.Checked(TABLE.id)])
    assert checkout.check_in_copy(pristine, asked, checkout.Limits())[1] == []


def test_a_process_that_is_gone_takes_no_other_lab_along(tmp_path, monkeypatch):
    """The process that checks died at the first lab, so another one goes on with the second."""
    (tmp_path / "project").mkdir()
    rounds = iter([[], [checkout.Checked(TABLE.id, score=1.0)]])
    monkeypatch.setattr(checkout, "_run", lambda *_: next(rounds))
    asked = [{"id": id, "student": 1, "files": {}} for id in (TYPES.id, TABLE.id)]
    (gone, other), changed = checkout.check_in_copy(checkout.packed(tmp_path / "project"), asked, checkout.Limits())
    assert (gone.score, gone.fault) == (0, "it ended the process that checks it") and other.score == 1 and not changed


def test_a_check_that_waits_for_a_processor_has_time(monkeypatch):
    """What counts is said by a `Clock`, up to a limit on real time."""
    now, seen = [100.0], []
    monkeypatch.setattr(checkout, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limit = checkout.Limit(8)
    limit.clock = SimpleNamespace(passed=lambda processes: seen.append(processes) or 1.0)
    now[0] += 60  # of which the clock has counted 1
    assert not limit.over(os.getpid()) and seen[0][0] == os.getpid()
    now[0] += 21
    assert limit.over(os.getpid()), "in real time, it is ten times too late"
    limit = checkout.Limit(2)
    limit.clock = SimpleNamespace(passed=lambda processes: 1.0)
    assert [limit.over(os.getpid()) for _ in range(2)] == [False, True]


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", sys.argv[1]], {})
    os._exit(0)
time.sleep(0.2)
"""
ADOPTS = f"""
import subprocess, sys
from common.launching.process_tree import adopt_orphans, end_descendants, processes
assert adopt_orphans()
mine = subprocess.Popen(["sleep", "987"])
subprocess.run([sys.executable, "-c", {DAEMON!r}, sys.argv[1]])
end_descendants({{mine.pid}})
print(mine.poll(), [number for number, parent in processes().items() if parent == mine.pid])
mine.kill()
"""


def sleepers(seconds: str) -> list[int]:
    """Processes that sleep for just so long: those of this test."""
    found = []
    for number in processes():
        try:
            if Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", seconds.encode()]:
                found.append(number)
        except OSError:
            pass
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_daemon_without_environment_is_ended():
    seconds = f"9{os.getpid()}"
    done = run_command([sys.executable, "-c", ADOPTS, seconds], timeout=60)
    assert done.stdout == "None []\n" and not sleepers(seconds), done


@slow
def test_who_kills_its_judge_or_changes_it():
    """A file that ends or changes what judges it counts as 0, whether or not it gets that far, and the others go on.

    What is handed in kills, and changes, what it has for parents and for its own folder alone, since this machine may
    be grading for somebody else: it ends the processes above it that are of its own session, and of the next one, in
    which the process that checks is alone.
    """
    kills = """
import os
number, sessions, judges = os.getppid(), [os.getsid(0)], []
while number > 1:
    above, _, session = open(f"/proc/{number}/stat").read().rpartition(")")[2].split()[1:4]
    sessions += [int(session)] * (int(session) not in sessions)
    judges += [number] * (len(sessions) <= 2)
    number = int(above)
for number in judges[::-1]:
    os.kill(number, 9)
"""
    pristine, name = checkout.clean_checkout(), os.path.basename(TYPES.source)
    assert "common/labs/grade.py" in pristine.digests and not any(path.startswith("tests") for path in pristine.digests)
    with tempfile.TemporaryDirectory() as folder:
        TABLE.write_best(Path(folder), 1)
        table = (Path(folder) / "schedule.csv").read_bytes()
    tables = {"id": TABLE.id, "student": 1, "files": {"schedule.csv": table}}
    asked = [{"id": TYPES.id, "student": 1, "files": {name: kills.encode()}}, tables]
    results, changed = checkout.check_in_copy(pristine, asked, checkout.Limits(30))
    assert [result.score for result in results] == [0, 1] and not changed, results
    alone = results[1].network.endswith(apart.OWN)  # then it sees nobody whom it could end
    assert "ended the process" in results[0].fault or alone, results
    for file, refused in (("common/labs/lab.py", "your file imports what grades it"), ("common/model.py", "")):
        changes = "from pathlib import Path\nabove = (each / 'project' for each in Path.cwd().parents)\n"
        changes += f"open(next(each for each in above if each.is_dir()) / '{file}', 'a').write('# mine')\n"
        asked = [{"id": TYPES.id, "student": 1, "files": {name: changes.encode()}}, tables]
        results, changed = checkout.check_in_copy(pristine, asked, checkout.Limits(30))
        expected = refused or ("Read-only file system" if alone else "")
        assert expected in " ".join(results[0].feedback), results
        assert changed == ([] if refused or alone else [file]), results


@slow
def test_a_hunt_that_leaves_a_daemon_behind():
    seconds, file = f"8{os.getpid()}", "step01_single_gpu/mixed_precision.py"
    code = (ROOT / file).read_text() + DAEMON.replace("sys.argv[1]", repr(seconds))
    asked = [{"id": HUNT.id, "student": 1, "files": {file: code.encode()}}]
    checkout.check_in_copy(checkout.clean_checkout(), asked, checkout.Limits(60))
    assert not sleepers(seconds)
