"""What a rank of a check does: all cases that it takes part in, with the book closed and notes being taken.

It writes each result, or why there is none, into the folder of the check, for whoever has started it.
"""

import contextlib
import importlib.util
import linecache
import multiprocessing
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import torch
import torch.distributed as dist

from common.labs import given as giving
from common.labs import seen, written
from common.labs.apart import give_up_rights
from common.labs.closed import LAB, REFERENCE, close, codes_of, keep_only, of_student
from common.labs.failures import plain_line
from common.labs.find import ROOT, all_labs
from common.labs.seen import Watching, line_of
from common.labs.uncounted import refuse_uncounted
from common.labs.written import Failure, plain, write_failure, write_result

LONGEST = timedelta(seconds=120)  # that gloo waits: by then, the check has ended
MOST = 10_000  # calls of a rank that hangs: it may hang because they never end


def run(
    rank: int,
    folder: str,
    file: str,
    cases: list[SimpleNamespace],
    id: str,
    module: str,
    given: Collection[str],
    texts: dict[str, str],
) -> None:
    """One rank: all cases that it takes part in. Ends this process.

    Args:
        cases: each with a number of `ranks`, and the sizes that the lab asks for.
        id, module: the lab, and which module brings it. given: names of the starter's functions.
        texts: those that it gives out of sight.
    """
    give_up_rights()
    _keep_stderr_for_python()
    multiprocessing.current_process()._args = ()  # these
    warnings.simplefilter("ignore", FutureWarning)  # PyTorch renames functions; each rank would say so
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"], sys.dont_write_bytecode = "1", True  # for another rank, that is a file of this one
    watching, main = [], threading.main_thread().ident
    threading.Thread(target=_watch, args=(watching, main, Path(folder), rank), daemon=True).start()
    leave, write, failed = os._exit, _write, Path(folder, f"failure.{rank}")  # which a file may replace

    def end(why: str) -> NoReturn:
        write(failed, write_failure(Failure("reads the reference", why, time.monotonic())))
        leave(1)

    try:
        this = next(each for each in importlib.import_module(module).LABS if each.id == id)
        run, given_by_us = this.run, giving.prepared(this.source, texts)
        del texts
        refuse = _close_the_book(this, file, given_by_us, end, folder)
        del this
        watching.append(Watching(file, given, refuse))
        student = _load(file)
        for number, case in enumerate(cases):
            if rank >= case.ranks:
                continue
            world = {"store": dist.FileStore(f"{folder}/world.{number}", case.ranks), "world_size": case.ranks}
            dist.init_process_group("gloo", rank=rank, timeout=LONGEST, **world)
            watching.append(Watching(file, given, refuse))
            with watching[-1] as notes:
                values = plain(run(student, case, rank))
            write(Path(folder, f"{number}.{rank}"), write_result(values, notes))
            while not all(Path(folder, f"{number}.{each}").exists() for each in range(case.ranks)):
                time.sleep(0.002)  # so that no rank sees a connection closed
            dist.destroy_process_group()
    except BaseException as error:  # SystemExit too
        if not failed.exists():  # what comes after a hang is its end
            write(failed, write_failure(_failure(error, file, given)))
        leave(1)
    sys.stdout.flush()
    leave(0)  # gloo's threads may still be releasing tensors


def _keep_stderr_for_python() -> None:
    """Let what Python prints arrive as before, and not the last words of C++, which say nothing of a student's file."""
    with contextlib.suppress(OSError):
        sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)


def _load(file: str):
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _close_the_book(
    this, file: str, prepared: Callable, end: Callable[[str], NoReturn], folder: str
) -> Callable[[str], NoReturn]:
    """Give what the lab gives, and take from this process what solves or grades it, and what else it need not hold.

    The process keeps what the lab's `run` uses, and what takes notes. Returns what refuses.
    """
    all_labs.cache_clear()
    modules = [name for name in sys.modules if name.split(".")[1:2] == ["labs"]]
    modules = [name for name in modules if name not in ("common.labs", giving.__name__)]
    ours = codes_of(sys.modules[__name__], seen, written)
    refuse = close(ROOT, ROOT / this.source, file, end, modules, ours, folder)
    giving.given = prepared(refuse)
    refuse_uncounted(refuse, of_student(file))
    keep_only(this.run)
    return refuse


def _failure(error: BaseException, file: str, given: Collection[str]) -> Failure:
    now = time.monotonic()
    if isinstance(error, ImportError) and "None in sys.modules" in str(error):
        return Failure("reads the reference", LAB if ".labs" in str(error) else REFERENCE, now)
    walked = traceback.walk_tb(error.__traceback__)  # opens no file, as `extract_tb` does
    frames = [(at.f_code.co_name, line) for at, line in walked if at.f_code.co_filename == file]
    if isinstance(error, NotImplementedError) and frames:
        return Failure("unwritten", "`{}` is not written yet (line {}).".format(*frames[-1]), now)
    if isinstance(error, SyntaxError) and error.filename == file:
        return Failure("unwritten", f"line {error.lineno} is no Python: {error.msg}.", now)
    where = ""
    if frames:
        inside = frames[-1][0]
        name, line = next((each for each in reversed(frames) if each[0] not in given), frames[-1])
        within = "" if name == inside else f"`{inside}`, which was called in "
        where = f" in {within}{_quoted(file, line)}"
    return Failure("raised", f"raised {type(error).__name__}{where}: {plain_line(error)}", now)


def _watch(watching: list[Watching], main: int, folder: Path, rank: int) -> None:
    """When asked, say where this rank is in the student's file. End this process when its parent has ended."""
    parent = multiprocessing.parent_process()
    while parent.is_alive():
        time.sleep(0.1)
        if (folder / "report").exists() and watching:
            file, calls = watching[-1].file, watching[-1].notes.calls
            line = line_of(file, sys._current_frames()[main], watching[-1].helpers)
            if line:
                last = next((call for call in reversed(calls) if call.line == line), None)
                what = f"waits in {last}, {_quoted(file, line)}" if last else f"is at {_quoted(file, line)}"
                if (waited := watching[-1].waiting) and not last:
                    what = f"waits for its {waited} of line {waited.line}, at {_quoted(file, line)}"
                elif calls and not last:
                    what += f" (the last that it started is {calls[-1]}, line {calls[-1].line})"
                hangs = Failure("hangs", what, time.monotonic(), calls[:MOST])
                _write(folder / f"failure.{rank}", write_failure(hangs))
            return
    os._exit(1)


def _quoted(file: str, line: int) -> str:
    return f"line {line}: `{linecache.getline(file, line).strip()}`" if line else "no line of your file"


def _write(path: Path, content: bytes) -> None:
    """All at once, for those who look whether it is there."""
    part = path.with_suffix(path.suffix + ".part")
    number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # no function between: see `close`
    os.write(number, content)
    os.close(number)
    os.rename(part, path)
