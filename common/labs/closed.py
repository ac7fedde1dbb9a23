"""The closed book: while a student's file runs, it cannot reach what solves or grades its lab.

Python tells an audit hook of each file that is opened, each process that is started and each call into C. Once the book
is closed, all that happens in this process is taken for the student's doing, whatever the stack says, since a file can
give its functions other names. The exceptions are few, and known by the identity of their code. Who reaches for the
book is ended at once, so nothing that the file does afterwards can take it back.

This keeps nobody out who is determined to cheat; it makes sure that nobody passes without knowing that it is cheating.
This file imports nothing of the project: `alone.py` uses it in a process that has none of it.
"""

import _thread
import functools
import importlib._bootstrap as bootstrap
import importlib._bootstrap_external as bootstrap_external
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import NoReturn

REFERENCE = "your file reads the one that it was cut from."
LAB = "your file imports what grades it."
LOOKS = "your file looks at the frames of what calls it."
NAMES = "your file makes code that says it is from another file."
OTHERS = "your file looks into the memory or the files of a process."
RESULTS = "your file opens what its check writes."
WRITTEN = "your file reads what was written while it was checked, and ranks talk by messages, which are counted."
# How other lines end
NEED_NOT = "which it need not."
UNCOUNTED = "and nobody counts that."
MAIN_THREAD = "and a check can only follow the main one."
THREAD = f"your file starts a thread, {MAIN_THREAD}"

PROCESSES = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn")
ELSEWHERE = ("ctypes.", "gc.get_", "mmap.", "socket.bind", "socket.connect")
STARTS = ("_thread.start_",)
MOVES = ("os.link", "os.symlink", "os.rename")
FRAMES = ("sys._current_", "sys.settrace", "sys.setprofile")  # which show those of others
ASK_FOR_OTHERS = "contextlib", "inspect", "common.labs.seen"  # names of modules
ASK_FOR_OTHERS += "torch.utils._python_dispatch", "torch.sparse._semi_structured_ops"
OF_FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")  # attributes that lead to one
IMPORTS = {
    id(each.__code__)
    for each in (bootstrap._call_with_frames_removed, bootstrap_external._compile_bytecode)  # where modules are made
}


def is_refusal(line: str) -> bool:
    """Whether a line for a student says that the file was refused something."""
    return line.endswith((REFERENCE, LAB, LOOKS, NAMES, OTHERS, RESULTS, WRITTEN, NEED_NOT, UNCOUNTED, MAIN_THREAD))


class Closed(BaseException):
    """The student's file reaches for the book. No `except Exception` of it hides that."""


