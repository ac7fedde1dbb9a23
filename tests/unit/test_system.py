"""Windows and macOS: what they lack is asked for in one place, and what needs it is refused in one line.

Nothing here runs on them. The names are taken away from this system, and the source is searched for them.
"""

import ast
import importlib.util
import json
import os
import platform
import select
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from common.checkpoints import files
from common.errors import UsageError
from common.labs.hunt import Hunt
from common.labs.training import run_jobs
from common.launching import command_line, system
from common.launching.command_line import parse
from step08_5d import fused
from step08_5d.experiments.restart import restart
from step08_5d.kernels import compiled
from step08_5d.planning.sweeps.commands import sweep
from tests.house.test_structure import FILES, ROOT

# Names that Python lacks on Windows, and where they are used although
MISSING = {
    "os": {"fork", "killpg", "setsid", "getpgid", "getuid", "geteuid", "sched_setscheduler", "sched_getaffinity"},
    "signal": {"SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGHUP", "SIGSTOP", "SIGCONT", "alarm", "setitimer"},
    "select": {"poll"},
    "faulthandler": {"register"},
}
MODULES = {"resource", "fcntl", "pwd", "grp", "termios", "pty"}
HANDLED = {
    "common/labs/apart.py": "grade.py asks for os.fork; without it, nothing is apart",
    "common/labs/confined.py": "for recheck.py",
    "common/labs/recheck.py": "grade.py asks for os.fork",
    "common/labs/forks.py": "training.py and hunt.py ask for os.fork",
    "common/launching/process_tree.py": "the sweep asks for os.killpg; the others are tests",
    "common/launching/command_line.py": "asks hasattr",
    "common/start.py": "one is suppressed, one is Linux's",
    "step01_single_gpu/experiments/memory.py": "after it has asked for Linux",
    "step08_5d/experiments/restart.py": "asks",
    "step08_5d/planning/sweeps/calibration_report.py": "asks hasattr",
    "step08_5d/planning/sweeps/sweep.py": "its command asks",
}


def lacking(path: Path) -> set[str]:
    """What a file uses that Windows lacks."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {f"{node.value.id}.{node.attr}"} if node.attr in MISSING.get(node.value.id, ()) else set()
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names} & MODULES
    return found


def test_nobody_uses_what_windows_lacks_without_asking():
    paths = [path for path in FILES if path.relative_to(ROOT).parts[0] != "tests" and path.name != "system.py"]
    users = {path.relative_to(ROOT).as_posix() for path in paths if lacking(path)}
    assert users == HANDLED.keys()
    at_import = [path for path in paths for node in ast.parse(path.read_text(encoding="utf-8")).body
                 if isinstance(node, ast.Import) and {each.name for each in node.names} & MODULES]  # fmt: skip
    assert not at_import, "whoever imports it would be refused everything"


def refuse(path, flags):
    raise PermissionError(13, "Permission denied", str(path))


def pretend(monkeypatch, name: str, changed: dict, *without: str) -> None:
    """A system of this name, whose `os` is changed or lacks something, without /proc and Triton."""
    there = {key: value for key, value in vars(os).items() if key not in without} | changed
    for module in (system, files):
        monkeypatch.setattr(module, "os", SimpleNamespace(**there))
    monkeypatch.setattr(platform, "system", lambda: name)
    monkeypatch.setattr(system, "Path", lambda path: SimpleNamespace(exists=lambda: False))
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)


@pytest.fixture
def windows(monkeypatch):
    pretend(monkeypatch, "Windows", {"name": "nt", "open": refuse}, "fork", "killpg")


@pytest.fixture
def macos(monkeypatch):
    pretend(monkeypatch, "Darwin", {})


def test_on_windows_one_line_says_what_is_missing(windows, tmp_path, monkeypatch, capsys):
    wsl = "which is not here on Windows; in WSL, it runs"
    for call, words in (
        (lambda: run_jobs(tmp_path / "jobs.json"), f"a lab that trains needs os.fork, {wsl}"),
        (lambda: Hunt._wrong_after_fix(None, tmp_path, None), f"a hunt needs os.fork, {wsl}"),
        (lambda: restart(True), f"this experiment needs os.killpg, {wsl}"),
        (lambda: sweep(None), f"a sweep needs os.killpg, {wsl}"),
    ):
        with pytest.raises(UsageError) as refused:
            call()
        assert str(refused.value) == words
    monkeypatch.setattr("sys.argv", ["compiled"])
    assert compiled.main() == 2
    assert capsys.readouterr().err == f"error: the compiler's report needs the package triton, {wsl}\n"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config, gpu = parse(8, []), torch.device("cuda")
    with pytest.raises(UsageError, match=f"^step 8 on a GPU, unless with --no-fused, needs the package triton, {wsl}$"):
        fused.launches_kernels(config, gpu)
    config.fused = False
    assert not fused.launches_kernels(config, gpu)


def test_on_macos_what_needs_proc_or_triton_is_refused(macos, monkeypatch, capsys):
    linux = "which is not here on macOS; it runs on Linux"
    with pytest.raises(UsageError, match=f"^this experiment needs /proc, {linux}$"):
        restart(True)
    monkeypatch.setattr("sys.argv", ["compiled"])
    assert compiled.main() == 2
    assert capsys.readouterr().err == f"error: the compiler's report needs the package triton, {linux}\n"
    system.require("a sweep", system.FORK, system.SESSIONS)  # which it has


def test_windows_saves_without_opening_a_folder(windows, tmp_path):
    """And it cannot ask a pipe whether anybody reads."""
    files._write(tmp_path / "manifest.json", {"a": 1})
    files._flush(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"a": 1}
    with mock.patch.object(command_line, "select", mock.Mock(spec=[each for each in dir(select) if each != "poll"])):
        assert command_line._nobody_reads()


def test_elsewhere_files_and_folders_are_flushed(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    files._write(tmp_path / "manifest.json", {"a": 1})
    files._flush(tmp_path)
    assert len(synced) == 2
