"""NCCL when a rank is killed or stops, torchrun's restart, and checkpoints that are written in the background."""

import math
import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import torch

from common.checkpoints import files
from step01_single_gpu.run import Run
from tests.gpu_check.findings import NOT_ON_CPU, Findings, nvidia_smi
from tests.gpu_check.launching import Agents, ranks_can_meet, train_alone, wait_for
from tests.gpu_check.parity import SMALL, TOLERANCE, difference
from tests.harness.ranks import steps_of

GRACE = 15.0  # seconds beyond --timeout by which every rank must have ended
START = 120.0  # seconds by which a run must have taken some steps


def faults(found: Findings) -> None:
    """kill -9 and SIGSTOP of one of two ranks with --timeout 20: when do all end, and how? And torchrun's restart."""
    if not ranks_can_meet(found):
        return
    timeout = 2 if found.quick else 20
    for number in (signal.SIGSTOP,) if found.quick else (signal.SIGKILL, signal.SIGSTOP):
        lose_a_rank(found, number, timeout)
    restart(found, timeout)


def training(found: Findings, name: str, flags: str) -> list:
    """Return a command line of ZeRO-3 in a folder of that name."""
    flags = f"{SMALL} --zero 3 --device {found.device.type} {flags}".split()
    return ["step03_zero/train.py", *flags, "--run-dir", found.folder / name]


def signal_rank_1(found: Findings, agents: Agents, name: str, steps: int, number: signal.Signals) -> dict[int, int]:
    """Send a signal to rank 1 once the run has taken so many steps. Returns the process numbers of the ranks."""
    if wait_for(lambda: len(steps_of(found.folder / name)) >= steps, START) is None:
        raise RuntimeError(f"{name}: the run does not start\n{agents.log()}")
    ranks = agents.ranks()
    os.kill(ranks[1], number)
    return ranks


def lose_a_rank(found: Findings, number: signal.Signals, timeout: int) -> None:
    """Send a signal to rank 1, and measure how long the other one lives. A stopped rank goes on after that."""
    name, command = number.name, training(found, number.name, f"--steps 20000 --timeout {timeout}")
    with Agents(found, name, command) as agents:
        ranks = signal_rank_1(found, agents, name, 5, number)
        for rank, what in enumerate(["the other rank ends"] + ["going on, it ends"] * (number == signal.SIGSTOP)):
            if rank == 1:
                os.kill(ranks[1], signal.SIGCONT)
            process = Path(f"/proc/{ranks[rank]}")
            seconds = wait_for(lambda process=process: not process.exists(), timeout + 4 * GRACE)
            in_time, took = seconds is not None and seconds < timeout + GRACE, f"{seconds or math.inf:.1f} s"
            found.check(f"{name}: {what} within {timeout + GRACE:.0f} s", in_time, took)
        statuses = agents.statuses(GRACE)
        found.check(f"{name}: both launchers end with status 1", set(statuses) == {1}, str(statuses))
        found.note(f"{name}: exit statuses of the ranks", agents.exit_codes())


def restart(found: Findings, timeout: int) -> None:
    """A rank is killed, torchrun starts all of them again, and they take up the run where its last checkpoint is."""
    flags, what = f"--steps {40 if found.quick else 120} --dtype float64", "--max-restarts 1"
    train_alone(found, "undisturbed", 1, f"{SMALL} {flags}")
    command = training(found, "restart", f"{flags} --timeout {max(timeout, 10)} --save-every 10 --resume auto")
    with Agents(found, "restart", command, restarts=1) as agents:
        signal_rank_1(found, agents, "restart", 13, signal.SIGKILL)
        statuses = agents.statuses(START + timeout)
        found.check(f"{what}: both launchers end with status 0", set(statuses) == {0}, str(statuses))
    worst = difference(found, "restart", "undisturbed")
    found.check(f"{what}: the curve is that of an undisturbed run", worst < TOLERANCE, f"{worst:.1e}")


# ---- checkpoints in the background -----------------------------------------------------------------------------------


def async_save(found: Findings) -> None:
    """How long a save stops the training, with and without --async-save, and which contexts it makes on the GPU."""
    every = 2 if found.quick else 8
    model = SMALL if found.quick else "--model smollm-135m --seq-len 512 --micro-batch 4 --data synthetic"
    for name, flag in (("sync", ""), ("async", "--async-save")):
        stops, original = [], Run.save

        def timed(self, step, stops=stops, original=original):
            start = time.perf_counter()
            original(self, step)
            stops.append(time.perf_counter() - start)

        with mock.patch.object(Run, "save", timed):
            start = time.perf_counter()
            train_alone(found, name, 1, f"{model} --steps {3 * every} --save-every {every} --keep 1 {flag}")
        saves = ", ".join(f"{stop:.3f}" for stop in stops[every - 1 :: every])
        found.note(f"{name}: the training stops", f"{saves} s; the whole run takes {time.perf_counter() - start:.1f} s")
        complete = [each.name for each in files.complete(found.folder / name)]
        found.check(f"{name}: the last checkpoint is complete", complete == [f"step-{3 * every:08}"], str(complete))
        shutil.rmtree(found.folder / name)
    count_contexts(found)


def count_contexts(found: Findings) -> None:
    """Two ranks that save all the time: a copy on another thread must not make a context that training did without."""
    if found.device.type == "cpu":
        found.note("CUDA contexts during --async-save", NOT_ON_CPU)
        return
    if not ranks_can_meet(found):
        return
    most = {}
    for name, flag in (("sync", ""), ("async", "--async-save")):
        before, seen = contexts_and_memory(), []
        command = training(found, f"two ranks {name}", f"--steps 100 --save-every 2 --keep 1 --timeout 60 {flag}")
        with Agents(found, f"two ranks {name}", command) as agents:
            while None in agents.statuses(0.2) and len(seen) < 10 * START:
                seen.append(contexts_and_memory())
            statuses = agents.statuses(0)
        found.check(f"two ranks, {name}: status 0", set(statuses) == {0}, str(statuses))
        most[name] = [max(now) - then for now, then in zip(zip(*seen), before)]
        found.note(f"two ranks, {name}: at most", f"{most[name][0]} contexts by nvidia-smi, {most[name][1]:,} MiB")
    if most["sync"][0] < 2:
        found.note("CUDA contexts", "not measured: here nvidia-smi does not list the processes of the ranks")
    else:
        found.check("no more CUDA contexts with --async-save", most["async"][0] <= most["sync"][0])


def contexts_and_memory() -> tuple[int, int]:
    """Return how many contexts nvidia-smi sees on the GPU (0 in some containers), and how many MiB are in use."""
    free, total = torch.cuda.mem_get_info()
    return len(nvidia_smi("--query-compute-apps=pid").split()), (total - free) >> 20