def close(
    root: Path,
    source: Path,
    file: str,
    end: Callable[[str], NoReturn],
    hidden: Collection[str] = (),
    ours: Collection[int] = (),
    results: str = "",
) -> Callable[[str], NoReturn]:
    """From now on, refuse what the student's `file` may not do. A process does this once.

    Args:
        root: the top of the project. source: the file that the starter was cut from.
        end: says why, and ends the process. hidden: names of modules that grade the lab.
        ours: identities of code that may look at frames, and may write into the folder `results`; see `codes_of`.
        results: made by `tempfile`; its name begins like those of other checks, up to a hyphen.

    Returns what refuses.
    """
    mine = os.path.realpath(file)
    folder, theirs, begun = os.path.dirname(mine) + os.sep, of_student(file), time.time()
    kept = os.path.realpath(results) if results else ""
    kept = kept[: kept.rfind("-") + 1]  # what all such folders begin with: beside this one are those of other checks

    def refuse(why: str) -> NoReturn:
        end(why)
        raise Closed(why)

    def forbidden(path) -> str:
        """Why this file may not be opened; nothing if it may. Only the name counts of what is opened by a folder."""
        if not isinstance(path, str | bytes | os.PathLike):
            return ""
        real = os.path.realpath(os.fsdecode(path))
        if real == os.path.realpath(source):
            return REFERENCE
        if real == mine or real.startswith(folder):
            return ""
        name = os.path.basename(real)
        if name == source.name or (name.startswith(f"{source.stem}.") and name.endswith(".pyc")):
            return REFERENCE
        if kept and real.startswith(kept) and not real.startswith(f"{root}{os.sep}"):
            return RESULTS
        if real.startswith("/proc/") and (name in ("mem", "environ", "cmdline") or "/fd/" in real):
            return OTHERS
        inside = os.path.relpath(real, root).split(os.sep) if real.startswith(f"{root}{os.sep}") else [""]
        graders = (
            inside[0] != "runs" and inside[1:2] == ["labs"] and name.partition(".")[0] not in ("given", "__init__")
        )
        return LAB if inside[0] in (".git", "tests") or graders else ""

    def written(path) -> str:
        """Why this file may not be read; nothing if it may. It need not exist."""
        try:
            real = os.path.realpath(os.fsdecode(path))
            found = os.stat(real)
        except (TypeError, ValueError, OSError):
            return ""
        plain = stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode)
        made_up = real == mine or real.startswith(("/proc/", "/sys/"))
        return WRITTEN if plain and not made_up and found.st_ctime >= begun else ""

    looking = set()  # threads that look at their stack, which is an event, too

    def listen(event: str, args: tuple) -> None:
        me = threading.get_ident()
        if me in looking:
            return
        looking.add(me)
        try:
            frame = sys._getframe(1)
            why = reason(event, args, frame)
        finally:
            looking.discard(me)
        if why and id(frame.f_code) not in ours:
            refuse(why)

    def reason(event: str, args: tuple, frame) -> str:
        why = ""
        if event == "open":
            why = forbidden(args[0]) or (args[2] & os.O_ACCMODE != os.O_WRONLY and written(args[0]))
        elif event == "import" and args[1]:  # of a library; what is written in Python is opened, too
            why = written(args[1])
        elif event.startswith(STARTS):
            why = THREAD
        elif event in MOVES:
            why = (forbidden(args[0]) or forbidden(args[1])) and f"your file calls {event}, {NEED_NOT}"
        elif event.startswith(PROCESSES):
            why = f"your file starts a process ({event}), {NEED_NOT}"
        elif event.startswith(ELSEWHERE):
            why = f"your file calls {event}, {NEED_NOT}"
        elif event == "sys._getframe" or event == "object.__getattr__" and args[1] in OF_FRAMES:
            why = LOOKS if asks_itself(frame, theirs) else ""
        elif event.startswith(FRAMES):
            why = LOOKS
        elif event == "code.__new__" or event == "object.__setattr__" and args[1] == "__code__":
            why = NAMES
        elif event == "marshal.loads" or event == "compile" and _misleads(args[1], theirs):
            why = NAMES if id(frame.f_code) not in IMPORTS else ""
        return why

    sources = {".".join(source.with_suffix("").parts[-depth:]) for depth in range(2, len(source.parts))}
    _hide_source(sources)
    _hide_graders(hidden, refuse, theirs)
    if posix := sys.modules.get("_posixsubprocess"):  # by which multiprocessing starts processes, and tells nobody
        posix.fork_exec = refused(f"your file starts a process, {NEED_NOT}", refuse)
    for module in (_thread, threading):  # before Python 3.12, no hook hears of it
        for name in [name for name in vars(module) if name.lstrip("_").startswith("start_")]:
            setattr(module, name, refused(THREAD, refuse))
    sys.addaudithook(listen)
    return refuse


