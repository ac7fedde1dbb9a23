"""The same training on the GPU as on the CPU, and on several ranks as in one process, in all types; and other tests."""

import importlib
import math
import re
import sys
from pathlib import Path
from unittest import mock

import torch

from common.collectives import all_reduce, barrier
from common.compare import relative_difference
from common.launching.command_line import STEP_NAMES, parse
from common.launching.launch import end_cleanly
from common.launching.run_mesh import degrees_of
from common.process_groups import Degrees, build_mesh
from common.start import environment, init_distributed
from step02_data_parallel.collectives_tour import tour
from tests.gpu_check.findings import Findings, on_devices
from tests.gpu_check.launching import need_ranks, run_on_ranks, train_alone
from tests.harness.ranks import run_command, steps_of
from tests.mechanisms import test_asynchrony
from tests.parity import runs
from tests.parity.pairwise import spelled_out

TOLERANCE = 1e-10
TIMEOUT = 60  # seconds for a collective
SMALL = "--layers 4 --hidden 64 --heads 4 --kv-heads 2 --ffn 96 --vocab 256 --seq-len 32 --data synthetic"
SMALL += " --global-batch 8 --micro-batch 1 --seed 3 --warmup 2"
TRAINING = f"{SMALL} --steps 3 --dtype float64"
FREE = "--experts 8 --expert-ffn 32"  # no tokens are dropped: in a narrow type, rounding decides which
NARROW, BAND = "--dtype bfloat16", 5e-3  # ten times what the CPU shows
TILES = "--dtype bfloat16 --fp8 tile --hidden 128 --kv-heads 4 --ffn 256 --seq-len 128"  # wide enough for whole ones
EXPERTS = "--experts 8 --expert-ffn 32 --shared-experts 1 --balance bias --z-coef 0.01 --capacity-factor 1"
DIFFERENCES = ["layout", "flags", "largest relative difference of a loss or norm"]
# Of each part: ranks, step and flags. Step 0 is the tour of the collectives
LAYOUTS = {
    "nccl": f"""
        2|4 0
        2 8 --tp 2
        4 8 --cp 2 --pp 2 --schedule zb-h1
        4 8 {EXPERTS} --ep 4 --cp 2 --tp 2 --zero 3 --recompute full
    """,
    # What float64 never calls: 16-bit kernels, the ring's blocks with their log-sum-exp, PyTorch's grouped product
    "bfloat16": f"""
        2 8 {NARROW} --tp 2 --zero 1
        2 8 {NARROW} --cp 2 --zero 3 --recompute full
        2 8 {NARROW} {FREE} --ep 2
        4 8 {NARROW} {FREE} --ep 2 --pp 2 --schedule zb-h1
    """,
    "shared_gpu": f"""
        8 8 --pp 2 --cp 2 --tp 2 --recompute selective
        8 8 {EXPERTS} --pp 2 --cp 2 --tp 2 --ep 4 --zero 1
        16 8 {EXPERTS} --dp 2 --pp 2 --cp 2 --tp 2 --ep 8 --zero 1 --schedule dualpipe
    """,
}
GROUPS: dict[str, dict[str, list[str]]] = {part: {} for part in LAYOUTS}  # those that train on the same ranks
for ranks, step, flags in test_asynchrony.LAYOUTS:  # where NCCL's semantics are played on gloo
    if ranks <= 4:
        GROUPS["nccl"].setdefault(f"{ranks} ranks, step {step}", []).append(f"{test_asynchrony.BASE} {flags}")
for part, text in LAYOUTS.items():
    for ranks, step, *flags in spelled_out(text):
        GROUPS[part].setdefault(f"{ranks} ranks, step {step}", []).append(" ".join([TRAINING, *flags]))
GROUPS["shared_gpu"] |= {name: layouts[-1:] for name, layouts in GROUPS["nccl"].items() if name.startswith("2 ")}


def difference(found: Findings, run: str, expected: str) -> float:
    """Return the largest relative difference of any step's loss or gradient norm."""
    ours, theirs = (steps_of(found.folder / each) for each in (run, expected))
    if len(ours) != len(theirs):
        return math.inf
    return max(relative_difference(b[key], a[key]) for a, b in zip(ours, theirs) for key in ("loss", "grad_norm"))


