"""What happens when something goes wrong: a rank dies, a rank stops, Ctrl-C, bad input. Nothing hangs or is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT, run_command, torchrun

SMALL = "--layers 2 --hidden 32 --heads 4 --ffn 48 --vocab 256 --seq-len 32 --data synthetic --device cpu".split()
SCRIPT = "step02_data_parallel/train.py"


def start(ranks: int, folder: Path, *flags: str) -> subprocess.Popen:
    """torchrun in the background, its output in folder/log."""
    folder.mkdir(exist_ok=True, parents=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            [*launcher, SCRIPT, *SMALL, "--run-dir", str(folder), *flags],
            **{
                "cwd": ROOT,
                "stdout": log,
                "stderr": log,
                "stdin": subprocess.DEVNULL,
                "start_new_session": True,
            },
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def steps_done(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if path.exists()
        else []
    )


def wait_for(condition, process: subprocess.Popen, seconds: float = 60):
    """Poll until `condition()` is true; fail if the process ends or the time is over."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, "the run ended or did not get there"
        time.sleep(0.05)


def rank_processes(launcher: subprocess.Popen) -> dict[int, int]:
    """Process number of every rank, by rank."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(re.search(r"PPid:\s+(\d+)", (entry / "status").read_text()).group(1))
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = [item for item in environment if item.startswith(b"RANK=")]
        if parent == launcher.pid and rank:
            found[int(rank[0][5:])] = int(entry.name)
    return found


def curve(folder: Path) -> list[tuple]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in steps_done(folder)]


def test_killed_rank_ends_the_others_and_the_run_resumes(tmp_path):
    flags = ["--steps", "400", "--save-every", "20"]
    whole = tmp_path / "whole"
    assert torchrun(4, SCRIPT, *SMALL, *flags, "--run-dir", whole).returncode == 0

    broken = tmp_path / "broken"
    process = start(4, broken, *flags)
    wait_for(lambda: len(steps_done(broken)) >= 45, process)
    os.kill(rank_processes(process)[2], signal.SIGKILL)
    killed = time.monotonic()
    assert process.wait(timeout=30) == 1
    assert time.monotonic() - killed < 15
    log = (broken / "log").read_text()
    lost = re.findall(r"rank (\d): lost contact with another rank", log)
    assert lost and "2" not in lost, log
    assert re.search(r"rank\s*: 2 \(local_rank: 2\)\s+exitcode\s*: -9", log), "the launcher blames the rank that died"

    resumed = torchrun(4, SCRIPT, *SMALL, *flags, "--run-dir", broken, "--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert curve(broken) == curve(whole), "bit for bit, each step once"


def test_stopped_rank_is_an_error_within_the_timeout(tmp_path):
    process = start(4, tmp_path, "--steps", "100000", "--timeout", "5")
    wait_for(lambda: len(steps_done(tmp_path)) >= 5, process)
    ranks = rank_processes(process)
    os.kill(ranks[1], signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        wait_for(lambda: "lost contact with another rank" in (tmp_path / "log").read_text(), process, 30)
        assert time.monotonic() - stopped < 20, "5 s of timeout, and a busy machine"
    finally:
        os.kill(ranks[1], signal.SIGKILL)  # the launcher itself would do so, after 30 s
    assert process.wait(timeout=30) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_interrupt_ends_cleanly(tmp_path, ranks):
    process = start(ranks, tmp_path, "--steps", "100000")
    wait_for(lambda: len(steps_done(tmp_path)) >= 3, process)
    os.kill(process.pid, signal.SIGINT)
    process.wait(timeout=20)
    log = (tmp_path / "log").read_text()
    assert "interrupted" in log
    assert 'step02_data_parallel/train.py", line' not in log, "no traceback of ours"
    assert steps_done(tmp_path)


def test_plain_python_interrupt():
    process = subprocess.Popen(
        [sys.executable, "step01_single_gpu/train.py", *SMALL, "--steps", "100000"],
        **{"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
    )
    process.stdout.readline()  # the first progress line: training has begun
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors


BAD_INPUT = [
    ("--dp 3", "--dp 3"),
    ("--global-batch 7", "--global-batch 7 is not divisible by"),
    ("--heads 5", "--heads 5 does not divide --hidden 32"),
    ("--tp 2", "--tp is not a flag of step02_data_parallel"),
    ("--data /no/such/file.txt", "--data /no/such/file.txt"),
    ("--resume /no/such/checkpoint", "/no/such/checkpoint"),
    ("--data README.md --vocab 384 --global-batch 9999 --micro-batch 1", "corpus too small for the batch"),
    ("--trace 3", "--trace 3 is not FIRST:LAST"),
]


def test_bad_input_is_one_line_and_status_2_on_all_ranks():
    for flags, expected in BAD_INPUT:
        done = run_command([sys.executable, SCRIPT, *SMALL, *flags.split()])
        assert done.returncode == 2, (flags, done.stderr)
        assert done.stderr.startswith("error: ") and len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert expected in done.stderr


@pytest.mark.parametrize("flags", ["--global-batch 7", "--data /no/such/file.txt"])
def test_bad_input_under_torchrun(flags):
    done = torchrun(2, SCRIPT, *SMALL, *flags.split())
    assert done.stderr.count("error: --") == 1, "one rank prints it"
    assert set(re.findall(r"exitcode\s*: (-?\d+)", done.stderr)) == {"2"}, done.stderr


def test_bad_input_is_printed_although_rank_0_comes_late(tmp_path):
    """The launcher ends all ranks when the first one ends: that must not swallow the line."""
    late = tmp_path / "late.py"
    late.write_text(
        "import os, runpy, sys, time\n"
        "time.sleep(2 if os.environ['RANK'] == '0' else 0)\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = torchrun(3, late, SCRIPT, *SMALL, "--foo")
    assert done.stderr.count("error: --foo is not a flag") == 1
    assert re.findall(r"exitcode\s*: (-?\d+)", done.stderr)[-3:] == ["2"] * 3, done.stderr


def test_a_run_folder_keeps_one_run(tmp_path):
    """A fresh start in a folder with checkpoints would leave them behind as its own, for --resume auto to find."""
    run = [sys.executable, SCRIPT, *SMALL, "--steps", "3", "--run-dir", tmp_path / "run"]
    assert run_command([*run, "--save-every", "2"]).returncode == 0
    for flags, expected in [
        ([], "holds step-00000003 of an earlier run"),
        (["--resume", "auto", "--steps", "2"], "is after step 3, and --steps 2 ends before"),
        (["--resume", "auto", "--lr", "1"], "lr is 0.001 in the checkpoint and 1.0 in this run"),
        (["--run-dir", tmp_path / "run" / "config.json"], "cannot be written"),
    ]:
        done = run_command([*run, *flags])
        assert done.returncode == 2 and expected in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert "nothing is left to train" in run_command([*run, "--resume", "auto"]).stdout
