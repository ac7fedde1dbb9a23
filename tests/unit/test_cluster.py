"""What every rank of a cluster would get: cores, a GPU, an address. Neither Slurm nor a second node is needed.

`srun` and `scontrol` are stand-ins that do what Slurm's manual says, and `torchrun` prints what it was given.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, get_args_parser

from common.launching.command_line import parse
from tests.harness.observing import configure

ROOT = Path(__file__).parents[2]
NODES, CORES, GPUS = ["gpu07", "gpu11"], 64, 8
STAND_INS = {
    "scontrol": 'assert sys.argv[1:] == ["show", "hostnames", "gpu[07,11]"]; print("gpu07\\n" + "gpu11\\n" * 20_000)',
    # A task has one core unless --cpus-per-task or SRUN_CPUS_PER_TASK says otherwise (srun's manual, since 22.05)
    "srun": """command = sys.argv[sys.argv.index("bash") :]
for node in range(int(os.environ["SLURM_NNODES"])):
    cores = os.environ.get("SRUN_CPUS_PER_TASK", "1")
    subprocess.run(command, env=os.environ | {"SLURM_NODEID": str(node), "CORES": cores}, check=True)""",
    "torchrun": 'print(json.dumps([int(os.environ["CORES"]), int(os.environ["OMP_NUM_THREADS"]), *sys.argv[1:]]))',
}


def launched(arguments: list[str]) -> tuple:
    """What torchrun makes of its arguments, and the command of a rank."""
    settings, _, command = config_from_args(get_args_parser().parse_args(arguments))
    return settings, [each for each in command if each != "-u"]


def sbatch(flags: list[str], folder: Path) -> list[list]:
    """What `torchrun` gets on each node of a job with the script's own settings."""
    for name, body in STAND_INS.items():
        path = folder / name
        path.write_text(f"#!{sys.executable}\nimport json, os, subprocess, sys\n{body}\n")
        path.chmod(0o755)
    script = ROOT / "step08_5d" / "train.slurm"
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.MULTILINE))
    assert asked["ntasks-per-node"] == "1", "torchrun starts the ranks of a node"
    variables = {"JOB_ID": "4711", "JOB_NODELIST": "gpu[07,11]", "NNODES": asked["nodes"]}
    variables |= {"GPUS_ON_NODE": asked["gpus-per-node"], "CPUS_PER_TASK": asked["cpus-per-task"]}
    variables = {f"SLURM_{name}": value for name, value in variables.items()}
    environment = os.environ | variables | {"PATH": f"{folder}:{os.environ['PATH']}"}
    environment.pop("SRUN_CPUS_PER_TASK", None)
    done = subprocess.run(["bash", script, *flags], env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_slurm_gives_every_rank_cores_a_gpu_and_the_same_address(tmp_path):
    nodes = sbatch(["--model", "smollm-1.7b", "--tp", "8", "--tokenizer", "two words"], tmp_path)
    assert len(nodes) == len(NODES)
    for number, (cores, threads, *arguments) in enumerate(nodes):
        settings, (script, *flags) = launched(arguments)
        assert cores == CORES and GPUS * threads <= cores, f"{GPUS} ranks of {threads} threads share {cores} cores"
        assert settings.nproc_per_node == GPUS and settings.rdzv_configs["rank"] == number
        assert settings.min_nodes == settings.max_nodes == len(NODES)
        assert (settings.rdzv_backend, settings.rdzv_endpoint) == ("static", f"{NODES[0]}:29500")
        config = parse(8, flags)
        assert script == "step08_5d/train.py" and config.run_dir == "runs/step08-4711"
        assert (config.tp, config.tokenizer, config.dtype) == (8, "two words", "bfloat16")


@pytest.mark.parametrize("page", ["README.md", "step08_5d/measurements.md"])
def test_command_without_slurm(page):
    """The same command on every node: ranks meet at HOST, and each gets the GPU of its local rank."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    (command,) = re.findall(r"torchrun (--nnodes 2 .*)", text)
    settings, (script, *flags) = launched(shlex.split(command))
    assert settings.min_nodes == settings.max_nodes == 2 and settings.nproc_per_node == GPUS
    assert (settings.rdzv_backend, settings.rdzv_endpoint) == ("c10d", "HOST:29500")
    assert (ROOT / script).exists()
    configure(int(script[4:6]), " ".join(flags), 2 * GPUS)
