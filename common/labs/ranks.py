"""Runs a student's file on ranks of its own, through several cases, and says what became of them.

Ranks are processes on the CPU that talk over gloo. One set of them serves all cases of a check: for each case, the
first few make a world of their own. When nothing moves any more, every rank reports where it is, and the check ends.
"""

import contextlib
import importlib.util
import linecache
import math
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from common.errors import first_line
from common.labs import given as giving
from common.labs import seen, written
from common.labs.apart import apart, give_up_rights, leave_out
from common.labs.closed import LAB, REFERENCE, STORE, close, codes_of, guarded, keep_only, only_for_others
from common.labs.cut import helpers
from common.labs.failures import TOO_BUSY, describe, plain_line
from common.labs.find import ROOT, all_labs, lab, module_of, names_of_modules, solutions
from common.labs.forks import LINUX, state
from common.labs.given import texts_of
from common.labs.seen import Notes, Watching, line_of
from common.labs.written import Failure, read_failure, read_result, write_failure, write_result

IDLE = 5.0  # seconds for which no rank does anything
BUSY = 10.0  # seconds that a rank computes in one case, which should take a hundredth
LIMIT = 60.0 if LINUX else 15.0  # seconds for a case
GRACE = 2.0  # seconds that ranks have to report, once one has failed
ANSWER = 8.0  # seconds that they have to say where they are, once nothing moves; on a busy machine they need some


class Case(SimpleNamespace):
    """On how many ranks, and with which sizes: `Case(ranks=2, width=12)`. A check adds a `seed`."""

    def __str__(self) -> str:
        sizes = [f"{name} {value}" for name, value in vars(self).items() if name not in ("ranks", "seed")]
        return ", ".join([f"{self.ranks} rank{'s' if self.ranks > 1 else ''}", *sizes])


@dataclass
class Outcome:
    """What became of a check's cases."""

    results: list[list[tuple[dict, Notes]]] = field(default_factory=list)  # per finished case and rank: values, notes
    failure: str = ""  # what ended the first case that is missing


def run_on_ranks(id: str, file: Path, cases: list[Case]) -> Outcome:
    """Let `lab(id).run(module, case, rank)` go through all cases, on ranks that have imported the student's `file`."""
    with tempfile.TemporaryDirectory(prefix="labs-") as folder:
        apart(lambda: _run(Path(folder), id, str(file), cases))
        return _collect(Path(folder), cases)


def _run(folder: Path, id: str, file: str, cases: list[Case]) -> None:
    """Let ranks go through all cases, and wait for their end. What they find is in `folder`."""
    method = "forkserver" if sys.platform == "linux" else "spawn"
    context, this = multiprocessing.get_context(method), lab(id)
    if method == "forkserver":
        # The second is imported by `y.backward(gradient)`: for seconds, and in every rank if it is not here already
        preload = ["common.labs.ranks", "torch.fx.experimental.symbolic_shapes", *names_of_modules()]
        context.set_forkserver_preload(preload)
    given = helpers((ROOT / this.source).read_text(encoding="utf-8"), this.bodies)
    known = id, module_of(id), frozenset(given), texts_of(this.source, this.hidden)
    size = max(case.ranks for case in cases)
    ranks = [context.Process(target=_rank, args=(rank, str(folder), file, cases, *known)) for rank in range(size)]
    try:
        if method == "forkserver":
            _start_fork_server()
            first = context.Process(target=os.getpid)
            first.start()
            first.join()  # by now, the server has imported what it has to
            leave_out(solutions(this.source))
        for process in ranks:
            process.start()
        _wait_for(ranks, folder, len(cases), id)
    finally:
        for process in (each for each in ranks if each.pid):  # after Ctrl-C, some may not have begun
            process.kill()
            process.join()


