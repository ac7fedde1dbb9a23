"""What a failure costs: from the signal to the end, from the new start to its first step, and the steps done again."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.drawing.tables import print_table
from common.experiments.runner import ROOT
from common.launching.system import PROC, SESSIONS, require

SAVE_EVERY, BEFORE = 5, 12  # the signal comes when so many steps are recorded
FLAGS = f"--layers 4 --hidden 128 --ffn 256 --data synthetic --steps 400 --save-every {SAVE_EVERY}"
FLAGS += " --device cpu --peak-tflops 1"
PATIENCE = 300  # seconds


class Cost(NamedTuple):
    """Seconds until all processes have ended, and until the next run has recorded a step; steps that run twice."""

    end: float
    restart: float
    again: int


def kill_a_rank(launcher: subprocess.Popen) -> None:
    """As if its machine had failed."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="utf-8").split()
    ranks = [int(child) for child in children if re.search(rb"\0RANK=1\0", Path(f"/proc/{child}/environ").read_bytes())]
    os.kill(ranks[0], signal.SIGKILL)


def interrupt(launcher: subprocess.Popen) -> None:
    """As Slurm does a minute before the time limit (`--signal=INT@60` in train.slurm)."""
    launcher.send_signal(signal.SIGINT)


def restart(quick: bool) -> None:
    """A rank is killed, or time is nearly up: seconds until the run goes on in another layout, and steps lost."""
    require("this experiment", SESSIONS, PROC)
    rows = []
    for name, stop in (("kill -9 of a rank", kill_a_rank), ("INT to torchrun", interrupt)):
        cost = measure(stop)
        rows.append((name, f"{cost.end:.1f}", f"{cost.restart:.1f}", cost.again))
    header = ("", "s until all have ended", "s from the new start to its first step", "steps that run again")
    print_table(f"2 ranks, tp 2, then dp 2 with ZeRO-1; a checkpoint every {SAVE_EVERY} steps", header, rows)


def measure(stop: Callable[[subprocess.Popen], None]) -> Cost:
    """Train with tp 2, stop that, go on with dp 2, and look at the clock."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        with launched(f"--tp 2 --run-dir {before}") as launcher:
            wait_until(lambda: len(steps_of(before)) >= BEFORE, launcher)
            asked = time.perf_counter()
            stop(launcher)
            launcher.wait(PATIENCE)
            end = time.perf_counter() - asked
        start = time.perf_counter()
        with launched(f"--dp 2 --zero 1 --resume {before} --run-dir {after}") as launcher:
            wait_until(lambda: steps_of(after), launcher)
            seconds = time.perf_counter() - start
        return Cost(end, seconds, steps_of(before)[-1] + 1 - steps_of(after)[0])


@contextlib.contextmanager
def launched(flags: str) -> Iterator[subprocess.Popen]:
    """torchrun with two ranks; whatever is left of it ends with the block."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["step08_5d/train.py", *FLAGS.split(), *flags.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **quiet)
    try:
        yield launcher
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def wait_until(condition: Callable[[], object], launcher: subprocess.Popen) -> None:
    """Raises TimeoutError if that never happens."""
    end = time.perf_counter() + PATIENCE
    while not condition():
        if launcher.poll() is not None or time.perf_counter() > end:
            raise TimeoutError(f"the run has ended with status {launcher.poll()}")
        time.sleep(0.02)


def steps_of(folder: Path) -> list[int]:
    """The steps that a run has recorded."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]
