"""Nothing that was started stays behind: whoever starts processes ends them, and they end with whoever started them."""

import contextlib
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from common.experiments import local_ranks
from common.labs import one_rank
from common.launching.process_tree import kill, marked, new_mark
from tests.harness.ranks import in_background, wait_for

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True)"


@pytest.mark.parametrize("parent_waits", [True, False])
def test_a_tree_is_killed_without_its_neighbours(parent_waits, tmp_path):
    """Also where a child has a session of its own, ignores SIGTERM, or has lost its parent."""
    mark, other = new_mark(), new_mark()
    code = PARENT + ".wait()" * parent_waits
    process = in_background([sys.executable, "-c", code], tmp_path / "log", dict([mark]))
    neighbour = in_background([sys.executable, "-c", CHILD], tmp_path / "other", dict([other]))
    try:
        assert wait_for(lambda: len(marked(mark)) == 1 + parent_waits and marked(other), 30)
        assert parent_waits or process.wait(30) == 0
    finally:
        kill(process, mark)
    process.wait(30)
    assert wait_for(lambda: not marked(mark), 30) is not None and marked(other) == [neighbour.pid]
    kill(neighbour, other)
    assert neighbour.wait(30) == -9


class Ended(BaseException):
    """What os._exit raises here."""


@pytest.fixture
def exits(monkeypatch) -> list[int]:
    """The statuses with which this process would have ended."""
    found = []

    def end(status):
        found.append(status)
        raise Ended

    monkeypatch.setattr("os._exit", end)
    return found


@pytest.fixture
def threads(monkeypatch) -> list[tuple]:
    """Target and arguments of all threads, which are not started."""
    found = []

    def thread(target, args, daemon):
        assert daemon, "it would keep the process"
        return SimpleNamespace(start=lambda: found.append((target, args)))

    monkeypatch.setattr(threading, "Thread", thread)
    return found


def refuse(*_):
    raise subprocess.SubprocessError("here the rank would begin")


def test_ranks_of_an_experiment_end_with_it(exits, threads, monkeypatch):
    """First of all, each starts a thread that waits for the end of its parent."""
    monkeypatch.setattr(local_ranks, "init_distributed", lambda *_, **__: refuse())
    with pytest.raises(subprocess.SubprocessError):
        local_ranks._rank(0, 1, "folder", print, ())
    ((target, arguments),) = threads
    waits = []
    with contextlib.suppress(Ended):
        target(SimpleNamespace(join=lambda: waits.append("joined")))
    assert waits == ["joined"] and exits == [1] and len(arguments) == 1


def test_ranks_of_a_check_end_with_it(exits, threads, monkeypatch, tmp_path):
    monkeypatch.setattr(one_rank, "give_up_rights", lambda: None)
    monkeypatch.setattr(one_rank.giving, "prepared", refuse)
    with contextlib.suppress(Ended):
        one_rank.run(0, str(tmp_path), "file.py", [], "write-01-a", "step01_single_gpu.labs", (), {})
    ((target, arguments),) = threads
    alive = [True, True, False]
    parent = SimpleNamespace(is_alive=lambda: alive.pop(0))
    monkeypatch.setattr(one_rank.multiprocessing, "parent_process", lambda: parent)
    with contextlib.suppress(Ended):
        target(*arguments)
    assert exits == [1, 1] and not alive, "for its failure; and when the check was gone"
