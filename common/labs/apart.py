"""Where a submission's processes run: among themselves, without rights over others, and without what solves the labs.

On Linux, `apart` does its work in a namespace of processes with a /proc of its own: nothing that runs there can see the
one that judges it, or end it, and all of it ends with the work. It has mounts of its own as well: what `begin` was told
to hide is not there, and nothing can be written but in one folder; `leave_out` puts nothing in the place of more files,
and `give_up_rights` takes from root what makes it more than another user. Where the system does not allow that, and
where no submission is graded, the work is done all the same. What it finds comes back in files, which is not trusted.
"""

import contextlib
import ctypes
import os
import signal
import site
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

NEW_MOUNTS, NEW_PROCESSES = 0x00020000, 0x20000000  # CLONE_NEWNS, CLONE_NEWPID of <sched.h>
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000  # MS_BIND, MS_REC, MS_PRIVATE of <sys/mount.h>
SET_MOUNTS, HERE, BELOW, READ_ONLY = 442, -100, 0x8000, 1  # mount_setattr, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY
END_WITH_PARENT, DUMPABLE, NO_NEW_RIGHTS = 1, 4, 38  # of <sys/prctl.h>
CAPABILITIES = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
FILES = 1 << 16  # that a process may have open, and more than it has
NOT_ALLOWED = 77  # exit status: the system knows no such namespace, or does not give it to us
OWN = "It saw no processes but its own, and neither this project nor other submissions."
SHARED = "It saw the processes of others, and could read the solutions in this project."

_confined = _inside = False  # whether a submission is checked in this process, and whether it runs in this one
_hidden: list[Path] = []  # folders that are empty for what runs apart
_needed: list[Path] = []  # what lies in them and is there all the same
_links: dict[Path, Path] = {}  # symbolic links on the way to that -> where they lead in the end
_writable: Path | None = None  # a folder; what is beside it cannot be written


def begin(hidden: Iterable[Path] = (), needed: Iterable[Path] = (), writable: Path | None = None) -> bool:
    """From now on, `apart` is. Returns whether the system gives us namespaces of processes and of mounts.

    Args:
        hidden: folders in which nothing is there for a submission. needed: paths that are, besides Python's own.
        writable: a folder, the only one in which it can write, from Linux 5.12 on.
    """
    global _confined, _hidden, _needed, _links, _writable
    _confined = sys.platform == "linux"
    _hidden = [path for path in map(Path.resolve, hidden) if path != path.parent]  # without /
    named = [*needed, *_of_python()]
    _needed, _writable = [path.resolve() for path in named], writable and writable.resolve()
    _links = {link: link.resolve() for path in named for link in _links_to(path)}
    keep_to_itself()
    return _confined and _wait(_fork(lambda: _alone(lambda: None))) == 0


def keep_to_itself() -> None:
    """Let no process of the same user look into this one, except root with its rights."""
    if sys.platform == "linux":
        _library().prctl(DUMPABLE, 0, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Let this process end when the one that has started it ends, however that comes about."""
    if sys.platform == "linux":
        _library().prctl(END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() not in (parent, 0):  # it has ended already; 0: it is in another namespace
            os._exit(1)


def apart(work: Callable[[], None]) -> None:
    """Do what starts a student's file. While a submission is checked, that is in a process of its own.

    It has none of this process's files, so `work` leaves what it finds in files.
    """
    if not _confined:
        work()
    elif _wait(_fork(lambda: _alone(work))) == NOT_ALLOWED:
        _wait(_fork(lambda: _do(work)))


def leave_out(paths: Iterable[Path]) -> None:
    """Put nothing in the place of these files and folders, for all processes apart. They must have been read before."""
    if _inside:
        for path in paths:
            if path.is_dir():
                _library().mount(b"none", os.fsencode(path), b"tmpfs", 0, b"size=4k")
            elif path.exists():
                _library().mount(b"/dev/null", os.fsencode(path), None, BIND, None)


def give_up_rights() -> None:
    """Keep no more rights than any user has, if this process is apart, nor get them back by a program."""
    if not _confined:
        return
    library = _library()
    library.prctl(NO_NEW_RIGHTS, 1, 0, 0, 0)
    library.capset((ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)())


def _alone(work: Callable[[], None]) -> int:
    """Do it as the first process of a namespace: when that ends, so does all that it has started."""
    if _library().unshare(NEW_MOUNTS | NEW_PROCESSES):
        return NOT_ALLOWED
    return _wait(_fork(lambda: _first(work)))


def _first(work: Callable[[], None]) -> int:
    global _inside
    library = _library()
    library.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None)
    if library.mount(b"proc", b"/proc", b"proc", 0, None) or not all(map(_hide, _hidden)):
        return NOT_ALLOWED  # some containers hide a part of /proc
    if _writable and not library.mount(os.fsencode(_writable), os.fsencode(_writable), None, BIND | RECURSIVE, None):
        _set_mounts(Path("/"), READ_ONLY, 0)
        _set_mounts(_writable, 0, READ_ONLY)
    _inside = True
    return _do(work)


def _hide(folder: Path) -> bool:
    """Mount an empty folder over this one, and what is needed back into it. Returns whether that worked."""
    if not folder.is_dir():
        return True  # it is within one that is hidden already
    library, here = _library(), os.getcwd()
    kept = {path: os.open(path, os.O_PATH) for path in sorted(_needed) if folder in path.parents and path.exists()}
    if library.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=1m"):
        return False
    for path, number in kept.items():
        source = Path(f"/proc/self/fd/{number}")
        if not path.exists():  # it is not within one that is back already
            (path if source.is_dir() else path.parent).mkdir(parents=True, exist_ok=True)
            path.touch()
            if library.mount(os.fsencode(source), os.fsencode(path), None, BIND | RECURSIVE, None):
                return False
        os.close(number)
    for link, target in _links.items():
        if folder in link.parents and not os.path.lexists(link):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
    os.chdir(here)  # from the folder as it was, `..` would lead to what is hidden
    return True


def _links_to(path: Path) -> Iterator[Path]:
    """The symbolic links on the way of a path: an environment may be one, and Python goes by its name."""
    here = Path("/")
    for part in path.absolute().parts[1:]:
        here /= part
        if here.is_symlink():
            yield here
            here = here.resolve()


def _set_mounts(path: Path, new: int, old: int) -> None:
    """Give flags to what is mounted here and below, and take others."""
    number, *where = (ctypes.c_long(each) for each in (SET_MOUNTS, HERE))
    flags = (ctypes.c_uint64 * 4)(new, old, 0, 0)  # struct mount_attr
    _library().syscall(number, *where, os.fsencode(path), ctypes.c_long(BELOW), flags, ctypes.c_long(32))


def _of_python() -> list[Path]:
    """Where Python and its packages are, which may be a folder of the project."""
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(sys.executable), *site.getsitepackages()]
    return [*map(Path, own), Path(sys.prefix, "pyvenv.cfg"), *(Path(each) for each in sys.path if each)]


def _do(work: Callable[[], None]) -> int:
    work()
    return 0


def _fork(work: Callable[[], int]) -> int:
    """Let a process of its own do it, which has no open files but the usual three. Returns its number."""
    parent, number = os.getpid(), os.fork()
    if number:
        return number
    status = 1
    try:
        end_with_parent(parent)
        keep_to_itself()
        os.closerange(3, FILES)
        status = work()
    except BaseException:
        with contextlib.suppress(BaseException):
            sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _wait(number: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
