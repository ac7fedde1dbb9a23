"""A script that runs trainings on forked ranks: `python forks.py JOBS.json`. `training.py` starts it.

torchrun would import torch once more for every rank, which takes most of the time that a check has. This process
imports it once, and nothing of the project, so every rank imports the project's files from the folder that its job
names. It runs the jobs one after the other. A job is a dict:

    root      the top of the project, or of a copy
    command   a script and its flags
    ranks     how many
    seconds   after which ranks that still run show where they are, and are ended; see `Clock`
    out       a file for what became of the ranks, by rank: exit status, whether it was ended, whether it had printed
              more than `MOST` by then, and what it has printed last
"""

import faulthandler
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

GRACE = 3.0  # seconds that ranks have after another has failed, and again to show where they are
MOST = 1 << 24  # bytes that a rank may print: a loop that prints without end would fill the disk
LAST = 1 << 16  # bytes of what it has printed that are read
LINUX = Path("/proc/self").exists()  # elsewhere no one says who waits for what


def main(path: str) -> None:
    import torch.distributed  # noqa: F401

    for job in json.loads(Path(path).read_text(encoding="utf-8")):
        Path(job["out"]).write_text(json.dumps(run(job)), encoding="utf-8")


def run(job: dict) -> list[dict]:
    """Run one job to its end. Returns for each rank what the job's file says of it."""
    port, ranks = free_port(), {}
    files = [Path(f"{job['out']}.{rank}") for rank in range(job["ranks"])]
    for file in files:
        file.write_bytes(b"")
    for rank in range(job["ranks"]):
        number = os.fork()
        if number == 0:
            be_rank(job, rank, port)
        ranks[number] = rank
    clock, left, told, found = Clock(), job["seconds"], 0, {}
    while ranks:
        left -= clock.passed(ranks)
        number, status = os.waitpid(-1, os.WNOHANG)
        if number:
            code = os.waitstatus_to_exitcode(status)
            found[ranks.pop(number)] = {"status": code, "ended": told > 0}
            if code and not told:  # the others may hear of it, or not
                left = min(left, GRACE)
        elif told < 2 and (left < 0 or not told and any(map(prints_too_much, files))):
            for number in ranks:
                os.kill(number, signal.SIGKILL if told else signal.SIGUSR1)
            told, left = told + 1, GRACE
        else:
            time.sleep(0.02)
    return [
        found[rank] | {"flooded": prints_too_much(file), "text": last_of(file).decode(errors="replace")}
        for rank, file in enumerate(files)
    ]


class Clock:
    """Seconds of processes: real ones while all wait, and those of a processor while one computes.

    So time for which they wait for a processor does not count: a busy machine makes no training look as if it hung.
    Time for which they wait for a disk counts, since it may never end.
    """

    def __init__(self):
        self.at, self.used = time.monotonic(), {}

    def passed(self, processes: Iterable[int]) -> float:
        """How many seconds have passed since the last call."""
        now, states = time.monotonic(), {process: state(process) for process in processes}
        computed = max((used - self.used.get(process, 0.0) for process, (_, used) in states.items()), default=0.0)
        busy = LINUX and any(letter == "R" for letter, _ in states.values())
        real, self.at = now - self.at, now
        self.used = {process: used for process, (_, used) in states.items()}
        return computed if busy else real


def state(process: int) -> tuple[str, float]:
    """What the main thread of a process does (R: it computes or would like to, S: it waits), and CPU seconds so far."""
    try:
        fields = Path(f"/proc/{process}/task/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):  # not on Linux, or it has ended
        return "S" if LINUX else "R", 0.0


def prints_too_much(file: Path) -> bool:
    return file.stat().st_size > MOST


def last_of(file: Path) -> bytes:
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - LAST))
        return content.read(LAST)


def be_rank(job: dict, rank: int, port: int) -> None:
    """Run the script as torchrun's rank would, and end this process."""
    status = 1
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    try:
        output = os.open(f"{job['out']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=False, chain=True)  # then it ends the process
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]))
        os.environ.update(LOCAL_WORLD_SIZE=str(job["ranks"]), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if job["ranks"] == 1:
            del os.environ["RANK"], os.environ["WORLD_SIZE"]
        os.chdir(job["root"])
        for name in [name for name in sys.modules if name.split(".")[0].startswith(("common", "step0"))]:
            del sys.modules[name]  # whoever calls `run` may have imported the project
        sys.path[0], sys.argv = job["root"], job["command"]
        runpy.run_path(job["command"][0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def end_with(parent: int) -> None:
    """End this process when its parent has ended, even if that was killed: a rank that waits for another hears of it
    from nobody else.
    """
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def free_port() -> int:
    """A port on which nobody listens, below those that systems give to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)):
                return port


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for whoever has started this, and shows no stack here
    main(sys.argv[1])
