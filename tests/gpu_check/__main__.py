"""`python -m tests.gpu_check [--only PART ...] [--again] [--rows TEXT] [--device cpu --quick]`: write the report.

Parts that have ended are kept in the folder and not run again; one that was interrupted goes on where it was.
"""

import argparse
import json
import shutil
import sys
import time
import traceback
from pathlib import Path

import torch

from common.launching.command_line import OneLineParser
from tests.gpu_check import faults, kernels, models, node, one_gpu, parity, profiles
from tests.gpu_check.findings import Findings, facts, now, write_report
from tests.gpu_check.rows import trace_only
from tests.harness.ranks import CommandTimeout, run_command

PARTS = {  # in order of value, each with its limit in seconds; all fit into commands of ten minutes
    parity.nccl: 530,
    parity.bfloat16: 400,
    one_gpu.one_gpu: 530,
    kernels.kernels: 530,
    models.models: 530,
    node.node: 530,
    parity.shared_gpu: 400,
    faults.faults: 300,
    faults.async_save: 180,
    profiles.tracer: 90,
    parity.starts: 210,
    one_gpu.kernel_tests: 360,
}
BY_NAME = {part.__name__: part for part in PARTS}
PASSED, FAILED, UNFINISHED = "passed", "failed", "unfinished"
SHOWN = 3000  # characters of what a part printed that has not passed, from the end


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status: 1 if a part failed, 2 for bad arguments."""
    parser = OneLineParser(prog="python -m tests.gpu_check", description="What only a GPU can show.")
    parser.add_argument("--only", nargs="+", choices=BY_NAME, metavar="PART", help="these parts (default: all)")
    parser.add_argument("--again", action="store_true", help="also run what has ended, and from its beginning")
    parser.add_argument("--list", action="store_true", help="print the parts and what each does")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what has a meaning there")
    parser.add_argument("--quick", action="store_true", help="as small as possible: does every part work?")
    parser.add_argument("--rows", default="", metavar="TEXT", help="of kernels and models, those whose name has this")
    parser.add_argument("--inside", action="store_true", help="run the part of --only in this process")
    options = parser.parse_or_exit(argv)
    if options.list:
        print("\n".join(f"{name:12} {part.__doc__.splitlines()[0]}" for name, part in BY_NAME.items()))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here, so there is nothing to check; --device cpu --quick tries the parts on the CPU.")
        return 0
    device, out = torch.device(options.device), options.out.resolve()
    if options.inside:
        return run_inside(options.only[0], Findings(out / options.only[0], device, options.quick, options.rows))
    out.mkdir(parents=True, exist_ok=True)
    about, file, wanted = facts(device), out / "gpu.json", options.only or BY_NAME
    parts = {part["part"]: part for part in json.loads(file.read_text())["parts"]} if file.exists() else {}
    settings = [options.device, options.quick, options.rows]
    for name in wanted:
        part = parts.get(name)
        if options.again or part is None or part["settings"] != settings:
            shutil.rmtree(out / name, ignore_errors=True)
            part = {"part": name, "status": UNFINISHED, "settings": settings, "lines": []}
        kept = part["status"] != UNFINISHED
        if not kept:
            parts[name] = part | {"date": now(), "seconds": 0.0, "printed": "It was interrupted, or still runs."}
            write_report(out, about, [parts[each] for each in BY_NAME if each in parts])
            parts[name] |= run_part(name, out, options)
            write_report(out, about, [parts[each] for each in BY_NAME if each in parts])
        part = parts[name]
        when = f"on {part['date']}; --again repeats it" if kept else f"{part['seconds']:.0f} s"
        print(f"{name}: {part['status']}, {when}", flush=True)
    print(f"report: {out / 'gpu.md'}")
    return int(any(parts[name]["status"] != PASSED for name in wanted))


def run_part(name: str, out: Path, options: argparse.Namespace) -> dict:
    """Run a part in a process of its own, which ends with all that it has started when its time is over.

    Returns its status, seconds and lines and, unless it passed, what it printed last.
    """
    command = [sys.executable, "-m", "tests.gpu_check", "--inside", "--only", name, "--out", out]
    command += ["--device", options.device, f"--rows={options.rows}", *["--quick"] * options.quick]
    start, limit, file = time.monotonic(), PARTS[BY_NAME[name]], out / name / "findings.json"
    try:
        done = run_command(command, timeout=limit)
        status, printed = FAILED if done.returncode else PASSED, f"{done.stdout}\n{done.stderr}".strip()
    except CommandTimeout as error:
        status, printed = UNFINISHED, f"{error}\nIts limit of {limit} s was over; the same command goes on with it."
    lines, seconds = json.loads(file.read_text()) if file.exists() else [], time.monotonic() - start
    if status == PASSED and not any(line["passed"] for line in lines):
        status = FAILED
    printed = "" if status == PASSED else printed[-SHOWN:]
    return {"status": status, "seconds": seconds, "lines": lines, "printed": printed}


def run_inside(name: str, found: Findings) -> int:
    """Run a part in this process, and return its exit status."""
    trace_only(found.device)
    found.read()  # what it had found before it was interrupted
    try:
        BY_NAME[name](found)
    except Exception:
        traceback.print_exc()
        return 1
    return int(any(line["passed"] is False for line in found.lines))


if __name__ == "__main__":
    sys.exit(main())
