"""Several real ranks, on one GPU if need be, which NCCL takes for several hosts; and one, in this process."""

import importlib
import os
import re
import sys

import pytest
import torch

from common.launching.command_line import STEP_NAMES, parse
from common.launching.process_tree import kill, new_mark
from common.launching.run_mesh import mesh_of
from common.start import init_distributed
from tests.gpu_check.findings import Findings
from tests.harness.ranks import free_port, in_background, rank_processes, run_script, steps_of, wait_for

PROBE = 40  # seconds for two ranks to start and to meet
CANNOT_MEET = 9  # the status of pytest if they do not
# NCCL over the loopback interface, with few of the SMs that the ranks share
ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_MAX_CTAS": "4"}


class Agents:
    """A command on several ranks, in the background; use it in `with`, which leaves nothing behind.

    Each rank has a torchrun of its own, and a GPU of its own where there are enough. Where there are not, they use the
    same one: NCCL refuses two ranks on one device of one host, and believes what NCCL_HOSTID says of the host. With
    `together`, one torchrun starts them all, and they share a GPU through gloo. With `restarts`, the torchruns tell
    each other of a failure (c10d); else none knows of the others.
    """

    def __init__(self, found: Findings, name: str, command: list, ranks: int = 2, together=False, restarts: int = 0):
        hosts, self.mark, self.processes = 1 if together else ranks, new_mark(), []
        self.logs = [found.folder / f"{name}-{host}.log" for host in range(hosts)]
        port = free_port()
        meeting = ["--master_addr", "127.0.0.1", "--master_port", port]
        if restarts:
            meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1"]
        found.folder.mkdir(parents=True, exist_ok=True)
        for host, log in enumerate(self.logs):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", hosts, *meeting]
            launcher += ["--nproc_per_node", ranks // hosts, "--max_restarts", restarts]
            launcher += [] if restarts else ["--node_rank", host]
            environment = ENVIRONMENT | placement(host, ranks, together) | dict([self.mark])
            self.processes.append(in_background([*launcher, *command], log, environment))

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            kill(process, self.mark)

    def ranks(self) -> dict[int, int]:
        """Return the process number of every rank that runs now, by rank."""
        return {rank: number for process in self.processes for rank, number in rank_processes(process).items()}

    def statuses(self, seconds: float) -> list[int | None]:
        """Return the statuses of every torchrun after at most so long: None of one that still runs."""
        wait_for(lambda: all(process.poll() is not None for process in self.processes), seconds)
        return [process.poll() for process in self.processes]

    def log(self) -> str:
        """Return what all ranks and their launchers have printed."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs)

    def exit_codes(self) -> str:
        """Return how ranks failed, in the launchers' words: -9 for SIGKILL and so on."""
        return ", ".join(re.findall(r"exitcode +: (-?\d+)", self.log()))


def visible_gpus() -> list[str]:
    """Return the GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    numbers = ",".join(map(str, range(torch.cuda.device_count())))
    return [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",") if each]


def placement(rank: int, ranks: int, together: bool) -> dict[str, str]:
    """Return the environment variables that give a rank its GPU or, `together`, all ranks theirs."""
    gpus = visible_gpus()
    if len(gpus) >= ranks and not together:
        return {"CUDA_VISIBLE_DEVICES": gpus[rank]}
    return {"CUDA_VISIBLE_DEVICES": "".join(gpus[:1])} | ({} if together else {"NCCL_HOSTID": f"host-{rank}"})


def run_on_ranks(found: Findings, name: str, command: list, ranks: int, seconds: float, together=False) -> None:
    """Run a command on several ranks, forked ones on a CPU. Raises RuntimeError if one fails."""
    if found.device.type == "cpu":
        done = run_script(*command, ranks=ranks, timeout=seconds)
        statuses, printed = [done.returncode], done.stderr
    else:
        with Agents(found, name, command, ranks, together) as agents:
            statuses, printed = agents.statuses(seconds), agents.log()
    if set(statuses) != {0}:
        errors = " / ".join(line.strip() for line in printed.splitlines() if "rror" in line)[-600:]
        raise RuntimeError(f"{name}: statuses {statuses} after at most {seconds} s; {errors}")


def need_ranks(found: Findings) -> None:
    """Try once in a check whether two ranks can talk: if not, end the part that needs them."""
    known = found.folder.parent / "ranks can meet"
    if found.device.type == "cuda" and not known.exists():
        try:
            tour = [found.folder, "cuda", "nccl", "nccl", "2 ranks, step 0"]
            run_on_ranks(found, "probe", ["-m", "tests.gpu_check.test_training", *tour], 2, PROBE)
        except RuntimeError as error:
            pytest.exit(f"two ranks cannot talk to each other: {error}", CANNOT_MEET)
        known.touch()


def train_alone(found: Findings, name: str, step: int, flags: str, device: str = "", change=lambda _: None) -> list:
    """Train in this process, unless that has been done. Returns the lines of metrics.jsonl.

    `change(config)` may set what no flag can.
    """
    if not (found.folder / f"{name}.done").exists():
        place = ["--device", device or found.device.type, "--run-dir", str(found.folder / name)]
        config = parse(step, [*flags.split(), *place])
        change(config)
        config.resolve_and_check(1)
        mesh = mesh_of(config, init_distributed(config.device))
        importlib.import_module(f"{STEP_NAMES[step - 1]}.train").train(config, mesh)
        (found.folder / f"{name}.done").touch()
    return steps_of(found.folder / name)
