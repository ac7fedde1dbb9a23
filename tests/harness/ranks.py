"""Run a function on several ranks, or a command line: nothing stays behind, and a failure shows everything.

Starting a world costs little but not nothing: let one function go through many cases. In a rank `assert` is plain
Python's: give it a message, or return values and compare them in the test. The fork server imports the test module:
what starts threads (datasets) is to be imported inside functions. So is what takes long (transformers); where a test
module has names of such modules in `PRELOAD`, the fork server imports them, so that not every rank has to.
"""

import atexit
import json
import math
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from common.launching.process_tree import kill, new_mark
from tests.harness.fork_server import MARGIN

ROOT = Path(__file__).resolve().parent.parent.parent
SERVER_TIME = 120.0  # seconds that the fork server may take for its own start and imports
SHOWN_OUTPUT = 4000  # characters of what a failed rank printed, from its end


class RankFailure(Exception):
    """Ranks failed. `failures` tells what became of each, first failure first."""

    def __init__(self, headline: str, failures: dict[int, str]):
        super().__init__("\n".join([headline, *failures.values()]))
        self.failures = failures


class CommandTimeout(Exception):
    """A command ran past its timeout and was killed. The message has what it had written."""


def run_ranks(world: int, function: Callable, *args, timeout: float = 120, **kwargs) -> list:
    """Call `function(*args, **kwargs)` on `world` new ranks (gloo, CPU, one thread each); results by rank.

    The ranks have the caller's environment variables and directory. The function goes to them by name, arguments and
    results as pickled copies, so a monkeypatch of the test does not reach them. What they print is printed here.

    Raises RankFailure when a rank raised, died, or still ran after `timeout` seconds. After a failure the others have a
    few seconds to end by themselves; then they are ended, and their stacks shown.
    """
    request = {"call": pickle.dumps((function, args, kwargs)), "module": function.__module__}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        outcome = _ask_server(folder, os.getcwd(), dict(os.environ), world, timeout, request)
        ranks = [_read_rank(Path(folder), rank, *outcome[rank]) for rank in range(world)]
    failed = sorted((rank for rank in range(world) if "result" not in ranks[rank]), key=lambda r: ranks[r]["order"])
    if failed:
        failures = {rank: _describe(rank, ranks[rank]) for rank in failed}
        why = f"timeout after {timeout:g} s" if ranks[failed[0]]["hung"] else "first failure first"
        name = f"{function.__module__}.{function.__qualname__}"
        raise RankFailure(f"{len(failed)} of {world} ranks failed in {name} ({why})", failures)
    for rank, report in enumerate(ranks):
        for line in report["output"]:
            print(f"[rank {rank}] {line}")
    return [pickle.loads(report["result"]) for report in ranks]


def run_command(
    args: list, timeout: float = 120, env: dict | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess:
    """Run a command line, without input, and return its text in `stdout` and `stderr`. `env` is added to the variables
    of this process. After `timeout` seconds all that it started is killed, and CommandTimeout raised.
    """
    mark = new_mark()
    environment = variables() | (env or {}) | dict([mark])
    files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [str(each) for each in args]
    process = subprocess.Popen(command, env=environment, cwd=cwd, start_new_session=True, **files)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process, mark)
        stdout, stderr = process.communicate()
        raise CommandTimeout(f"after {timeout:g} s: {' '.join(command)}\n{stdout}\n--- stderr:\n{stderr}") from None
    finally:
        kill(process, mark)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_script(
    *command, ranks: int = 1, timeout: float = 120, module: str = "step08_5d.train"
) -> subprocess.CompletedProcess:
    """What `python *command` does from the top folder (a script or -m and a module), but on forked processes, which
    have imported torch already. With several `ranks`, what they would do under torchrun: `stdout` and `stderr` are
    those of all of them, rank 0's first, and the status is that of a rank that failed. The forked processes have also
    imported `module`, as that of a function in `run_ranks`.
    """
    command = [str(each) for each in command]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        request = {"command": command, "module": module}  # by default one that imports what most scripts do
        outcome = _ask_server(folder, str(ROOT), environment, ranks, timeout, request)
        texts = ["".join(_read(folder, f"{rank}.{name}") for rank in range(ranks)) for name in ("output", "errors")]
        stacks = [_read(folder, f"{rank}.stacks") for rank in range(ranks)]
    failed = [code for code, _, was_ended in outcome.values() if code and not was_ended]
    if not failed and any(was_ended for _, _, was_ended in outcome.values()):
        raise CommandTimeout("\n".join([f"after {timeout:g} s: {' '.join(command)}", *texts, *stacks]))
    return subprocess.CompletedProcess(command, failed[0] if failed else 0, *texts)


def free_port() -> int:
    """A port that nobody listens on, below those that Linux gives to connections: these come and go all the time."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)):
                return port


def torchrun(nproc: int, script: str | Path, *flags, **options) -> subprocess.CompletedProcess:
    """torchrun with this Python, `nproc` ranks and a free port. `options` are those of `run_command`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", nproc]
    return run_command([*launcher, script, *flags], **options)