def check_layouts(found: Findings, part: str, item: str, backend: str, together: bool = False) -> None:
    """Train these layouts on ranks that talk through `backend`, and compare each with one rank on the same device."""
    backend, wrong = "gloo" if found.device.type == "cpu" else backend, {}
    ranks, layouts = int(item.split()[0]), GROUPS[part][item]
    command = ["-m", "tests.gpu_check.test_training", found.folder, found.device.type, backend, part, item]
    run_on_ranks(found, item, command, ranks, TIMEOUT + (10 + 2 * ranks) * len(layouts), together)
    for index, flags in enumerate(layouts if "step 0" not in item else ()):
        alone = f"{item}, {index}, on one rank"
        step = 7 if "--experts" in flags else 6 if "--mask-documents" in flags else 1
        train_alone(found, alone, step, f"{runs.SMALL} {runs.training_of(flags)}".replace(NARROW, ""))
        worst = difference(found, f"{item}, {index}", alone)
        own = flags.removeprefix(test_asynchrony.BASE).removeprefix(TRAINING).strip()
        found.row(f"largest differences through {backend}", DIFFERENCES, [item, own, f"{worst:.1e}"])
        if not worst < (BAND if NARROW in flags else TOLERANCE):
            wrong[flags] = worst
    assert not wrong


def train_layouts(folder: Path, device: str, backend: str, part: str, item: str) -> None:
    """On the ranks that have been started: train these layouts one after another, through this backend."""
    place = init_distributed(device, TIMEOUT)
    world = build_mesh(Degrees(dp=environment().world_size), place).world
    all_reduce(torch.ones(1, device=place), world)
    assert world.backend == backend, f"{world.backend} instead of {backend}"
    step = int(item.split()[-1])
    for index, layout in enumerate(GROUPS[part][item]):
        if step:
            flags = f"{runs.SMALL} {layout} --device {device} --timeout {TIMEOUT}".split()
            config = parse(step, [*flags, "--run-dir", f"{folder}/{item}, {index}"])
            config.resolve_and_check(world.size)
            mesh = build_mesh(degrees_of(config), place, config.model_config.kv_heads, timeout=TIMEOUT)
            importlib.import_module(f"{STEP_NAMES[step - 1]}.train").train(config, mesh)
        else:
            tour(world, place if backend == "nccl" else torch.device("cpu"))
        barrier(world)


@on_devices(GROUPS["nccl"], quick=["2 ranks, step 0", "2 ranks, step 3"])
def test_nccl(found, item):
    need_ranks(found)
    check_layouts(found, "nccl", item, "nccl")


@on_devices(GROUPS["bfloat16"], quick=["2 ranks, step 8"])
def test_bfloat16(found, item):
    """Step 8's kernels, beside one rank in float64."""
    need_ranks(found)
    check_layouts(found, "bfloat16", item, "nccl")


@on_devices(GROUPS["shared_gpu"])
def test_shared_gpu(found, item):
    """As more ranks than GPUs do: through gloo, in five dimensions."""
    check_layouts(found, "shared_gpu", item, "gloo", together=True)


# A run on one rank: the device ("": that of the check), step and flags, the run that it must equal, and the largest
# difference of any loss or norm. The bounds of the narrow types are some ten times what the CPU shows.
RUNS = {
    "float64 on the CPU": ("cpu", 1, "--dtype float64", "", 0.0),
    "float64": ("", 1, "--dtype float64", "float64 on the CPU", TOLERANCE),
    "float64, naive attention": ("", 1, "--dtype float64 --attention naive", "float64", TOLERANCE),
    "float64, selective recomputation": ("", 1, "--dtype float64 --recompute selective", "float64", TOLERANCE),
    "float64, ZeRO-3": ("", 3, "--dtype float64 --zero 3 --recompute full", "float64", TOLERANCE),
    "float32": ("", 1, "--dtype float32", "float64", 1e-5),
    "bfloat16": ("", 1, "--dtype bfloat16", "float64", 1e-2),
    "bfloat16, selective recomputation": ("", 1, "--dtype bfloat16 --recompute selective", "bfloat16", 1e-2),
    "bfloat16, full recomputation": ("", 1, "--dtype bfloat16 --recompute full", "bfloat16", 1e-2),
    "float16": ("", 1, "--dtype float16", "float64", 2e-3),
    "experts, float64": ("", 7, f"--dtype float64 {EXPERTS}", "", 0.0),
    "experts, bfloat16": ("", 7, f"--dtype bfloat16 {FREE}", "", 0.0),
    "FP8 in tiles on the CPU": ("cpu", 8, TILES, "", 0.0),
    # Step 8 leaves its kernels in the modules of earlier steps, so it comes last
    "float64, kernels of step 8": ("", 8, "--dtype float64", "float64", TOLERANCE),
    "float32, kernels of step 8": ("", 8, "--dtype float32", "float32", 1e-5),
    "float32, pieces compiled": ("", 8, "--dtype float32 --no-fused --compile", "float32", 1e-5),
    "bfloat16, kernels of step 8": ("", 8, "--dtype bfloat16", "bfloat16", 1e-2),
    "float16, kernels of step 8": ("", 8, "--dtype float16", "float16", 2e-3),
    "experts, float64, kernels of step 8": ("", 8, f"--dtype float64 {EXPERTS}", "experts, float64", TOLERANCE),
    "experts, bfloat16, kernels of step 8": ("", 8, f"--dtype bfloat16 {FREE}", "experts, bfloat16", 3e-2),
    "FP8 in tiles": ("", 8, TILES, "FP8 in tiles on the CPU", 1e-2),
}
QUICK = ["float64 on the CPU", "float64", "float64, ZeRO-3", "bfloat16", "float32, pieces compiled"]


