"""What happens when something goes wrong: a rank dies, a rank stops, Ctrl-C, bad input. Nothing hangs or is lost."""

import math
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from common.errors import UsageError
from common.start import environment
from step02_data_parallel.hangs import CASES
from step03_zero import train as step03_train
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import ROOT, in_background, run_ranks, run_script, steps_of, torchrun, wait_for

SMALL = "--layers 2 --hidden 32 --heads 4 --ffn 48 --vocab 256 --seq-len 32 --data synthetic".split()
SMALL += "--device cpu --peak-tflops 1".split()
SCRIPT = "step03_zero/train.py"
SAVING = "--zero 3 --global-batch 4 --steps 20 --save-every 4".split()  # on two ranks


def start(ranks: int, folder: Path, *flags: str, launch: tuple = (SCRIPT,)) -> subprocess.Popen:
    """torchrun in the background, its output in folder/log. `launch`: its last arguments, with the script."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    return in_background([*launcher, *launch, *SMALL, "--run-dir", folder, *flags], folder / "log")


def curve(folder: Path) -> list[tuple]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in steps_of(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[tuple]:
    """The curve of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_script(SCRIPT, *SMALL, *SAVING, "--run-dir", folder, ranks=2).returncode == 0
    return curve(folder)


DIES_TWICE = """
import os, runpy, signal, sys
import torch.distributed.checkpoint as dcp
from common.collectives import Work
from step01_single_gpu.running.run_record import RunRecord
marker, *sys.argv = sys.argv[1:]
write_data = dcp.FileSystemWriter.write_data
def write_and_die(writer, *args):
    result = write_data(writer, *args)
    if os.environ["RANK"] == "1" and "step-00000008" in str(writer.path) and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)  # all is written, but not yet complete
    return result
begin_step, issue, now = RunRecord.step, Work.__init__, [0]
def noting_step(record, number):
    now[0] = number
    return begin_step(record, number)
def issue_or_die(work, *args, **options):
    if os.environ["RANK"] == "0" and now == [14] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    issue(work, *args, **options)
dcp.FileSystemWriter.write_data, RunRecord.step, Work.__init__ = write_and_die, noting_step, issue_or_die
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_killed_ranks_are_restarted_and_the_run_resumes(whole, tmp_path):
    """A rank is killed while it saves, which torchrun restarts once, then another one within a step."""
    wrapper, marker, log = tmp_path / "dies_twice.py", tmp_path / "marker", tmp_path / "log"
    wrapper.write_text(DIES_TWICE)
    saving = [*SAVING, "--async-save", "--keep", "2", "--resume", "auto"]
    process = start(2, tmp_path, *saving, launch=("--max-restarts", "1", str(wrapper), str(marker), SCRIPT))
    assert process.wait(timeout=180) == 1
    text = log.read_text()
    assert text.count("step  5/20") == 2, "what was half saved at 8 was not taken for a checkpoint"
    assert len(steps_of(tmp_path)) == 14, text
    assert re.findall(r"exitcode: (-9)\) local_rank: (\d)", text) == [("-9", "1"), ("-9", "0")], text
    lost = re.findall(r"rank \d: lost contact with another rank: (.*)", text)
    assert not any("/" in line for line in lost), text
    assert len(lost) == 2 or "closing signal SIGTERM" in text, "it says so, unless the launcher ends it before"
    first = text.partition("Root Cause")[2]
    assert re.search(r"rank\s*: 0 \(local_rank: 0\)\s+exitcode\s*: -9", first), "the launcher blames the rank that died"

    resumed = run_script(SCRIPT, *SMALL, *saving, "--run-dir", tmp_path, ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    assert curve(tmp_path) == whole, "bit for bit, each step once"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000016", "step-00000020"]


FIVE = "--pp 2 --cp 2 --tp 2 --experts 8 --expert-ffn 16 --ep 4 --zero 3 --global-batch 2 --steps 4 --save-every 2"
FIVE = ["step08_5d/train.py", *SMALL, *FIVE.split()]
SENDS_ITSELF = """
import os, runpy, signal, sys
from common.collectives import Work
from step01_single_gpu.running.run_record import RunRecord
name, rank, step, call, *sys.argv = sys.argv[1:]
begin_step, issue, now = RunRecord.step, Work.__init__, {"step": 0, "calls": 0}
def noting_step(record, number):
    now.update(step=number, calls=0)
    return begin_step(record, number)
def issue_or_end(work, *args, **options):
    now["calls"] += 1
    if os.environ["RANK"] == rank and now == {"step": int(step), "calls": int(call)}:
        os.kill(os.getpid(), getattr(signal, name))
    issue(work, *args, **options)
