"""Runs a student's file on ranks of its own, through several cases, and says what became of them.

Ranks are processes on the CPU that talk over gloo. One set of them serves all cases of a check: for each case, the
first few make a world of their own. When nothing moves any more, every rank reports where it is, and the check ends.
What a rank does is in `one_rank.py`.
"""

import math
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from common.errors import first_line
from common.labs import one_rank
from common.labs.apart import apart, leave_out
from common.labs.cut import helpers
from common.labs.failures import describe
from common.labs.find import ROOT, lab, module_of, names_of_modules, solutions
from common.labs.forks import LINUX, state
from common.labs.given import texts_of
from common.labs.notes import Notes
from common.labs.written import read_failure, read_result

IDLE = 5.0  # seconds for which no rank does anything
BUSY = 10.0  # seconds that a rank computes in one case, which should take a hundredth
LIMIT = 60.0 if LINUX else 15.0  # seconds for a case
GRACE = 2.0  # seconds that ranks have to report, once one has failed
ANSWER = 8.0  # seconds that they have to say where they are, once nothing moves; on a busy machine they need some
TOO_BUSY = "it was ended although it went on: this machine is too busy to tell. Check once more."


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
    too_busy: bool = False  # that was this machine, so it says nothing of the file


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
        preload = [__name__, "torch.fx.experimental.symbolic_shapes", *names_of_modules()]
        context.set_forkserver_preload(preload)
    given = helpers((ROOT / this.source).read_text(encoding="utf-8"), this.bodies)
    known = id, module_of(id), frozenset(given), texts_of(this.source, this.hidden)
    size = max(case.ranks for case in cases)
    each = [(rank, str(folder), file, cases, *known) for rank in range(size)]
    ranks = [context.Process(target=one_rank.run, args=args) for args in each]
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
                outcome.too_busy = True
                break
            outcome.failure = f"With {case}: {describe(found, finished, case.ranks)}"
            break
        outcome.results.append(list(results.values()))
    return outcome
