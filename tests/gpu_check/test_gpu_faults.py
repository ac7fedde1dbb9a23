"""NCCL when a rank is killed or stops, torchrun's restart, and saves in the background."""

import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

from common.checkpoints import files
from step01_single_gpu.running.run import Run
from tests.gpu_check.findings import Findings, on_devices
from tests.gpu_check.launching import Agents, need_ranks, train_alone, visible_gpus
from tests.gpu_check.test_training import SMALL, TOLERANCE, difference
from tests.harness.ranks import steps_of, wait_for

GRACE = 15.0  # seconds beyond --timeout by which every rank must have ended
START = 120.0  # seconds by which a run must have taken some steps
TIMEOUT = 20


def training(found: Findings, name: str, flags: str) -> list:
    """Return a command line of ZeRO-3 in a folder of that name."""
    flags = f"{SMALL} --zero 3 --device {found.device.type} {flags}".split()
    return ["step03_zero/train.py", *flags, "--run-dir", found.folder / name]


def signal_rank_1(found: Findings, agents: Agents, name: str, steps: int, number: signal.Signals) -> dict[int, int]:
    """Send a signal to rank 1 after so many steps. Returns the process numbers of the ranks."""
    started = wait_for(lambda: len(steps_of(found.folder / name)) >= steps, START, agents.processes[0])
    assert started is not None, f"{name}: the run does not start\n{agents.log()}"
    ranks = agents.ranks()
    if len(visible_gpus()) < len(ranks):  # NCCL takes those that share a GPU for ranks of several hosts
        environments = [Path(f"/proc/{number}/environ").read_bytes() for number in ranks.values()]
        assert all(f"NCCL_HOSTID=host-{rank}".encode() in each for rank, each in zip(ranks, environments))
    os.kill(ranks[1], number)
    return ranks


@on_devices(["SIGKILL", "SIGSTOP"], quick=["SIGKILL"])
def test_lost_rank(found, item):
    """The other rank ends; one that was stopped goes on, and ends. On a CPU they talk through gloo."""
    need_ranks(found)
    with Agents(found, item, training(found, item, f"--steps 20000 --timeout {TIMEOUT}")) as agents:
        ranks = signal_rank_1(found, agents, item, 5, signal.Signals[item])
        for rank in (0, 1) if item == "SIGSTOP" else (0,):
            if rank == 1:
                os.kill(ranks[1], signal.SIGCONT)
            process = Path(f"/proc/{ranks[rank]}")
            seconds = wait_for(lambda process=process: not process.exists(), TIMEOUT + 4 * GRACE)
            found.note(f"{item}: seconds until rank {rank} ends", f"{seconds}")
            assert seconds is not None and seconds < TIMEOUT + GRACE
        assert set(agents.statuses(GRACE)) == {1}, agents.log()
        found.note(f"{item}: exit statuses of the ranks", agents.exit_codes())
    if item == "SIGKILL":  # NCCL's watchdog ends its process by SIGABRT; with gloo the rank itself says what is wrong
        assert agents.exit_codes() == ("1, -9" if found.device.type == "cpu" else "-6, -9")


@on_devices([""])
def test_restart(found, item):
    """A rank is killed: torchrun starts all of them again, and they resume."""
    need_ranks(found)
    flags = f"--steps {40 if found.quick else 120} --dtype float64"
    train_alone(found, "undisturbed", 1, f"{SMALL} {flags}")
    command = training(found, "restart", f"{flags} --timeout {TIMEOUT} --save-every 10 --resume auto")
    with Agents(found, "restart", command, restarts=1) as agents:
        signal_rank_1(found, agents, "restart", 13, signal.SIGKILL)
        assert set(agents.statuses(START + TIMEOUT)) == {0}, agents.log()
    assert difference(found, "restart", "undisturbed") < TOLERANCE


@on_devices(["", "--async-save"], quick=["", "--async-save"])
def test_async_save(found, item):
    """How long a save stops the training, with and without --async-save."""
    every, stops, original = 2 if found.quick else 8, [], Run.save
    model = SMALL if found.quick else "--model smollm-135m --seq-len 512 --micro-batch 4 --data synthetic"

    def timed(self, step):
        start = time.perf_counter()
        original(self, step)
        stops.append(time.perf_counter() - start)

    name, start = f"saved {item}", time.perf_counter()
    with mock.patch.object(Run, "save", timed):
        train_alone(found, name, 1, f"{model} --steps {3 * every} --save-every {every} --keep 1 {item}")
    saves = ", ".join(f"{stop:.3f}" for stop in stops[every - 1 :: every])
    found.note(f"{name}: the training stops", f"{saves} s; the whole run takes {time.perf_counter() - start:.1f} s")
    assert [each.name for each in files.complete(found.folder / name)] == [f"step-{3 * every:08}"]
    shutil.rmtree(found.folder / name)
