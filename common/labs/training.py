"""Trainings that labs start: one run of a train.py, of the project or of a student's copy of it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from common.compare import TINY, Record, compare, read_run
from common.errors import UsageError
from common.labs.apart import apart, give_up_rights, leave_out
from common.labs.find import solutions
from common.launching.system import FORK, require

SMALL = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 24 --data synthetic --device cpu "
SMALL += "--global-batch 12 --micro-batch 3 --dtype float64 --steps 3 --seed 3 --optimizer sgd --lr 0.1 --clip 0"
LEAST = 0.5  # of the bytes that our code sends, in a repair
SECONDS = 20  # that a training of a lab may take
FORKS = Path(__file__).with_name("forks.py")


class Launch(NamedTuple):
    """What to train: a script of the project with its flags, on so many ranks."""

    script: str  # from the top of the project, such as step02_data_parallel/train.py
    flags: str = ""
    ranks: int = 1

    def command(self, run_dir: str | Path, base: str = "") -> str:
        """What one types to run it, from the top of the project."""
        launcher = "python" if self.ranks == 1 else f"torchrun --standalone --nproc_per_node {self.ranks}"
        flags = {}  # each once: where a flag is repeated, the last one counts
        for words in re.findall(r"\S+(?: (?!--)\S+)*", " ".join(f"{base} {self.flags} --run-dir {run_dir}".split())):
            name, _, value = words.partition(" ")
            flags[name] = value
        return " ".join([launcher, self.script, *(f"{name} {value}".strip() for name, value in flags.items())])


def train(
    trainings: list[tuple[Launch, Path]], folder: Path, base: str = "", seconds: float = SECONDS, theirs: bool = False
) -> list[Record]:
    """Run each training with the code under its root, one after the other, and return their records.

    Args:
        folder: for what they write. base: flags of all of them. seconds: that each may take.
        theirs: it is a student's code, which runs apart while it is graded, and without the project.

    Raises UsageError, with the line that says why, for the first that fails or does not end.
    """
    jobs = []
    for number, (training, root) in enumerate(trainings):
        run_dir = (folder / str(number)).resolve()
        flags = [*base.split(), *training.flags.split(), "--run-dir", str(run_dir), "--peak-tflops", "1"]
        job = {"root": str(root.resolve()), "command": [training.script, *flags], "ranks": training.ranks}
        jobs.append(job | {"out": f"{run_dir}.out", "seconds": seconds})
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    run_jobs(path, theirs)
    for job, (training, _) in zip(jobs, trainings):
        if not Path(job["out"]).exists():
            raise UsageError(f"{training.script} {training.flags} ended all that ran with it")
        ranks = json.loads(Path(job["out"]).read_text(encoding="utf-8"))
        if any(rank["status"] for rank in ranks):
            raise UsageError(f"{training.script} {training.flags} {_reason(ranks, seconds)}")
    return [read_run(folder / str(number)) for number in range(len(jobs))]


def run_jobs(path: Path, theirs: bool = False) -> None:
    """Let `forks.py` run what this file lists; see `train`. Raises UsageError on Windows."""
    require("a lab that trains", FORK)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    if guard := environment.get("LABS_GUARD"):  # of `confined`, while submissions are graded
        environment["PYTHONPATH"] = guard
    if not theirs:
        subprocess.run([sys.executable, FORKS, path], env=environment, stdin=subprocess.DEVNULL, check=True)
        return
    script = shutil.copy(FORKS, path.parent)

    def work() -> None:
        leave_out(solutions())
        give_up_rights()
        subprocess.run([sys.executable, script, path], env=environment, stdin=subprocess.DEVNULL, check=True)

    apart(work)


def _reason(ranks: list[dict], seconds: float) -> str:
    """Why a training failed: the error of a rank, or where each rank was that did not end."""
    if all(rank["ended"] for rank in ranks if rank["status"]):
        where = [f"rank {number} {_place(rank['text'])}" for number, rank in enumerate(ranks) if rank["ended"]]
        flooded = any(rank["flooded"] for rank in ranks)
        why = "prints without end" if flooded else f"was not through after {seconds:g} s"
        return f"{why}: {'; '.join(where)}"
    text = next(rank["text"] for rank in ranks if rank["status"] and not rank["ended"])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ") or re.match(r"[\w.]*Error\b", line)]
    return f"failed: {(errors or lines or ['without a word'])[-1][:300]}"


def _place(text: str) -> str:
    """Of a stack that faulthandler has printed, the call of collectives and the line that made it."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in ([\w<>]+)', text)
    ours = [frame for frame in frames if re.search(r"(^|/)(common|step\w+)/(?!labs/forks)", frame[0])]
    callers = [frame for frame in ours if not re.search(r"/common/(collectives|gloo|errors)\.py$", frame[0])]
    file, line, function = (callers or ours or frames or [("", "0", "")])[0]
    inside = [frame[2] for frame in ours if frame[0].endswith("/common/collectives.py")]
    waits = f"waits in {inside[-1]}, " if inside else "is at "
    return f"{waits}{'/'.join(Path(file).parts[-2:])}, line {line} ({function})"


def first_difference(expected: Record, found: Record, tolerance: float) -> str | None:
    """What differs first, in words; None if no loss and no gradient norm differs by more than `tolerance`, relative."""
    row = compare([expected, found])[1]
    if len(row.steps) < len(expected.records):
        return f"only {len(row.steps)} of {len(expected.records)} steps were recorded"
    for step in row.steps:
        for key in ("loss", "grad_norm"):
            ours, theirs = found.value(step, key), expected.value(step, key)
            if not abs(ours - theirs) <= tolerance * abs(theirs):
                ratio = ours / (theirs or TINY)
                size = f"{ratio:.4g} times as large" if abs(ratio - 1) > 0.01 else f"off by {abs(ratio - 1):.1e}"
                return f"{key} of step {step} is {ours:.9g} instead of {theirs:.9g} ({size})"
    return None


def sends_less(expected: Record, found: Record) -> str | None:
    """Whether a rank sends much less than ours, in words: then it trains alone what others were to help with."""
    ours, theirs = (
        sum(sum(step.get("comm_bytes", {}).values()) for step in each.records.values()) for each in (expected, found)
    )
    if theirs < LEAST * ours:
        return f"a rank sends {theirs:,.0f} bytes, where {ours:,.0f} are needed for every rank to take part"
    return None