def _hide_source(names: set[str]) -> None:
    """Make it an error to import these, or what has imported something from them."""
    hidden, before = set(names), 0
    while len(hidden) > before:
        before = len(hidden)
        for name, module in list(sys.modules.items()):
            if name.startswith("step") and name not in hidden and module is not None:
                owners = {getattr(each, "__module__", None) or "" for each in vars(module).values() if callable(each)}
                owners |= {each.__name__ for each in vars(module).values() if isinstance(each, type(sys))}
                if not hidden.isdisjoint(owners):
                    hidden.add(name)
    hidden -= {name for name in hidden if name not in names and any(each.startswith(f"{name}.") for each in names)}
    for name in hidden:
        _put(name, None)


def _hide_graders(names: Collection[str], refuse: Callable[[str], NoReturn], theirs: Callable[[str], bool]) -> None:
    """Put modules of which nothing can be had in the place of these."""

    class Hidden(ModuleType):
        def __getattribute__(self, name: str):
            if not name.startswith("__") and asks_itself(sys._getframe(1), theirs):
                refuse(LAB)
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value) -> None:
            refuse(LAB)

    for name in names:
        _put(name, Hidden(name))


def _put(name: str, module: ModuleType | None) -> None:
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if last in vars(sys.modules.get(parent) or object):
        delattr(sys.modules[parent], last)


def refused(why: str, refuse: Callable[[str], NoReturn]) -> Callable:
    """A function in the place of one of which no audit hook hears."""

    def asked(*args, **kwargs):
        refuse(why)

    return asked


def only_for_others(
    call: Callable, why: str, refuse: Callable[[str], NoReturn], theirs: Callable[[str], bool]
) -> Callable:
    """A function that refuses the student's file, and does its work for others."""

    def asked(*args, **kwargs):
        if asks_itself(sys._getframe(1), theirs):
            refuse(why)
        return call(*args, **kwargs)

    return asked


def keep_only(function: FunctionType) -> None:
    """Take from the module of a function all names that it does not use: what it solves, or is graded by."""
    names, used, left = function.__globals__, set(), [function]
    while left:
        for code in _nested(getattr(left[0], "__code__", None)) if isinstance(left[0], FunctionType) else ():
            new = {name for name in code.co_names if name in names} - used
            used |= new
            left += [names[name] for name in new]
        if isinstance(left[0], type):
            left += [each for each in vars(left[0]).values() if isinstance(each, FunctionType)]
        left = left[1:]
    for name in [name for name in names if not name.startswith("__") and name not in used]:
        del names[name]


def codes_of(*modules: ModuleType) -> frozenset[int]:
    """The identities of the code of these modules' functions and methods."""
    own = [each for module in modules for each in vars(module).values() if _of(each) == module.__name__]
    own += [each for kind in own if isinstance(kind, type) for each in vars(kind).values()]
    return frozenset(id(code) for each in own if isinstance(each, FunctionType) for code in _nested(each.__code__))


def _of(value) -> str:
    return getattr(value, "__module__", "") or ""


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _nested(each)


def generated(name: str) -> bool:
    """Whether code of this file name has been made from text, and by none of us."""
    return name.startswith("<") and not name.startswith("<frozen") and not name.endswith("out of sight>")


def of_student(file: str) -> Callable[[str], bool]:
    """What says of the file name of code whether it is the student's: all of a folder, and what is made from text."""
    folder = os.path.dirname(os.path.realpath(file)) + os.sep

    @functools.cache
    def theirs(name: str) -> bool:
        return generated(name) or os.path.realpath(name).startswith(folder)

    return theirs


def _misleads(name, theirs: Callable[[str], bool]) -> bool:
    """Whether code of this name would be taken for that of another file than the student's."""
    name = os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else "<unknown>"
    return not theirs(name)


def asks_itself(frame, theirs: Callable[[str], bool]) -> bool:
    """Whether the student's file asks, perhaps by functions that ask for others."""
    while frame is not None and (
        frame.f_globals.get("__name__") in ASK_FOR_OTHERS or frame.f_code.co_name in ("walk_tb", "walk_stack")
    ):
        frame = frame.f_back
    return frame is not None and theirs(frame.f_code.co_filename)