RunRecord.step, Work.__init__ = noting_step, issue_or_end
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def sends_itself(signal_name: str, rank: int, step: int, call: int, folder: Path) -> list:
    """The beginning of a command: a rank sends itself a signal at its `call`-th collective of a step."""
    wrapper = folder / "sends_itself.py"
    wrapper.write_text(SENDS_ITSELF)
    return [wrapper, signal_name, rank, step, call]


def test_five_dimensions_go_on_after_a_kill(tmp_path):
    """A rank dies within a step, while its peers in four dimensions wait for it, each in another group."""
    dies, folder = sends_itself("SIGKILL", 5, 3, 20, tmp_path), tmp_path / "run"
    assert run_script(*FIVE, "--run-dir", tmp_path / "whole", ranks=8).returncode == 0
    died = run_script(*dies, *FIVE, "--run-dir", folder, ranks=8)
    assert died.returncode and "lost contact with another rank" in died.stderr and len(steps_of(folder)) == 3
    resumed = run_script(*FIVE, "--run-dir", folder, "--resume", "auto", ranks=8)
    assert resumed.returncode == 0 and resumed.stdout.count("step 2/4") == 1, resumed.stderr
    assert curve(folder) == curve(tmp_path / "whole"), "bit for bit, each step once"


def test_stopped_rank_is_an_error_within_the_timeout(tmp_path):
    stops, flags = sends_itself("SIGSTOP", 1, 5, 1, tmp_path), ["--steps", 100, "--timeout", 5, "--run-dir", tmp_path]
    done = run_script(*stops, SCRIPT, *SMALL, *flags, ranks=2, timeout=60)
    assert done.returncode and "rank 0: lost contact with another rank" in done.stderr, done.stderr
    assert len(steps_of(tmp_path)) == 5


def test_interrupt_ends_cleanly(tmp_path):
    process = start(2, tmp_path, "--steps", "100000")
    assert wait_for(lambda: len(steps_of(tmp_path)) >= 3, 180, process), (tmp_path / "log").read_text()
    os.kill(process.pid, signal.SIGINT)
    process.wait(timeout=60)
    log = (tmp_path / "log").read_text()
    assert 'step03_zero/train.py", line' not in log and steps_of(tmp_path), log


@pytest.mark.parametrize("closes, steps, status", [(False, "100000", -signal.SIGINT), (True, "2000", 1)])
def test_plain_python_ends_at_ctrl_c_or_when_nobody_reads(closes, steps, status):
    command = [sys.executable, "step01_single_gpu/train.py", *SMALL, "--steps", steps]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also in the background
    process = subprocess.Popen(command, cwd=ROOT, **pipes, preexec_fn=hears)
    process.stdout.readline()  # the first progress line: training has begun
    process.stdout.close() if closes else process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == status and "Traceback" not in process.stderr.read()


def assert_refused(done: subprocess.CompletedProcess, words: str) -> None:
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_bad_input_is_one_line_and_status_2():
    for flags, words in [
        ("--heads 5", "--heads 5 does not divide --hidden 32"),
        ("--tp 2", "--tp is not a flag of step03_zero"),
        ("--data /no/such/file.txt", "--data /no/such/file.txt"),
        ("--resume /no/such/checkpoint", "/no/such/checkpoint"),
        ("--data README.md --vocab 384 --global-batch 9999 --micro-batch 1", "--data README.md is too small"),
    ]:
        assert_refused(run_script(SCRIPT, *SMALL, *flags.split()), words)


def test_a_model_that_cannot_fit_is_refused_in_every_step():
    """Before anything is allocated: Linux would let it grow until it kills the process, or another one."""
    for script in sorted(ROOT.glob("step*/train.py")):
        done = run_script(script.relative_to(ROOT), *SMALL, "--hidden", "65536", "--layers", "40", timeout=30)
        assert_refused(done, "with 687,611,117,568 parameters: weights, gradients and optimizer states take at least")


