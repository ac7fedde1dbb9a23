"""`python -m tests.gpu_check [--only PART ...] [--rows TEXT] [--device cpu --quick]`: run parts, write the report."""

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path

import torch

from common.command_line import OneLineParser
from tests.gpu_check import faults, kernels, models, one_gpu, parity, profiles
from tests.gpu_check.findings import Findings, facts, write_report
from tests.gpu_check.rows import trace_only
from tests.harness.ranks import CommandTimeout, run_command

PARTS = {  # in order of value, each with its limit in seconds
    parity.nccl: 480,
    one_gpu.one_gpu: 480,
    kernels.kernels: 420,
    models.models: 780,
    parity.shared_gpu: 300,
    faults.faults: 300,
    faults.async_save: 180,
    profiles.tracer: 90,
    parity.starts: 210,
    one_gpu.kernel_tests: 360,
}
BY_NAME = {part.__name__: part for part in PARTS}
SHOWN = 3000  # characters of what a part printed that failed, from the end


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status: 1 if a part failed, 2 for bad arguments."""
    parser = OneLineParser(prog="python -m tests.gpu_check", description=__doc__.partition(":")[2].strip())
    parser.add_argument("--only", nargs="+", choices=BY_NAME, metavar="PART", help="these parts (default: all)")
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
    # One GPU, however many there are
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    device, out = torch.device(options.device), options.out.resolve()
    if options.inside:
        return run_inside(options.only[0], Findings(out / options.only[0], device, options.quick, options.rows))
    out.mkdir(parents=True, exist_ok=True)
    about, parts = facts(device), []
    for name in options.only or BY_NAME:
        parts.append(run_part(name, out, options))
        write_report(out, about, parts)
        print(f"{name}: {'passed' if parts[-1]['passed'] else 'FAILED'}, {parts[-1]['seconds']:.0f} s", flush=True)
    print(f"report: {out / 'gpu.md'}")
    return int(not all(part["passed"] for part in parts))


def run_part(name: str, out: Path, options: argparse.Namespace) -> dict:
    """Run a part in a process of its own, which ends with all that it has started when its time is over."""
    shutil.rmtree(out / name, ignore_errors=True)  # of an earlier check
    command = [sys.executable, "-m", "tests.gpu_check", "--inside", "--only", name, "--out", out]
    command += ["--device", options.device, f"--rows={options.rows}", *["--quick"] * options.quick]
    start, limit, file = time.monotonic(), PARTS[BY_NAME[name]], out / name / "findings.json"
    try:
        done = run_command(command, timeout=limit)
        status, printed = done.returncode, f"{done.stdout}\n{done.stderr}".strip()
    except CommandTimeout as error:
        status, printed = 1, f"{error}\nIts limit of {limit} s was over."
    lines, seconds = json.loads(file.read_text()) if file.exists() else [], time.monotonic() - start
    passed = status == 0 and any(line["passed"] for line in lines)
    printed = "" if passed else printed[-SHOWN:]
    return {"part": name, "passed": passed, "seconds": seconds, "lines": lines, "printed": printed}


def run_inside(name: str, found: Findings) -> int:
    """Run a part in this process, and return its exit status."""
    trace_only(found.device)
    try:
        BY_NAME[name](found)
    except Exception:
        traceback.print_exc()
        return 1
    return int(any(line["passed"] is False for line in found.lines))


if __name__ == "__main__":
    sys.exit(main())
