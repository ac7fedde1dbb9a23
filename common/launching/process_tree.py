"""A command with everything that it starts, so that nothing of it stays behind.

torchrun gives each rank a session of its own, which a signal to the command's group does not reach. But they all
inherit its environment: a variable there marks them. Who wants to stay behind can drop its environment, and let its
parent end. Linux then gives it to the nearest parent's parent that has asked for such orphans, and so `end_descendants`
finds it. Elsewhere it stays behind.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Set
from pathlib import Path

ADOPT = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
LONGEST = 10.0  # seconds of the race with processes that start others


def new_mark() -> tuple[str, str]:
    """An environment variable, name and value, for a command and what it starts. A command within inherits both marks,
    so whoever kills the outer one also kills the inner one.
    """
    return f"STARTED_TOGETHER_{uuid.uuid4().hex}", "1"


def kill(process: subprocess.Popen, mark: tuple[str, str]) -> None:
    """Kill a command that leads a session, and what it started: its group, and, where there is a /proc, every process
    with `mark` in its environment.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    for number in marked(mark):
        with contextlib.suppress(OSError):  # it ended meanwhile
            os.kill(number, signal.SIGKILL)


def marked(mark: tuple[str, str]) -> list[int]:
    """The processes with `mark` in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if "=".join(mark).encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def adopt_orphans() -> bool:
    """From now on, who loses its parent below this process becomes its child. Returns whether the system does that."""
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0) == 0


def processes() -> dict[int, int]:
    """Of each process its parent, where there is a /proc."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
            text = path.read_text(encoding="utf-8", errors="replace")
            found[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
    return found


def descendants(of: int, besides: Set[int] = frozenset()) -> list[int]:
    """The processes below one, without those of `besides` and what is below these."""
    children, found = {}, []
    for number, parent in processes().items():
        children.setdefault(parent, []).append(number)
    left = [of]
    while left:
        new = [each for each in children.get(left.pop(), ()) if each not in besides]
        found += new
        left += new
    return found


def end_descendants(besides: Set[int] = frozenset()) -> None:
    """Kill what is below this process, except its children of `besides` and what is below them."""
    deadline = time.monotonic() + LONGEST
    while (found := descendants(os.getpid(), besides)) and time.monotonic() < deadline:
        for number in found:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        for number in found:  # the others become children when their parents have ended
            with contextlib.suppress(OSError):
                os.waitpid(number, os.WNOHANG)
        time.sleep(0.005)
