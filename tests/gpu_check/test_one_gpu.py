"""One process on the GPU: numbers as on the CPU, narrow types, memory of ZeRO-3; and other tests."""

import re
import sys

import torch

from common.launching.command_line import parse
from common.process_groups import Degrees, build_mesh
from step03_zero.train import build
from tests.gpu_check.findings import Findings, on_devices
from tests.gpu_check.launching import train_alone
from tests.gpu_check.layouts import EXPERTS, FREE, SMALL
from tests.gpu_check.test_training import difference
from tests.harness.ranks import run_command

EXACT = 1e-10
# A run: the device ("": that of the check), step and flags, the run that it must equal, and the largest relative
# difference of any step's loss or gradient norm. The bounds of the narrow types are some ten times what the CPU shows.
RUNS = {
    "float64 on the CPU": ("cpu", 1, "--dtype float64", "", 0.0),
    "float64": ("", 1, "--dtype float64", "float64 on the CPU", EXACT),
    "float64, naive attention": ("", 1, "--dtype float64 --attention naive", "float64", EXACT),
    "float64, selective recomputation": ("", 1, "--dtype float64 --recompute selective", "float64", EXACT),
    "float64, full recomputation": ("", 1, "--dtype float64 --recompute full", "float64", EXACT),
    "float64, ZeRO-3": ("", 3, "--dtype float64 --zero 3 --recompute full", "float64", EXACT),
    "float32": ("", 1, "--dtype float32", "float64", 1e-5),
    "bfloat16": ("", 1, "--dtype bfloat16", "float64", 1e-2),
    "bfloat16, selective recomputation": ("", 1, "--dtype bfloat16 --recompute selective", "bfloat16", 1e-2),
    "bfloat16, full recomputation": ("", 1, "--dtype bfloat16 --recompute full", "bfloat16", 1e-2),
    "float16": ("", 1, "--dtype float16", "float64", 2e-3),
    "experts, float64": ("", 7, f"--dtype float64 {EXPERTS}", "", 0.0),
    "experts, bfloat16": ("", 7, f"--dtype bfloat16 {FREE}", "", 0.0),
    # Step 8 leaves its kernels in the modules of earlier steps, so it comes last
    "float64, kernels of step 8": ("", 8, "--dtype float64", "float64", EXACT),
    "float32, kernels of step 8": ("", 8, "--dtype float32", "float32", 1e-5),
    "float32, pieces compiled": ("", 8, "--dtype float32 --no-fused --compile", "float32", 1e-5),
    "bfloat16, kernels of step 8": ("", 8, "--dtype bfloat16", "bfloat16", 1e-2),
    "float16, kernels of step 8": ("", 8, "--dtype float16", "float16", 2e-3),
    "experts, float64, kernels of step 8": ("", 8, f"--dtype float64 {EXPERTS}", "experts, float64", EXACT),
    "experts, bfloat16, kernels of step 8": ("", 8, f"--dtype bfloat16 {FREE}", "experts, bfloat16", 3e-2),
}
QUICK = ["float64 on the CPU", "float64", "float64, ZeRO-3", "bfloat16", "float32, pieces compiled"]


@on_devices(RUNS, QUICK)
def test_numbers(found, item):
    def train(name: str) -> None:
        device, step, flags, *_ = RUNS[name]
        train_alone(found, name, step, f"{SMALL} --lr 3e-3 --steps {1 if found.quick else 10} {flags}", device)

    *_, expected, bound = RUNS[item]
    if expected:
        train(expected)  # unless it has been
    train(item)
    if expected:
        worst = difference(found, item, expected)
        found.note(f"largest difference, {item}", f"{worst:.1e}")
        assert worst <= bound


@on_devices([""], quick=[""])
def test_zero_3_frees_a_layer(found, item):
    """It gathers weights into storage that it takes and gives back: is the memory really free?"""
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
    for _ in range(2):
        unit.fetch().wait()
        assert size <= allocated() - before < size + 2**21
        assert torch.equal(unit.weights[unit.mine], unit.shard)
        unit.free()
        assert allocated() == before


def run_pytest(found: Findings, *arguments: str, seconds: float) -> None:
    """Run tests outside of this folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--ignore", "tests/gpu_check"]
    done = run_command([*command, *arguments], timeout=seconds)
    summary = re.findall(r"^(?:FAILED|ERROR) \S+|^.*\d (?:passed|skipped).*", done.stdout, re.M)
    found.note(f"pytest {' '.join(arguments)}", "; ".join(summary))
    assert done.returncode == 0, done.stdout[-2000:]


@on_devices([""])
def test_marked(found, item):
    """Those marked gpu, among them the kernels in the sizes of real models."""
    run_pytest(found, "-m", "gpu", "tests", seconds=300)


@on_devices([""])
def test_kernels(found, item):
    """Those of step 8's kernels, which Triton interprets on a CPU, with the kernels compiled."""
    run_pytest(found, "-m", "not gpu", "tests/mechanisms/step08/kernels", seconds=340)
