"""`python -m tests.gpu_check [--only PART ...] [--again] [--device cpu --quick]`: write the report.

Parts that have ended are kept in the folder and not run again; one that was interrupted goes on where it was.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import torch

from common.launching.command_line import OneLineParser, one_line_errors
from tests.gpu_check.conftest import STARTED
from tests.gpu_check.findings import Findings, facts, now, write_report
from tests.gpu_check.launching import CANNOT_MEET
from tests.harness.ranks import CommandTimeout, run_command

PARTS = {  # in order of value: their tests, and their limits in seconds. All fit into commands of ten minutes
    "nccl": (530, "test_training.py::test_nccl"),
    "bfloat16": (400, "test_training.py::test_bfloat16"),
    "one_gpu": (530, "test_training.py::test_numbers", "test_training.py::test_marked"),
    "kernels": (530, "test_speed.py::test_kernel"),
    "ladder": (300, "test_ladder.py"),
    "models": (530, "test_speed.py::test_model"),
    "node": (530, "test_node.py::test_dimension"),
    "shared_gpu": (400, "test_training.py::test_shared_gpu"),
    "faults": (300, "test_gpu_faults.py::test_lost_rank", "test_gpu_faults.py::test_restart"),
    "async_save": (180, "test_gpu_faults.py::test_async_save"),
    "tracer": (90, "test_node.py::test_tracer"),
    "kernel_tests": (360, "test_training.py::test_kernels"),
}
PASSED, FAILED, UNFINISHED = "passed", "failed", "unfinished"
NOTHING_LEFT = 5  # pytest's status if there was no test
SHOWN = 3000  # characters of what a part printed that has not passed, from the end


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status: 1 if a part failed, 2 for bad arguments."""
    parser = OneLineParser(prog="python -m tests.gpu_check", description="What only a GPU can show.")
    names = f"these parts, of {', '.join(PARTS)} (default: all)"
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help=names)
    parser.add_argument("--again", action="store_true", help="also run what has ended, and from its beginning")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what has a meaning there")
    parser.add_argument("--quick", action="store_true", help="as small as possible: does every part work?")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here, so there is nothing to check; --device cpu --quick tries the parts on the CPU.")
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    about, file = facts(torch.device(options.device)), out / "gpu.json"
    parts = {part["part"]: part for part in json.loads(file.read_text())["parts"]} if file.exists() else {}
    settings = [options.device, options.quick]
    for name in options.only:
        part = parts.get(name)
        if options.again or part is None or part["settings"] != settings:
            shutil.rmtree(out / name, ignore_errors=True)
            part = {"part": name, "status": UNFINISHED, "settings": settings, "lines": []}
        kept = part["status"] != UNFINISHED
        if not kept:
            parts[name] = part | {"date": now(), "seconds": 0.0, "printed": "It was interrupted, or still runs."}
            write_report(out, about, [parts[each] for each in PARTS if each in parts])
            parts[name] |= run_part(name, out, options)
            write_report(out, about, [parts[each] for each in PARTS if each in parts])
        part = parts[name]
        when = f"on {part['date']}; --again repeats it" if kept else f"{part['seconds']:.0f} s"
        print(f"{name}: {part['status']}, {when}", flush=True)
    print(f"report: {out / 'gpu.md'}")
    return int(any(parts[name]["status"] != PASSED for name in options.only))


def run_part(name: str, out: Path, options: argparse.Namespace) -> dict:
    """Run the tests of a part until none is left or its time is over; after each failure, in a new process.

    Returns its status, seconds and lines and, unless it passed, what it printed last.
    """
    (limit, *tests), found = PARTS[name], Findings(out / name, torch.device(options.device), options.quick)
    command = [sys.executable, "-m", "pytest", "-qsx", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    command += [*(Path("tests/gpu_check", test) for test in tests), "--record", found.folder]
    command += ["--device", options.device, *["--quick"] * options.quick]
    found.write([line for line in found.lines if line["value"] != STARTED])  # it was interrupted there
    start, status, printed = time.monotonic(), FAILED, ""
    while True:
        before = sum(line["passed"] is False for line in found.lines)
        try:
            done = run_command(command, timeout=max(1.0, limit - (time.monotonic() - start)))
        except CommandTimeout as error:
            status = UNFINISHED
            printed = f"{error}\nIts limit of {limit} s was over; the same command goes on with it."
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
    seconds, printed = time.monotonic() - start, "" if status == PASSED else printed[-SHOWN:]
    return {"status": status, "seconds": seconds, "lines": found.lines, "printed": printed}


if __name__ == "__main__":
    sys.exit(main())
