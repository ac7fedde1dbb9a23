"""What a student has done, in a file of the folder `runs/labs`.

Several commands may run at once: `watch` in one terminal, `hint` in another. So none of them writes down what it
remembers. Each says what it changes, and `update` applies that, under a lock, to what the file says by then.
"""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import UsageError
from common.labs.find import ROOT
from common.labs.lab import Lab, Verdict
from common.labs.whole_files import replace

HOME = ROOT / "runs" / "labs"
MOST = 10**9  # a student's number is below: checks multiply it, and PyTorch's seeds have 64 bits
PATIENCE = 10.0  # seconds to wait for another command, which holds the lock for milliseconds


@dataclass
class Progress:
    """In one lab."""

    hints: int = 0  # that were read
    checks: int = 0
    score: float = 0.0  # the best one
    gave_up: bool = False  # the solution was read before the lab was passed
    seconds: float = 0.0  # that the last check took
    student: int = 1  # whose variant was started
    files: str = ""  # a fingerprint of them at the last check
    first: dict = field(default_factory=dict)  # the first answers, stored before anything was measured

    @property
    def passed(self) -> bool:
        return self.score == 1 and not self.gave_up

    def note(self, verdict: Verdict, seconds: float, first: dict, files: str) -> None:
        """Remember a check."""
        self.checks, self.seconds, self.files = self.checks + 1, seconds, files
        self.score = max(self.score, verdict.score)
        self.first = self.first or first


@dataclass
class State:
    """Of one student, who is a number, in one folder."""

    home: Path = HOME
    student: int = 1
    current: str | None = None  # the lab that was started last
    labs: dict[str, Progress] = field(default_factory=dict)  # those that were started
    name: str = ""  # of the student, for a course
    board: str = ""  # the folder of the room's score board

    @classmethod
    def load(cls, home: Path = HOME) -> "State":
        """A new one if the folder has none yet. Raises UsageError if it cannot be read, or holds something else."""
        path = home / "state.json"
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            return cls(home)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read ({error})") from None
        try:
            found = json.loads(text)
            state = _read(cls(home), found, ("student", "current", "name", "board"))
            if not isinstance(found["labs"], dict):
                raise ValueError(f"labs is {found['labs']!r:.40}")
            state.labs = {id: _read(Progress(student=state.student), each) for id, each in found["labs"].items()}
            return state
        except RecursionError:
            raise UsageError(f"{path} is damaged; without it, all labs count as not started") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"{path} is damaged ({error if str(error) else type(error).__name__})"
            raise UsageError(f"{what}; without it, all labs count as not started") from None

    def update(self, change: Callable[["State"], object]) -> None:
        """Apply a change to what the file says now, keep it, and take it over.

        Raises OSError if it cannot be kept: on a full disk, in a read-only folder. The change holds in memory then.
        """
        try:
            with self._locked():
                fresh = State.load(self.home)
                change(fresh)
                fresh._save()
        except OSError:
            change(self)
            raise
        vars(self).update(vars(fresh))

    def try_to_update(self, change: Callable[["State"], object]) -> None:
        """The same, for commands that have something to show in any case: if nothing can be kept, one line says so."""
        try:
            self.update(change)
        except OSError as error:
            print(f"warning: this is not recorded: {self.home}: {error.strerror or error}", file=sys.stderr)
        except UsageError as error:  # the file was damaged meanwhile
            change(self)
            print(f"warning: this is not recorded: {error}", file=sys.stderr)

    def look_again(self, lab: Lab) -> None:
        """Take over what the file says by now, if this lab is still in it: another command may have `reset` it."""
        fresh = State.load(self.home)
        if lab.id in fresh.labs:
            vars(self).update(vars(fresh))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.home / "state.lock", timeout=PATIENCE)
        try:
            lock.acquire()
        except Timeout:
            raise OSError(0, f"another command has held the lock for {PATIENCE:g} s", str(self.home)) from None
        except NotImplementedError:  # a file system without locks
            raise OSError(0, "this file system has no locks", str(self.home)) from None
        try:
            yield
        finally:
            lock.release()

    def _save(self) -> None:
        """Write the file."""
        texts = {"student": self.student, "current": self.current, "name": self.name, "board": self.board}
        texts |= {"labs": {id: asdict(progress) for id, progress in self.labs.items()}}
        text = json.dumps(texts, indent=2) + "\n"
        replace(self.home / "state.json", lambda part: part.write_text(text, encoding="utf-8"))

    def progress(self, lab: Lab) -> Progress:
        """In this lab, which counts as started from now on."""
        return self.labs.setdefault(lab.id, Progress(student=self.student))

    def folder(self, lab: Lab) -> Path:
        return self.home / lab.id

    def word(self, lab: Lab) -> str:
        """What became of a lab so far."""
        progress = self.labs.get(lab.id)
        if progress is None:
            return ""
        if progress.gave_up:
            return "given up"
        if progress.passed:
            return "done"
        if not progress.checks:
            return "started"
        return f"{progress.score:.0%}, {progress.checks} check{'s' if progress.checks > 1 else ''}"


def checked_number(text: str) -> int:
    """A student's number from text. Raises UsageError if it is none."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < MOST):
        short = text if len(text) < 20 else f"{text[:20]}..."
        raise UsageError(f"a student's number is a whole number, at least 0 and below {MOST:,}, not {short!r}")
    return int(text)


def _read(result, found: dict, names: tuple[str, ...] = ()):
    """Set the fields of `result` that a file may have set. Raises ValueError for one of another type or size."""
    for each in fields(result):
        if (names and each.name not in names) or each.name not in found:
            continue
        value, usual = found[each.name], getattr(result, each.name)
        if each.name == "current":
            right = value is None or isinstance(value, str)
        elif isinstance(usual, float):
            right = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            right = right and 0 <= value <= (1 if each.name == "score" else MOST)
        else:
            right = type(value) is type(usual) and not (isinstance(value, int) and not 0 <= value < MOST)
        if not right:
            raise ValueError(f"{each.name} is {value!r:.40}")
        setattr(result, each.name, value)
    if names and "student" not in found:
        raise KeyError("student")
    return result