@on_devices(RUNS, QUICK)
def test_numbers(found, item):
    def train(name: str) -> None:
        device, step, flags, *_ = RUNS[name]
        train_alone(found, name, step, f"{SMALL} --lr 3e-3 --steps {1 if found.quick else 10} {flags}", device)

    *_, expected, bound = RUNS[item]
    for name in filter(None, (expected, item)):  # unless it has been
        train(name)
    if expected:
        worst = difference(found, item, expected)
        found.note(f"largest difference, {item}", f"{worst:.1e}")
        assert worst <= bound


# Step and flags. The host may wait for the device when the step's numbers are read, and in layers with experts
WAITS = {
    "step 1": (1, "--dtype bfloat16"),
    "step 1 in float16, with recomputation": (1, "--dtype float16 --recompute selective"),
    "step 3, ZeRO-3": (3, "--dtype bfloat16 --zero 3"),
    "step 8": (8, "--dtype bfloat16"),
    "step 8, attention too": (8, "--dtype bfloat16 --own-attention"),
    "step 8, FP8 in tiles": (8, TILES),
    "step 8, FP8 with histories": (8, TILES.replace("tile", "delayed")),
}


@on_devices(WAITS, quick=["step 1"])
def test_waits(found, item):
    """In a whole train_step, but the first, the host waits for nothing."""
    number, flags = WAITS[item]
    module = importlib.import_module(f"{STEP_NAMES[number - 1]}.train")
    original, strict = module.train_step, found.device.type == "cuda"

    def watched(step, *arguments):
        if step and strict:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return original(step, *arguments)
        finally:
            if strict:
                torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(module, "train_step", watched):
        train_alone(found, item, number, f"{SMALL} --steps 3 {flags}")


def run_pytest(found: Findings, *arguments: str) -> None:
    """Run tests outside of this folder. Files that need a package which is not here are noted, and the rest is run."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--ignore", "tests/gpu_check"]
    done = run_command([*command, "--continue-on-collection-errors", *arguments], timeout=340)
    summary = re.findall(r"^(?:FAILED|ERROR) \S+|^.*\d (?:passed|skipped).*", done.stdout, re.M)
    missing = set(re.findall(r"^E +ModuleNotFoundError: No module named '(\w+)", done.stdout, re.M))
    errors = [line for line in summary if line.startswith("ERROR")]
    found.note(f"pytest {' '.join(arguments)}", "; ".join([*summary, *(f"{name} is not here" for name in missing)]))
    assert " passed" in done.stdout and "FAILED" not in done.stdout, done.stdout[-2000:]
    assert done.returncode == 0 or missing and len(errors) <= len(re.findall(r"^E +ModuleNotFound", done.stdout, re.M))


@on_devices([""])
def test_marked(found, item):
    """Those marked gpu, among them the kernels in the sizes of real models."""
    run_pytest(found, "-m", "gpu", "tests")


@on_devices([""])
def test_kernels(found, item):
    """Those of step 8's kernels, which Triton interprets on a CPU, with the kernels compiled."""
    run_pytest(found, "-m", "not gpu", "tests/mechanisms/step08/kernels")


if __name__ == "__main__":
    end_cleanly(lambda: train_layouts(Path(sys.argv[1]), *sys.argv[2:]))
