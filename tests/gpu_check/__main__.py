"""`python -m tests.gpu_check [--only PART ...] [--minutes M] [--again] [--device cpu --quick]`: write the report.

Parts that have ended are kept in the folder and not run again; one that was interrupted goes on where it was.
"""

import argparse
import math
import shutil
import sys
import time
from pathlib import Path

import torch

from common.launching.command_line import OneLineParser, one_line_errors
from tests.gpu_check.conftest import STARTED
from tests.gpu_check.findings import Findings, facts, now
from tests.gpu_check.launching import CANNOT_MEET
from tests.harness.ranks import CommandTimeout, run_command

PARTS = {  # in order of value: their tests, and their limits in seconds. All fit into commands of ten minutes
    "one_gpu": (300, "test_training.py::test_numbers", "test_training.py::test_waits", "test_training.py::test_marked"),
    "models": (530, "test_speed.py::test_model"),
    "kernels": (530, "test_speed.py::test_kernel"),
    "bfloat16": (400, "test_training.py::test_bfloat16"),
    "tracer": (90, "test_node.py::test_tracer"),
    "nccl": (530, "test_training.py::test_nccl"),
    "faults": (300, "test_gpu_faults.py::test_lost_rank", "test_gpu_faults.py::test_restart"),
    "async_save": (180, "test_gpu_faults.py::test_async_save"),
    "kernel_tests": (360, "test_training.py::test_kernels"),
    "ladder": (300, "test_ladder.py"),
    "node": (530, "test_node.py::test_dimension"),
    "shared_gpu": (400, "test_training.py::test_shared_gpu"),
}
PASSED, FAILED, UNFINISHED = "passed", "failed", "unfinished"
NOTHING_LEFT = 5  # pytest's status if there was no test
LEAST = 20  # seconds: with less time left, no part is begun
SHOWN = 3000  # characters of what a part printed that has not passed, from the end


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status: 1 if a part failed, 2 for bad arguments."""
    parser = OneLineParser(prog="python -m tests.gpu_check", description="What only a GPU can show.")
    names = f"these parts, of {', '.join(PARTS)} (default: all)"
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help=names)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop by then; the same command goes on")
    parser.add_argument("--again", action="store_true", help="also run what has ended, and from its beginning")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what has a meaning there")
    parser.add_argument("--quick", action="store_true", help="as small as possible: does every part work?")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here, so there is nothing to check; --device cpu --quick tries the parts on the CPU.")
        return 0
    where = [options.device, *["quick"] * options.quick]
    out = options.out.resolve() / ("" if where == ["cuda"] else "-".join(where))
    reports = {name: out / name / "report.md" for name in PARTS}
    end = time.monotonic() + 60 * options.minutes
    for name in options.only:
        if options.again:
            shutil.rmtree(out / name, ignore_errors=True)
        kept = status_of(reports[name]) in (PASSED, FAILED)
        if not kept and time.monotonic() > end - LEAST:
            print(f"{name}: no time is left for it", flush=True)
            continue
        if not kept:
            run_part(name, reports[name], options, end)
            texts = [report.read_text() for report in reports.values() if report.exists()]
            (out / "gpu.md").write_text(
                "\n".join(["# What GPUs show", "", *facts(torch.device(options.device)), *texts])
            )
        print(reports[name].read_text().splitlines()[0][3:] + "; --again repeats it" * kept, flush=True)
    print(f"report: {out / 'gpu.md'}")
    return int(any(status_of(reports[name]) != PASSED for name in options.only))


def status_of(report: Path) -> str | None:
    """The second word of "## PART: STATUS, ...", if the part has been run."""
    return report.read_text().split()[2].strip(",") if report.exists() else None


def run_part(name: str, report: Path, options: argparse.Namespace, end: float) -> None:
    """Run the tests of a part until none is left or its time is over; after each failure, in a new process.

    `end`: when to stop at the latest, on the clock of `time.monotonic`.

    The report has its status and findings and, unless it passed, what it printed last.
    """
    (limit, *tests), found = PARTS[name], Findings(report.parent, torch.device(options.device), options.quick)
    command = [sys.executable, "-m", "pytest", "-qsx", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    command += [*(Path("tests/gpu_check", test) for test in tests), "--record", found.folder]
    command += ["--device", options.device, *["--quick"] * options.quick]
    found.write([line for line in found.lines if line["value"] != STARTED])  # it was interrupted there
    start, status, printed = time.monotonic(), FAILED, ""
    limit = min(limit, end - start)
    while True:
        before = sum(line["passed"] is False for line in found.lines)
        try:
            done = run_command(command, timeout=max(1.0, limit - (time.monotonic() - start)))
        except CommandTimeout as error:
            status = UNFINISHED
            printed = f"{error}\nIts limit of {limit:.0f} s was over; the same command goes on with it."
            break
        failures = sum(line["passed"] is False for line in found.lines)
        ended = {STARTED: f"its process ended with status {done.returncode}"}
        found.write([line | {"value": ended.get(str(line["value"]), line["value"])} for line in found.lines])
        if done.returncode in (0, NOTHING_LEFT):
            status = FAILED if failures else PASSED
            break
        printed = f"{done.stdout}\n{done.stderr}".strip()
        if failures == before or done.returncode == CANNOT_MEET:
            break
    text = [f"## {name}: {status}, {time.monotonic() - start:.0f} s, {now()}", "", *found.report()]
    if status != PASSED:
        text += ["", "What it printed last:", "", "```", printed[-SHOWN:].replace("```", "'''"), "```"]
    report.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
