"""One process on the GPU: the same numbers as on the CPU, the narrow types, memory that ZeRO-3 gives back."""

import importlib.util
import re
import sys

import torch

from common.launching.command_line import parse
from common.process_groups import Degrees, build_mesh
from step03_zero.train import build
from tests.gpu_check.findings import Findings
from tests.gpu_check.launching import train_alone
from tests.gpu_check.parity import EXPERTS, FREE, SMALL, difference
from tests.harness.ranks import run_command

TRAINING = f"{SMALL} --lr 3e-3"
EXACT = 1e-10
# A run, the device ("": that of the check), step and flags, the run that it must equal, and the largest relative
# difference of any step's loss or gradient norm. The bounds of the narrow types are some ten times what the CPU shows.
RUNS = [
    ("float64 on the CPU", "cpu", 1, "--dtype float64", "", 0.0),
    ("float64", "", 1, "--dtype float64", "float64 on the CPU", EXACT),
    ("float64, naive attention", "", 1, "--dtype float64 --attention naive", "float64", EXACT),
    ("float64, selective recomputation", "", 1, "--dtype float64 --recompute selective", "float64", EXACT),
    ("float64, full recomputation", "", 1, "--dtype float64 --recompute full", "float64", EXACT),
    ("float64, ZeRO-3", "", 3, "--dtype float64 --zero 3 --recompute full", "float64", EXACT),
    ("float32", "", 1, "--dtype float32", "float64", 1e-5),
    ("bfloat16", "", 1, "--dtype bfloat16", "float64", 1e-2),
    ("bfloat16, selective recomputation", "", 1, "--dtype bfloat16 --recompute selective", "bfloat16", 1e-2),
    ("bfloat16, full recomputation", "", 1, "--dtype bfloat16 --recompute full", "bfloat16", 1e-2),
    ("float16", "", 1, "--dtype float16", "float64", 2e-3),
    ("experts, float64", "", 7, f"--dtype float64 {EXPERTS}", "", 0.0),
    ("experts, bfloat16", "", 7, f"--dtype bfloat16 {FREE}", "", 0.0),
    # Step 8 leaves its kernels in the modules of earlier steps, so it comes last
    ("float64, kernels of step 8", "", 8, "--dtype float64", "float64", EXACT),
    ("float32, kernels of step 8", "", 8, "--dtype float32", "float32", 1e-5),
    ("float32, pieces compiled", "", 8, "--dtype float32 --no-fused --compile", "float32", 1e-5),
    ("bfloat16, kernels of step 8", "", 8, "--dtype bfloat16", "bfloat16", 1e-2),
    ("float16, kernels of step 8", "", 8, "--dtype float16", "float16", 2e-3),
    ("experts, float64, kernels of step 8", "", 8, f"--dtype float64 {EXPERTS}", "experts, float64", EXACT),
    ("experts, bfloat16, kernels of step 8", "", 8, f"--dtype bfloat16 {FREE}", "experts, bfloat16", 3e-2),
]


def one_gpu(found: Findings) -> None:
    """World 1: float64 as on the CPU, narrow types, recomputation, step 8, the memory of ZeRO-3, tests marked gpu."""
    for name, device, step, flags, expected, bound in RUNS:
        with found.attempt(name):
            train_alone(found, name, step, f"{TRAINING} --steps {1 if found.quick else 10} {flags}", device)
            if expected:
                worst = difference(found, name, expected)
                found.check(f"{name} equals {expected} within {bound:g}", worst <= bound, f"{worst:.1e}")
    with found.attempt("ZeRO-3 frees a layer"):
        resizing(found)
    run_pytest(found, "gpu", "tests/unit/test_metrics.py" if found.quick else "tests", 240)


def kernel_tests(found: Findings) -> None:
    """The tests of step 8's kernels, which Triton interprets on a CPU, with the kernels compiled."""
    folder = "tests/mechanisms/step08/kernels"
    run_pytest(found, "not gpu", f"{folder}/test_swiglu.py" if found.quick else folder, 400)


def run_pytest(found: Findings, marked: str, tests: str, seconds: float) -> None:
    """Run the tests with this mark."""
    if importlib.util.find_spec("pytest") is None:
        found.note(f"pytest {tests}", "pytest is not installed")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, tests]
    done = run_command(command, timeout=seconds)
    summary = re.findall(r"^(?:FAILED|ERROR) \S+|^.*\d (?:passed|skipped).*", done.stdout, re.M)
    found.check(f'pytest -m "{marked}" {tests}', done.returncode == 0, "; ".join(summary))


def resizing(found: Findings) -> None:
    """ZeRO-3 gathers the weights of a layer into storage that it takes and gives back: is the memory really free?"""
    width = 64 if found.quick else 2048
    flags = f"--zero 3 --layers 2 --hidden {width} --heads 4 --ffn {4 * width} --vocab 256 --data synthetic"
    config = parse(3, flags.split())
    config.resolve_and_check(1)
    _, zero, _ = build(config, build_mesh(Degrees(), found.device))
    unit = max(zero.units, key=lambda each: each.weights.numel())
    size = unit.weights.numel() * unit.weights.element_size()

    def allocated() -> int:
        if found.device.type == "cuda":
            return torch.cuda.memory_allocated(found.device)
        return unit.weights.untyped_storage().nbytes()

    before = allocated()
    for time in ("once", "again"):
        unit.fetch().wait()
        gained = allocated() - before
        right = torch.equal(unit.weights[unit.mine], unit.shard)
        unit.free()
        kept = allocated() - before
        said = f"{size:,} bytes gathered, {gained:,} more while they are there, {kept:,} afterwards"
        found.check(f"ZeRO-3 frees a layer, {time}", right and size <= gained < size + 2**21 and kept == 0, said)
