"""What runs a student's file sees no process of ours, and nobody's solutions, and has limits."""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from common.labs import apart, checkout, grade, recheck
from common.labs.checkout import Checked, Limits, check_in_copy, packed
from common.labs.find import ROOT, lab
from tests.harness.ranks import run_command
from tests.labs.test_course import slow

LOOKS = """
import os, pathlib, signal, sys
from common.labs import apart

folder = pathlib.Path(sys.argv[1])
(folder / "solution.py").write_text("x = 1")
(folder / "labs").mkdir()
(folder / "out").mkdir()
(folder / "labs" / "a.py").write_text("x = 1")
project = folder / "project"  # a teacher's, with an environment, and with a copy in it that is being checked
for each in "step03", "env", "runs/graded/rows", "runs/labs-x/project":
    (project / each).mkdir(parents=True)
    (project / each / "a.py").write_text("x = 1")
os.chdir(project / "runs/labs-x")
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
    found += map(str, pathlib.Path("../..").glob("step*"))
    found += [str(each.relative_to(folder)) for each in sorted(project.rglob("*.py"))]
    try:
        (folder / "beside").write_text("x = 1")
        found.append("WRITTEN")
    except OSError:
        pass
    rights = next(line for line in open("/proc/self/status") if line.startswith("CapEff"))
    (folder / "out" / "found").write_text(" ".join([*found, rights]))


hidden = [project, project / "runs/graded"]
print(apart.begin(hidden, [project / "env", project, project / "runs/labs-x"], folder / "out"))
apart.apart(look)
print((folder / "out" / "found").read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_what_runs_apart(tmp_path):
    done = run_command([sys.executable, "-c", LOOKS, str(tmp_path)], cwd=ROOT, timeout=60)
    if done.stdout.startswith("False"):
        pytest.skip("this system gives no namespace of processes")
    there = ["project/env/a.py", "project/runs/labs-x/project/a.py"]
    assert done.stdout.split() == ["True", "1", *there, "CapEff:", "0" * 16], done


LINKED = """
import os, pathlib, sys
from common.labs import apart

folder = pathlib.Path(sys.argv[1])
project, elsewhere = folder / "project", folder / "elsewhere"
for each in project / "step03", elsewhere / "env/bin":
    each.mkdir(parents=True)
    (each / "a.py").write_text("x = 1")
