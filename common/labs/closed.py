"""The closed book: while a student's file runs, it cannot reach what solves or grades its lab.

Python tells an audit hook of each file that is opened, each process that is started and each call into C. Here such a
call is refused if it comes from the student's file and leads to the file that its starter was cut from, to a copy of
it, or to the lab itself. What a thread does that began after the book was closed comes from the student's file, too.
Whoever catches the error is told all the same, because `refused` remembers it. This keeps nobody out who is determined
to cheat; it makes sure that nobody passes without knowing that it is cheating.

This file imports nothing of the project: `alone.py` uses it in a process that has none of it.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

REFERENCE = "your file reads the one that it was cut from."
LAB = "your file imports what grades it."
LOOKS = "your file looks at the frames of what calls it."
refused: list[str] = []  # why, for each call that was refused

PROCESSES = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn")
ELSEWHERE = ("ctypes.", "os.link", "os.symlink", "os.rename", "gc.get_")
FRAMES = ("sys._current_", "sys.settrace", "sys.setprofile")  # which show those of others
OF_FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")  # attributes that lead to one


class Closed(BaseException):
    """The student's file reaches for the book. No `except Exception` of it hides that."""


def close(root: Path, source: Path, file: str, also: tuple[str, ...] = ()) -> None:
    """From now on, refuse what the student's `file` may not do. A process does this once.

    Args:
        root: the top of the project. source: the file that the starter was cut from.
        also: names of modules that grade the lab.
    """
    mine = os.path.realpath(file)
    folder = os.path.dirname(mine) + os.sep
    _hide_modules({".".join(source.with_suffix("").parts[-depth:]) for depth in range(2, len(source.parts))}, also)
    if posix := sys.modules.get("_posixsubprocess"):  # by which multiprocessing starts processes, and tells nobody
        posix.fork_exec = guarded("starts a process")
    ours = {thread.ident for thread in threading.enumerate()}
    looking = set()  # threads that look at their stack, which is an event, too

    def listen(event: str, args: tuple) -> None:
        why, only_itself, me = "", False, threading.get_ident()
        if me in looking:
            return
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            why = _forbidden(os.fsdecode(args[0]), root, source, mine, folder)
        elif event.startswith(PROCESSES):
            why = f"your file starts a process ({event}), which it need not."
        elif event.startswith(ELSEWHERE):
            why = f"your file calls {event}, which it need not."
        elif event == "sys._getframe" or event == "object.__getattr__" and args[1] in OF_FRAMES:
            why, only_itself = LOOKS, True
        elif event.startswith(FRAMES):
            why = LOOKS
        if why:
            looking.add(me)
            frame = sys._getframe(1)
            try:
                asks = _asks_itself(frame, file) if only_itself else me not in ours or _on_stack(frame, file)
            finally:
                looking.discard(me)
            if asks:
                refuse(why)

    sys.addaudithook(listen)


def _hide_modules(names: set[str], also: tuple[str, ...]) -> None:
    """Make it an error to import these, or what has imported something from them."""
    hidden, before = {*names, *also}, 0
    while len(hidden) > before:
        before = len(hidden)
        for name, module in list(sys.modules.items()):
            if name.startswith("step") and name not in hidden and module is not None:
                owners = {getattr(each, "__module__", None) or "" for each in vars(module).values() if callable(each)}
                owners |= {each.__name__ for each in vars(module).values() if isinstance(each, type(sys))}
                if not names.isdisjoint(owners) or name.startswith("step") and not hidden.isdisjoint(owners):
                    hidden.add(name)
    hidden -= {name for name in hidden if name not in names and any(each.startswith(f"{name}.") for each in names)}
    for name in hidden:
        sys.modules[name] = None
        parent, _, last = name.rpartition(".")
        if last in vars(sys.modules.get(parent) or object):
            delattr(sys.modules[parent], last)


def refuse(why: str) -> None:
    refused.append(why)
    raise Closed(why)


def guarded(does: str) -> Callable:
    """A function in the place of one of which no audit hook hears."""

    def read(*args, **kwargs):
        refuse(f"your file {does}, which it need not.")

    return read


def _forbidden(path: str, root: Path, source: Path, mine: str, folder: str) -> str:
    """Why a student's file may not open this one; nothing if it may."""
    real = os.path.realpath(path)
    if real == os.path.realpath(source):
        return REFERENCE
    if real == mine or real.startswith(folder):
        return ""
    name = os.path.basename(real)
    if name == source.name or (name.startswith(f"{source.stem}.") and name.endswith(".pyc")):
        return REFERENCE
    inside = os.path.relpath(real, root).split(os.sep) if real.startswith(f"{root}{os.sep}") else [""]
    graders = inside[0] != "runs" and inside[1:2] == ["labs"] and name.partition(".")[0] not in ("given", "__init__")
    return LAB if inside[0] in (".git", "tests") or graders else ""


def _asks_itself(frame, file: str) -> bool:
    """Whether the student's file asks for a frame, perhaps by a function that hands out frames."""
    while frame is not None and (
        frame.f_globals.get("__name__") == "inspect" or frame.f_code.co_name in ("walk_tb", "walk_stack")
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == file


def _on_stack(frame, file: str) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False
