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

from tests.harness.ranks import ROOT, run_command, torchrun

SMALL = "--layers 2 --hidden 32 --heads 4 --ffn 48 --vocab 256 --seq-len 32 --data synthetic --device cpu".split()
SCRIPT = "step03_zero/train.py"
SAVING = "--zero 3 --global-batch 6 --steps 160 --save-every 20".split()  # on three ranks


def start(ranks: int, folder: Path, *flags: str, launch: tuple = (SCRIPT,)) -> subprocess.Popen:
    """torchrun in the background, its output in folder/log. `launch`: its last arguments, the script among them."""
    folder.mkdir(exist_ok=True, parents=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            [*launcher, *launch, *SMALL, "--run-dir", str(folder), *flags],
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[tuple]:
    """The curve of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert torchrun(3, SCRIPT, *SMALL, *SAVING, "--run-dir", folder).returncode == 0
    return curve(folder)


def test_killed_rank_ends_the_others_and_the_run_resumes(whole, tmp_path):
    process = start(3, tmp_path, *SAVING, "--async-save")
    wait_for(lambda: len(steps_done(tmp_path)) >= 45, process)
    os.kill(rank_processes(process)[1], signal.SIGKILL)
    killed = time.monotonic()
    assert process.wait(timeout=30) == 1
    assert time.monotonic() - killed < 15
    log = (tmp_path / "log").read_text()
    lost = re.findall(r"rank (\d): lost contact with another rank", log)
    assert lost and "1" not in lost, log
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)\s+exitcode\s*: -9", log), "the launcher blames the rank that died"

    resumed = torchrun(3, SCRIPT, *SMALL, *SAVING, "--run-dir", tmp_path, "--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert curve(tmp_path) == whole, "bit for bit, each step once"


DIES_WHILE_IT_SAVES = """
import os, runpy, signal, sys
import torch.distributed.checkpoint as dcp

marker = sys.argv[1]
sys.argv = sys.argv[2:]
write_data = dcp.FileSystemWriter.write_data

def write_and_die(writer, *args):
    result = write_data(writer, *args)
    if os.environ["RANK"] == "1" and "step-00000040" in str(writer.path) and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)  # all is written, but not yet complete
    return result

dcp.FileSystemWriter.write_data = write_and_die
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_torchrun_restarts_what_was_killed(whole, tmp_path):
    """A rank is killed while it saves, and in the next round another one in the middle of a step."""
    wrapper, marker = tmp_path / "dies_while_it_saves.py", tmp_path / "marker"
    wrapper.write_text(DIES_WHILE_IT_SAVES)
    launch = ("--max-restarts", "3", str(wrapper), str(marker), SCRIPT)
    process = start(3, tmp_path, *SAVING, "--keep", "2", "--resume", "auto", launch=launch)
    wait_for(lambda: marker.exists() and len(steps_done(tmp_path)) >= 65, process)
    os.kill(rank_processes(process)[0], signal.SIGKILL)
    log = tmp_path / "log"
    assert process.wait(timeout=90) == 0, log.read_text()
    assert re.findall(r"exitcode: (-9)\) local_rank: (\d)", log.read_text()) == [("-9", "1"), ("-9", "0")]
    assert log.read_text().count("step  24/160") == 2, "what was half saved at 40 was not taken for a checkpoint"
    assert curve(tmp_path) == whole, "bit for bit, each step once"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000140", "step-00000160"]


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
    assert 'step03_zero/train.py", line' not in log, "no traceback of ours"
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
    ("--tp 2", "--tp is not a flag of step03_zero"),
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


@pytest.mark.parametrize(("restarts", "flags"), [(1, "--global-batch 7"), (0, "--data /no/such/file.txt")])
def test_bad_input_under_torchrun(restarts, flags):
    done = torchrun(2, f"--max-restarts={restarts}", SCRIPT, *SMALL, *flags.split())
    assert done.stderr.count("error: --") == 1 + restarts, "one rank prints it"
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