def rank_processes(launcher: subprocess.Popen) -> dict[int, int]:
    """Process number of every rank that a torchrun has started and that still runs, by rank."""
    found = {}
    for number in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        if rank := re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{number}/environ").read_bytes()):
            found[int(rank[1])] = int(number)
    return found


def steps_of(run_dir: Path) -> list[dict]:
    """Return the steps that a run has recorded so far."""
    path = Path(run_dir, "metrics.jsonl")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def stop_fork_server() -> None:
    """End the fork server and whatever it has started. The next `run_ranks` starts a new one."""
    global _server
    if _server is None:
        return
    (process, *files), _server = _server, None
    os.killpg(process.pid, signal.SIGKILL)  # it leads the group, whose number nobody else can have before wait()
    process.wait()
    for file in files:
        file.close()


_server = None  # (process, connection to it, connection from it, file with what it prints)
atexit.register(stop_fork_server)


def _start_server() -> None:
    global _server
    requests_out, requests_in = os.pipe()
    replies_out, replies_in = os.pipe()
    log = tempfile.TemporaryFile()
    command = [sys.executable, "-m", "tests.harness.fork_server", str(requests_out), str(replies_in)]
    files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": (requests_out, replies_in)}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True, **files)
    os.close(requests_out)
    os.close(replies_in)
    _server = process, Connection(requests_in, readable=False), Connection(replies_out, writable=False), log


def _ask_server(
    folder: str, directory: str, environment: dict, world: int, timeout: float, request: dict
) -> dict[int, tuple[int, float, bool]]:
    """What `fork_server.serve` returns: of each rank, its exit code, when it ended, and whether it was ended."""
    request |= {"folder": folder, "directory": directory, "environment": environment}
    if _server is None:
        _start_server()
    _, requests, replies, log = _server
    try:
        requests.send(request | {"world": world, "timeout": timeout})
        if not replies.poll(timeout + MARGIN + SERVER_TIME):
            raise EOFError
        return replies.recv()
    except (EOFError, OSError):
        log.seek(0)
        printed = log.read().decode(errors="replace")
        stop_fork_server()
        raise RuntimeError(f"the fork server died or does not answer; it had printed:\n{printed}") from None
    except BaseException:  # Ctrl-C
        stop_fork_server()
        raise


def _read(folder: str | Path, name: str) -> str:
    path = Path(folder, name)
    return path.read_text(errors="replace") if path.exists() else ""


def _read_rank(folder: Path, rank: int, code: int, ended_at: float, was_ended: bool) -> dict:
    """What a rank left: `result` or `traceback`, `output`, `stacks`, and its `order` among failures."""
    try:
        report = pickle.loads((folder / f"{rank}.report").read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):  # it ended before it wrote, or while it did
        report = {}
    # A rank that was killed comes first: its peers may have noticed sooner than the fork server.
    killed = code < 0 and code != -signal.SIGABRT and not was_ended
    report["order"] = not killed, math.inf if was_ended else report.get("failed_at", ended_at)
    report["code"], report["hung"] = code, was_ended
    below = ("/tests/harness/fork_server.py", "<frozen runpy>")  # frames that are the same in every stack
    stack = [line for line in _read(folder, f"{rank}.stacks").splitlines() if not any(name in line for name in below)]
    # Without gloo's word on every group that it connects.
    output = [line for line in _read(folder, f"{rank}.output").splitlines() if not line.startswith("[Gloo] Rank ")]
    return report | {"stacks": "\n".join(stack), "output": output}


def _describe(rank: int, report: dict) -> str:
    code = report["code"]
    what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    what = "raised:" if "traceback" in report else what
    what = "did not end by itself; where it was:" if report["hung"] else what
    printed = "\n".join(report["output"])[-SHOWN_OUTPUT:]
    parts = [f"--- rank {rank} {what}", report["stacks"], report.get("traceback", "")]
    parts += [f"--- rank {rank} had printed:", printed] * bool(printed)
    return "\n".join(part.rstrip() for part in parts if part)


def in_background(command: list, log: Path, environment: dict | None = None) -> subprocess.Popen:
    """Start a command line, with these variables besides, and write what it prints to `log`."""
    io = {"stdin": subprocess.DEVNULL, "stdout": open(log, "w"), "stderr": subprocess.STDOUT, "start_new_session": True}
    environment = variables() | (environment or {})
    return subprocess.Popen([str(each) for each in command], cwd=ROOT, env=environment, **io)


def variables() -> dict[str, str]:
    """The environment of a command: scripts that are started by path find the project where it is not installed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def wait_for(condition: Callable[[], bool], seconds: float, process: subprocess.Popen | None = None) -> float | None:
    """After how many seconds `condition()` holds; None if it does not by then, or when `process` ends."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds or process and process.poll() is not None:
            return None
        time.sleep(0.05)
    return time.monotonic() - start