(project / "second").symlink_to(elsewhere)
(project / "environment").symlink_to("second/env")
(folder / "other name").symlink_to(project)
named = folder / "other name/environment/bin"
print(apart.begin([project], [named]))
apart.apart(lambda: (folder / "found").write_text(f"{os.listdir(named)} {os.listdir(project)}"))
print((folder / "found").read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_an_environment_that_is_a_link_is_still_there(tmp_path):
    """Python goes by its name, which leads through a folder that is hidden."""
    done = run_command([sys.executable, "-c", LINKED, str(tmp_path)], cwd=ROOT, timeout=60)
    if done.stdout.startswith("False"):
        pytest.skip("this system gives no namespace of processes")
    assert done.stdout.splitlines()[1] == "['a.py'] ['environment']", done


@pytest.mark.parametrize("fault", ["", "No module named 'torch'"])
def test_nobody_is_graded_where_python_does_not_run(fault, tmp_path, monkeypatch):
    (tmp_path / "clean").mkdir()
    monkeypatch.setattr(checkout, "_run", lambda _, scratch, labs, *rest: [Checked(labs[0]["id"], fault=fault)])
    if not fault:
        return checkout.try_out(packed(tmp_path / "clean"), Limits())
    with pytest.raises(UsageError, match=f"does not run where submissions are checked.*{fault}"):
        checkout.try_out(packed(tmp_path / "clean"), Limits())


def test_what_keeps_python_from_running(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho first >&2\necho \"No module named 'torch'\" >&2\nexit 1\n")
    script.chmod(0o700)
    for executable, why in ((script, "No module named 'torch'"), (tmp_path / "nowhere", "No such file")):
        monkeypatch.setattr(recheck.sys, "executable", str(executable))
        assert why in recheck.attempt(tmp_path / "said")


LOOKS_FOR = {  # the last line of a check, and whether it tells of a look at what is hidden
    "raised FileNotFoundError in line 7: [Errno 2] No such file or directory: '/teacher/course/step03/sketch.py'": True,
    "raised RuntimeError in line 7: unable to open file </teacher/inbox/2.zip> in read-only mode: No such file": True,
    "raised FileNotFoundError in line 7: [Errno 2] No such file or directory: '/home/me/data.csv'": False,
    "raised OSError in line 7: /teacher/course/.venv/lib/libtorch.so: cannot open": False,
    "raised OSError in line 7: /teacher/courses/a": False,
    "Numbers and mechanism are right.": False,
}


@pytest.mark.parametrize("line", LOOKS_FOR)
def test_whoever_looks_for_the_project_is_named(line, monkeypatch):
    monkeypatch.setattr(grade.sys, "prefix", "/teacher/course/.venv")
    hidden = Path("/teacher/course"), Path("/teacher/inbox"), Path(tempfile.gettempdir())
    assert bool(grade.looks_for(Checked("a", feedback=["It is wrong.", line]), hidden)) == LOOKS_FOR[line]


def test_the_project_may_lie_among_what_is_temporary(monkeypatch):
    """As in a clone for an afternoon; and a check's own files are still its own."""
    monkeypatch.setattr(grade.tempfile, "gettempdir", lambda: "/tmp")
    for name, told in (("course", True), ("labs-1", False), ("courses", False)):
        said = Checked("a", feedback=[f"No such file: '/tmp/{name}/sketch.py'"])
        assert bool(grade.looks_for(said, (Path("/tmp/course"), Path("/tmp")))) == told, name


READS = {  # text of a file, by ways of which no audit hook hears
    "from_file": "bytes(torch.ops.aten.from_file({0!r}, False, {1}, dtype=torch.uint8).tolist()).decode()",
    "readline": "'\\n'.join((r := __import__('readline')).clear_history() or r.read_history_file({0!r}) or "
    "[r.get_history_item(i + 1) or '' for i in range(r.get_current_history_length())])",
}
MANY = {  # what a training of a hunt may not do, and what is said of it
    "it had more than 64 processes at once": "for _ in range(100): os.fork() or (time.sleep(60), os._exit(0))",
    "it wrote more than 1 GB into files": "for each in range(20): "
    "os.posix_fallocate(os.open(tempfile.mkstemp()[1], os.O_WRONLY), 0, 1 << 27)",
}
HUNT = """
import os, runpy, sys
if os.path.exists({0!r}):
    os.chdir({1!r})
    sys.path[0] = {1!r}
    runpy.run_path({0!r}, run_name="__main__")
    raise SystemExit
"""


@slow
@pytest.mark.parametrize("way", [*READS, "hunt"])
def test_the_project_of_whoever_grades_is_not_there(way, tmp_path):
    """It holds the solution, and `sys.prefix` may say where it is."""
    if way == "hunt":
        id, file = "hunt-02-a", "step02_data_parallel/train.py"
        lab(id).start(tmp_path, 1)
        head, mark, tail = (tmp_path / file).read_text().partition("\nimport ")
        code = head + HUNT.format(str(ROOT / file), str(ROOT)) + mark + tail
    else:
        id, file, path = "write-03-a", "sketch.py", ROOT / "step03_zero/sketch.py"
        lab(id).start(tmp_path, 1)
        text = READS[way].format(str(path), path.stat().st_size)
        cut = 'partition("\\ndef train_step")[2].partition("\\ndef train(")[0]'
        code = f"{(tmp_path / file).read_text()}\n\nexec('def train_step' + ({text}).{cut})\n"
    asked = [{"id": id, "student": 1, "files": {file: code.encode()}}]
    ((found,), _) = check_in_copy(checkout.clean_checkout(), asked, Limits())
    if apart.OWN not in found.network:
        pytest.skip("this system gives no namespace of processes")
    assert found.score == 0, found
    assert way != "readline" or grade.looks_for(found, Limits().hidden), found


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody knows how many processes a check has")
@pytest.mark.parametrize("fault", MANY)
def test_how_much_a_check_may_start_and_write(fault, tmp_path):
    id, file = "hunt-02-a", "step02_data_parallel/train.py"
    lab(id).start(tmp_path, 1)
    head, mark, tail = (tmp_path / file).read_text().partition("\nimport ")
    code = f"{head}\nimport os, tempfile, time\n{MANY[fault]}\ntime.sleep(60){mark}{tail}"
    ((found,), _) = check_in_copy(
        checkout.clean_checkout(), [{"id": id, "student": 1, "files": {file: code.encode()}}], Limits()
    )
    assert (found.score, found.fault) == (0, fault), found


LATE = """#!{}
import json, sys, time
time.sleep(1)
job = json.load(sys.stdin)
print(job["word"], json.dumps({{"id": job["labs"][0]["id"], "score": 1.0}}))
"""


def test_a_check_that_begins_late_is_told_all(tmp_path, monkeypatch):
    """As on a busy machine, with more than a pipe holds."""
    script = tmp_path / "python"
    script.write_text(LATE.format(sys.executable))
    script.chmod(0o700)
    monkeypatch.setattr(checkout, "sys", SimpleNamespace(executable=str(script)))
    found = checkout._run(tmp_path, tmp_path, [{"id": "a"}], Limits(), {str(each): "0" * 64 for each in range(20_000)})
    assert [each.score for each in found] == [1.0]


def test_limits_of_a_check(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(10_000))
    limit = SimpleNamespace(over=lambda number: number == 3)
    assert recheck._over(os.getpid(), limit, tmp_path, 9) == ""
    assert recheck._over(3, limit, tmp_path, 9) == "it was not through after 9 s"
    monkeypatch.setattr(recheck, "WRITTEN", 9_999)
    assert recheck._over(os.getpid(), limit, tmp_path, 9).startswith("it wrote more than")
    monkeypatch.setattr(recheck, "descendants", lambda _: range(65))
    assert recheck._over(os.getpid(), limit, tmp_path, 9).startswith("it had more than 64 processes")
