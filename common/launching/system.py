"""What an operating system may lack. Whoever cannot do without it asks first, and is refused in one line."""

import importlib.util
import os
import platform
from pathlib import Path

from common.errors import UsageError

FORK, SESSIONS, PROC, TRITON = "os.fork", "os.killpg", "/proc", "the package triton"
_THERE = {
    FORK: lambda: hasattr(os, "fork"),  # not on Windows, nor are sessions
    SESSIONS: lambda: hasattr(os, "killpg"),
    PROC: lambda: Path("/proc/self").exists(),  # Linux only
    TRITON: lambda: importlib.util.find_spec("triton") is not None,  # on PyPI for Linux only
}


def require(who: str, *what: str) -> None:
    """Raise UsageError for the first of `what` (FORK, SESSIONS, PROC, TRITON) that this system lacks.

    Args:
        who: the subject of the error: "a sweep" needs os.killpg.
    """
    for each in what:
        if not _THERE[each]():
            here = {"Darwin": "macOS"}.get(platform.system(), platform.system())
            instead = {"Windows": "in WSL, it runs", "macOS": "it runs on Linux"}.get(here, "pip installs it")
            raise UsageError(f"{who} needs {each}, which is not here on {here}; {instead}")
