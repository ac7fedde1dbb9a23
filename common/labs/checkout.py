"""Clean checkouts of the project, in which submissions are checked: none uses the student's copy of the checks.

The clean checkout is kept in memory, with its digests, so nothing that runs while a submission is checked can reach it.
Each submission gets a copy of its own, which is compared with these digests after every lab.
"""

import base64
import compileall
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from common.labs.find import ROOT
from common.labs.forks import Clock
from common.launching.process_tree import adopt_orphans, descendants, end_descendants, kill, new_mark

START = 60.0  # seconds that the process may take besides its checks
LOOK = 0.25  # seconds after which one looks again whether a check has taken too long
PATIENCE = 10  # as many times as long may a check take in all, while it waits for a processor
CODE = ("common", "step0*")
ATTEMPT = "attempt"  # in the place of a lab: whether Python runs where submissions are checked


@dataclass(frozen=True)
class Limits:
    """Of the check of one lab."""

    seconds: float = 180.0  # without those for which it waits for a processor
    memory: float = 8.0  # GB, of each process
    hidden: tuple[Path, ...] = (ROOT,)  # folders that it does not see


class Limit:
    """Tells when a process, with all that it has started, has taken so many seconds: those of a `Clock`.

    So nobody's score depends on what else the machine does. To be sure of an end, real time has a limit as well.
    """

    def __init__(self, seconds: float):
        self.left, self.end, self.clock = seconds, time.monotonic() + PATIENCE * seconds, Clock()

    def over(self, process: int) -> bool:
        self.left -= self.clock.passed([process, *descendants(process)])
        return self.left <= 0 or time.monotonic() >= self.end


@dataclass
class Checked:
    """What became of one lab."""

    id: str
    score: float = 0.0
    feedback: list[str] = field(default_factory=list)
    fault: str = ""  # why its check did not come to an end
    unsure: bool = False  # that was this machine, so the score is no grade yet
    unjudged: bool = False  # nothing of it came to its end, or is there yet; the first line says what
    seconds: float = 0.0
    network: str = ""
    changed: list[str] = field(default_factory=list)  # files of the checkout that differ after it


class Stopped(Exception):
    """Grading was asked to end."""


class Checkout(NamedTuple):
    """Files of the project, as they were when it was made."""

    archive: bytes  # a tar
    digests: dict[str, str]  # by path

    def write(self, folder: Path) -> Path:
        """Unpack it into `folder`, which it makes. Returns the folder."""
        folder.mkdir()
        _unpack(self.archive, folder)
        return folder


def clean_checkout() -> Checkout:
    """The project's last commit, compiled; without git, the files as they are here."""
    with tempfile.TemporaryDirectory(prefix="labs-") as made:
        folder = Path(made)
        try:
            command = ["git", "-C", str(ROOT), "archive", "HEAD"]
            _unpack(subprocess.run(command, capture_output=True, check=True).stdout, folder)
        except (OSError, subprocess.CalledProcessError):
            for part in (path for pattern in CODE for path in ROOT.glob(pattern)):
                shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in folder.iterdir():
            if path.name not in {each.name for pattern in CODE for each in folder.glob(pattern)} and path.is_dir():
                shutil.rmtree(path)  # tests hold solutions, and no check needs them
        compileall.compile_dir(folder, quiet=2)
        return packed(folder)