NOTES_ITS_STATUS = """
import os, pathlib, runpy, sys, time
sys.path.insert(0, os.getcwd())
folder, late, *sys.argv = sys.argv[1:]
import common.launching.launch  # with torch: it takes long on a busy machine, and a signal would find no handler
here = pathlib.Path(folder)
(here / f"here-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}").touch()
while len(list(here.glob(f"here-{os.environ['TORCHELASTIC_RESTART_COUNT']}-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
end = os._exit
def note_and_end(status):
    os.write(os.open(f"{folder}/statuses", os.O_WRONLY | os.O_CREAT | os.O_APPEND), str(status).encode())
    end(status)
os._exit = note_and_end
time.sleep(2.5 if os.environ["RANK"] == late else 0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("late, restarts, flags", [("none", 1, "--resume /no/such"), ("0", 0, "--foo")])
def test_bad_input_under_torchrun(late, restarts, flags, tmp_path):
    """One rank prints the line, also if it starts late, and the launcher's report ends with it. The launcher's signal
    to the others does not change their status."""
    wrapper = tmp_path / "notes_its_status.py"
    wrapper.write_text(NOTES_ITS_STATUS)
    done = torchrun(2, f"--max-restarts={restarts}", wrapper, tmp_path, late, SCRIPT, *SMALL, *flags.split())
    *_, last, border = done.stderr.splitlines()  # of torchrun's report
    assert " : error: --" in last and set(border) == {"="}, done.stderr
    assert len(re.findall("^error: --", done.stderr, re.MULTILINE)) == 1 + restarts, done.stderr
    assert set(re.findall(r"exitcode\s*: (-?\d+)", done.stderr)) == {"2"}, done.stderr
    assert (tmp_path / "statuses").read_text() == "2" * 2 * (1 + restarts), "status 2 on all ranks"


def test_a_run_folder_keeps_one_run(tmp_path):
    """A fresh start would leave the checkpoints behind as its own, for --resume auto to find."""
    run = [SCRIPT, *SMALL, "--steps", "3", "--run-dir", tmp_path / "run"]
    assert run_script(*run, "--save-every", "2").returncode == 0
    for flags, words in [
        ([], "holds step-00000003 of an earlier run"),
        (["--resume", "auto", "--steps", "2"], "is after step 3, and --steps 2 ends before"),
        (["--resume", "auto", "--lr", "1"], "lr is 0.001 in the checkpoint and 1.0 in this run"),
        (["--run-dir", tmp_path / "run" / "config.json"], "cannot be written"),
    ]:
        assert_refused(run_script(*run, *flags), words)
    assert "nothing is left to train" in run_script(*run, "--resume", "auto").stdout


def train_with_a_nan_on_rank_1(folder: Path) -> str:
    """Each rank's last words. A loss of the third step is NaN on one rank, in all its gradients."""
    losses, real = [], step03_train.cross_entropy_sum

    def cross_entropy_sum(*arguments):
        losses.append(real(*arguments))
        return losses[-1] * (math.nan if len(losses) == 3 and environment().rank == 1 else 1)

    flags = "--zero 3 --global-batch 4 --steps 9 --save-every 1 --keep 1 --async-save"
    config = configure(3, f"{' '.join(SMALL)} {flags} --run-dir {folder}")
    with mock.patch.object(step03_train, "cross_entropy_sum", cross_entropy_sum), pytest.raises(UsageError) as ended:
        step03_train.train(config, mesh_of(config))
    return str(ended.value)


def test_a_nan_on_one_rank_ends_all_with_one_line(tmp_path):
    line = "step 2: loss is nan and grad_norm is nan; the run ends here, and saves nothing of this step"
    assert run_ranks(2, train_with_a_nan_on_rank_1, tmp_path) == [line] * 2
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name == "step-00000002" and (saved / "manifest.json").exists(), "begun in the background, and complete"
    assert len(steps_of(tmp_path)) == 3


# ---- the page on runs that hang: each of its cases does what the page says -------------------------------------------

SEEN = {  # what a rank prints, and the line of hangs.py at which it is found
    "skipped": (r"\[rank 1\] the second sum is 11, and should be 20", r"in skipped"),
    "order": (r"\[rank [01]\] Timed out waiting \d+ms for recv", r"in order"),
    "facing": (r"\[rank [01]\] Timed out waiting \d+ms for recv", r"in facing"),
    "shapes": (r"Received data size doesn't match|Connection reset by peer|Connection closed by peer", ""),
    "gone": (r"a bad sample", ""),
    "stopped": (r"\[rank 0\] Timed out waiting \d+ms for recv", r"in stopped"),
}


def test_every_case_is_on_the_page():
    page = (ROOT / "common/when_a_run_hangs.md").read_text()
    assert re.findall(r"^OMP.* (\w+)$", page, re.MULTILINE) == re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == CASES.keys() == SEEN.keys()


@pytest.mark.parametrize("case", SEEN)
def test_what_one_sees(case):
    done = run_script("step02_data_parallel/hangs.py", case, "1.5", ranks=2)
    printed, stack = SEEN[case]
    assert done.returncode != 0
    assert re.search(printed, done.stdout + done.stderr) and re.search(stack, done.stderr), done