def _start_fork_server() -> None:
    """Start it deaf to Ctrl-C, which goes to all processes of a terminal: ranks end with whoever has started them."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set what becomes of signals
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, usual)


def _wait_for(ranks: list, folder: Path, cases: int, label: str) -> None:
    """Return when all ranks have ended, or a moment after one has failed or nothing moves any more."""
    finished = [folder / f"{number}.0" for number in range(cases)]
    running = {process.sentinel: process for process in ranks}
    deadline, clock, numbers = math.inf, _Clock(), [process.pid for process in ranks]
    with tqdm(total=cases, desc=f"checking {label}", leave=False, disable=not sys.stderr.isatty()) as bar:
        while running and time.monotonic() < deadline:
            for sentinel in wait(list(running), timeout=0.1):
                process = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    deadline = min(deadline, time.monotonic() + GRACE)
            done = sum(path.exists() for path in finished)
            bar.update(done - bar.n)
            if clock.over(numbers, done) and deadline == math.inf:
                (folder / "report").touch()  # ranks say where they are
                deadline = time.monotonic() + ANSWER
            if (folder / "report").exists() and len(list(folder.glob("failure.?"))) == len(running):
                return


class _Clock:
    """Tells ranks that wait for each other from ranks that wait for a processor, as all do on a busy machine."""

    def __init__(self):
        self.done, self.started, self.used = -1, 0.0, 0.0
        self.samples: list[tuple[float, list[bool]]] = []  # time, and which processes compute or would like to

    def over(self, processes: list[int], done: int) -> bool:
        """Whether these processes have waited for each other, or computed, for too long; they finished `done` cases."""
        now = time.monotonic()
        states = [state(process) for process in processes]
        used = max((seconds for _, seconds in states), default=0.0)
        if done != self.done:
            self.done, self.started, self.used, self.samples = done, now, used, []
        self.samples.append((now, [state in "RD" for state, _ in states]))
        recent = [active for when, active in self.samples if when >= now - IDLE]
        # A rank may look around from time to time while it waits, and so be active in some samples
        idle = now - self.started > IDLE and all(sum(active) < len(recent) / 2 for active in zip(*recent))
        return idle or used - self.used > BUSY or now - self.started > LIMIT


def _collect(folder: Path, cases: list[Case]) -> Outcome:
    outcome = Outcome()
    for number, case in enumerate(cases):
        paths = [folder / f"{number}.{rank}" for rank in range(case.ranks)]
        failures = [folder / f"failure.{rank}" for rank in range(max(case.ranks for case in cases))]
        try:
            results = {rank: read_result(path.read_bytes()) for rank, path in enumerate(paths) if path.exists()}
            found = {rank: read_failure(path.read_bytes()) for rank, path in enumerate(failures) if path.exists()}
        except ValueError as error:
            outcome.failure = f"With {case}: a rank wrote what is no result ({first_line(error)})."
            break
        if len(results) < len(paths):
            finished = {rank: notes for rank, (_, notes) in results.items()}
            before = max((path.stat().st_mtime_ns for path in folder.glob(f"{number - 1}.*")), default=0)
            waits = [rank for rank, each in found.items() if each.kind == "hangs"]
            if waits == [*found] and any(failures[rank].stat().st_mtime_ns < before for rank in waits):
                outcome.failure = f"With {case}: {TOO_BUSY}"  # they have gone on since they said where they wait
                break
            outcome.failure = f"With {case}: {describe(found, finished, case.ranks)}"
            break
        outcome.results.append(list(results.values()))
    return outcome


# ---- what follows runs in the ranks ----------------------------------------------------------------------------------


def _rank(
    rank: int, folder: str, file: str, cases: list[Case], id: str, module: str, given: Collection[str], texts: dict
) -> None:
    """One rank: all cases that it takes part in.

    Args:
        id, module: the lab, and which module brings it. given: names of the starter's functions.
        texts: those that it gives out of sight.
    """
    give_up_rights()
    _keep_stderr_for_python()
    multiprocessing.current_process()._args = ()  # these
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
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
        _close_the_book(this, file, given_by_us, end, folder)
        del this
        watching.append(Watching(file, given))
        student = _load(file)
        for number, case in enumerate(cases):
            if rank >= case.ranks:
                continue
            world = {"store": dist.FileStore(f"{folder}/world.{number}", case.ranks), "world_size": case.ranks}
            dist.init_process_group("gloo", rank=rank, timeout=timedelta(seconds=2 * LIMIT), **world)
            watching.append(Watching(file, given))
            with watching[-1] as notes:
                values = run(student, case, rank)
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


def _close_the_book(this, file: str, prepared: Callable, end: Callable[[str], NoReturn], folder: str) -> None:
    """Give what the lab gives, and take from this process what solves or grades it, and what else it need not hold.

    The process keeps what the lab's `run` uses, and what takes notes.
    """
    all_labs.cache_clear()
    modules = [name for name in sys.modules if name.split(".")[1:2] == ["labs"]]
    modules = [name for name in modules if name not in ("common.labs", giving.__name__)]
    ours = codes_of(sys.modules[__name__], seen, written)
    refuse = close(ROOT, ROOT / this.source, file, end, modules, ours, folder)
    giving.given = prepared(refuse)
    torch.from_file = torch.UntypedStorage.from_file = guarded("maps a file into memory", refuse)
    for name, call in list(vars(dist.Store).items()):
        if not name.startswith("_") and callable(call):
            setattr(dist.Store, name, only_for_others(getattr(dist.Store, name), STORE, refuse, file))
    keep_only(this.run)


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
                _write(folder / f"failure.{rank}", write_failure(Failure("hangs", what, time.monotonic())))
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