def packed(folder: Path) -> Checkout:
    """The files of a folder, in memory."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", encoding="utf-8") as archive:
        archive.add(folder, ".")
    return Checkout(content.getvalue(), digests(folder))


def _unpack(content: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(content), encoding="utf-8") as archive:
        archive.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(folder)


def digests(folder: Path) -> dict[str, str]:
    """Of all files of a checkout, by path."""
    return {str(path.relative_to(folder)): _digest(path) for path in folder.rglob("*") if path.is_file()}


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # whoever changed it took away the right to read it
        return ""


def try_out(pristine: Checkout, limits: Limits) -> None:
    """Start Python where submissions are checked: if that fails, all of them would, and none should pay for it.

    Raises UsageError if it does.
    """
    with tempfile.TemporaryDirectory(prefix="labs-", ignore_cleanup_errors=True) as folder:
        copy, scratch = pristine.write(Path(folder) / "project"), Path(tempfile.mkdtemp(dir=folder))
        job = [{"id": ATTEMPT, "student": 0, "files": {}}]
        found = _run(copy, scratch, job, Limits(memory=limits.memory, hidden=limits.hidden), pristine.digests)
    fault = found[0].fault if found else "the process that checks ended"
    if fault:
        raise UsageError(f"{sys.executable} does not run where submissions are checked, so none can be: {fault}")


def check_in_copy(pristine: Checkout, asked: list[dict], limits: Limits) -> tuple[list[Checked], list[str]]:
    """Check labs of one submission. Returns what became of each, and which files of the checkout have changed.

    Args:
        asked: for each lab its `id`, the `student` whose variant it is, and `files`, bytes by path.

    Raises Stopped if grading was asked to end.
    """
    results, left = [], [lab | {"files": _encoded(lab["files"])} for lab in asked]
    if not left:
        return [], []
    if OURS.stopped.is_set():  # before a copy is unpacked
        raise Stopped
    with tempfile.TemporaryDirectory(prefix="labs-", ignore_cleanup_errors=True) as folder:
        copy = pristine.write(Path(folder) / "project")
        while left:
            if OURS.stopped.is_set():
                raise Stopped
            found = _run(copy, Path(tempfile.mkdtemp(dir=folder)), left, limits, pristine.digests)
            results += found
            left = left[len(found) :]
            if left and len(found) == 0:
                results.append(Checked(left.pop(0)["id"], fault="it ended the process that checks it"))
            changed = {*changes(copy, pristine.digests), *(name for each in results for name in each.changed)}
            if changed:  # perhaps changed back by now
                results += [Checked(lab["id"], fault="not checked, as its copy had changed") for lab in left]
                return results, sorted(changed)
    return results, []


def changes(folder: Path, before: dict[str, str]) -> list[str]:
    """Which files of a checkout are not what they were."""
    after = digests(folder)
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


class _Ours:
    """The children that this process knows. Another one is an orphan, whose submission has killed the parent."""

    def __init__(self):
        self.lock, self.numbers, self.adopts = threading.Lock(), set(), False
        self.stopped, self.running = threading.Event(), {}

    def begin(self) -> None:
        self.numbers |= set(descendants(os.getpid()))
        self.adopts = adopt_orphans()

    def stop(self) -> None:
        """End all checks, and begin none."""
        self.stopped.set()
        for process, mark in list(self.running.values()):
            kill(process, mark)

    def end_orphans(self, ended: int) -> None:
        with self.lock:
            self.numbers.discard(ended)
            if self.adopts:
                end_descendants(self.numbers)


OURS = _Ours()


def _encoded(files: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def _run(copy: Path, scratch: Path, labs: list[dict], limits: Limits, before: dict[str, str]) -> list[Checked]:
    """Let a process check labs, one after the other. Returns those that it came to the end of.

    It ends after one that has changed the copy, whose digests were `before`. Raises Stopped if it is to end before.
    """
    word, mark = uuid.uuid4().hex, new_mark()
    job = {
        "parent": os.getpid(),
        "word": word,
        "labs": labs,
        "folder": str(scratch),
        "digests": before,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "hidden": [str(path.resolve()) for path in limits.hidden],
    }
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TZ") if name in os.environ}
    environment |= {"HOME": str(scratch), "TMPDIR": str(scratch), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": LOOP}
    environment |= {"MPLCONFIGDIR": str(copy.parent / "fonts"), "PYTHONDONTWRITEBYTECODE": "1", mark[0]: mark[1]}
    command = [sys.executable, "-m", "common.labs.recheck"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with OURS.lock, tempfile.TemporaryFile() as input:  # no pipe: `communicate` gives up the rest of it after a timeout
        input.write(json.dumps(job).encode())
        input.seek(0)
        process = subprocess.Popen(command, cwd=copy, env=environment, stdin=input, start_new_session=True, **pipes)
        OURS.numbers.add(process.pid)
        OURS.running[process.pid] = process, mark
    if OURS.stopped.is_set():
        kill(process, mark)
    text, limit = None, Limit(START + len(labs) * (limits.seconds + 5))
    try:
        while text is None:
            try:
                text, _ = process.communicate(timeout=LOOK)
            except subprocess.TimeoutExpired as error:
                text = (error.stdout or b"") if limit.over(process.pid) else None
    finally:
        kill(process, mark)
        process.wait()
        process.stdout.close()
        OURS.running.pop(process.pid)
        OURS.end_orphans(process.pid)
    if OURS.stopped.is_set():
        raise Stopped
    lines = [line.split(" ", 1) for line in text.decode(errors="replace").splitlines()]
    return [Checked(**json.loads(rest[0])) for first, *rest in lines if first == word and rest]


LOOP = "lo0" if sys.platform == "darwin" else "lo"  # over which ranks talk: they may have no other network
