"""`python -m common.labs watch`: check whenever a file is saved, and show hints in place."""

import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common.errors import UsageError

PAUSE = 0.3  # seconds between two looks


def watch(folder: Path, grade: Callable[[], object], hint: Callable[[], object]) -> None:
    """Grade on every save until Ctrl-C. It stays at this lab, also when it is passed.

    Where somebody types, `h` and Enter show the next hint. What is wrong with a file, such as a typo in answer.toml, is
    one line, and watching goes on: the next save may repair it.
    """
    typed = listen()
    help = "; `h` and Enter show a hint" if typed is not None else ""
    print(f"Watching {folder}; Ctrl-C ends it{help}.", flush=True)
    before = None
    while True:
        now = saved(folder)
        if now != before:
            before = now
            print(flush=True)
            _say_errors(grade)
        while typed is not None and not typed.empty():
            if typed.get().strip().lower() in ("h", "hint"):
                _say_errors(hint)
        time.sleep(PAUSE)


def _say_errors(do: Callable[[], object]) -> None:
    try:
        do()
    except (UsageError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"  {error}")
    sys.stdout.flush()


def listen() -> queue.Queue | None:
    """A queue of the lines that are typed from now on; None where nobody types."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None
    lines = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    return lines


def saved(folder: Path) -> dict[Path, float]:
    """When each of the files that a student writes was last changed. (Checks and runs write others.)"""
    found = {}
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".toml", ".csv"):
            try:
                found[path] = path.stat().st_mtime
            except OSError:  # editors replace files
                continue
    return found
