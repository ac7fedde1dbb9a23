"""A command with everything that it starts, so that nothing of it stays behind.

torchrun gives each rank a session of its own, which a signal to the command's group does not reach. But they all
inherit its environment: a variable there marks them.
"""

import contextlib
import os
import signal
import subprocess
import uuid
from pathlib import Path


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
