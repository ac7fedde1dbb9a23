"""The same training on several ranks as in one process, to 1e-10 in float64, closely in bfloat16; many short runs."""

import importlib
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from common.collectives import all_reduce, barrier
from common.launching.command_line import STEP_NAMES, parse
from common.launching.launch import end_cleanly
from common.process_groups import Degrees, build_mesh
from common.record.compare import relative_difference
from common.start import environment, init_distributed
from step02_data_parallel.collectives_tour import tour
from tests.gpu_check import launching
from tests.gpu_check.findings import Findings
from tests.gpu_check.launching import train_alone
from tests.harness.ranks import steps_of

TOLERANCE = 1e-10
TIMEOUT = 60  # seconds for a collective
SMALL = "--layers 4 --hidden 64 --heads 4 --kv-heads 2 --ffn 96 --vocab 256 --seq-len 32 --data synthetic"
SMALL += " --global-batch 8 --micro-batch 1 --seed 3 --warmup 2"
TRAINING = f"{SMALL} --steps 3 --dtype float64"
FREE = "--experts 8 --expert-ffn 32"  # no tokens are dropped: in a narrow type, rounding decides which
NARROW, BAND = "--dtype bfloat16", 5e-3  # ten times what the CPU shows
EXPERTS = "--experts 8 --expert-ffn 32 --shared-experts 1 --balance bias --z-coef 0.01 --capacity-factor 1"


class Layout(NamedTuple):
    """What is trained on how many ranks: a step and its flags. Step 0 is the tour of the collectives."""

    ranks: int
    step: int
    flags: str = ""

    @property
    def reference(self) -> str:
        """Which of REFERENCES trains the same on one rank, in float64."""
        return "experts" if EXPERTS in self.flags else "free" if FREE in self.flags else "dense"

    @property
    def bound(self) -> float:
        """The largest relative difference from the reference."""
        return BAND if NARROW in self.flags else TOLERANCE

    def __str__(self) -> str:
        return f"{self.ranks} ranks, " + (f"step {self.step} {self.flags}" if self.step else "tour of the collectives")


LAYOUTS = [
    Layout(2, 0),
    Layout(2, 2, "--dp-mode naive"),
    Layout(2, 2, "--dp-mode overlap"),
    Layout(2, 2, "--dp-mode bucket --bucket-mb 0.1"),
    Layout(2, 3, "--zero 1 --bucket-mb 0.1"),
    Layout(2, 3, "--zero 2 --bucket-mb 0.1"),
    Layout(2, 3, "--zero 3"),
    Layout(2, 3, "--zero 3 --recompute full"),
    Layout(2, 4, "--tp 2 --tp-mode plain"),
    Layout(2, 4, "--tp 2 --tp-mode overlap"),
    Layout(2, 4, "--tp 2 --tp-mode chunked"),
    Layout(2, 5, "--pp 2 --schedule 1f1b"),
    Layout(2, 5, "--pp 2 --schedule zbv"),
    Layout(2, 5, "--pp 2 --schedule dualpipe"),
    Layout(2, 6, "--cp 2"),
    Layout(2, 6, "--cp 2 --cp-mode allgather --cp-split striped"),
    Layout(2, 6, "--cp 2 --cp-mode ulysses --zero 3"),
    Layout(2, 7, f"{EXPERTS} --ep 2"),
    Layout(2, 7, f"{EXPERTS} --ep 2 --tp 2 --recompute full"),
    Layout(2, 7, f"{EXPERTS} --ep 2 --cp 2 --zero 3"),
    Layout(4, 0),
    Layout(4, 3, "--zero 2 --zero-replicas 2 --bucket-mb 0.1"),
    Layout(4, 3, "--zero 3 --recompute full"),
    Layout(4, 4, "--tp 4 --tp-mode chunked"),
    Layout(4, 4, "--tp 2 --zero 3"),
    Layout(4, 5, "--pp 4 --schedule dualpipe"),
    Layout(4, 5, "--pp 2 --tp 2 --schedule zbv"),
    Layout(4, 5, "--pp 2 --zero 2 --schedule 1f1b"),
    Layout(4, 6, "--cp 4 --cp-split contiguous"),
    Layout(4, 6, "--cp 2 --tp 2 --zero 1"),
    Layout(4, 6, "--cp 2 --pp 2 --schedule zbv --cp-mode allgather"),
    Layout(4, 7, f"{EXPERTS} --ep 4 --cp 2 --tp 2 --zero 1"),
    Layout(4, 7, f"{EXPERTS} --ep 2 --pp 2 --schedule dualpipe"),
    Layout(4, 7, f"{EXPERTS} --ep 2 --zero 2 --zero-replicas 2 --bucket-mb 0.1"),
    Layout(2, 8, "--tp 2"),
    Layout(4, 8, "--cp 2 --pp 2 --schedule zb-h1"),
    Layout(4, 8, f"{EXPERTS} --ep 4 --cp 2 --tp 2 --zero 3 --recompute full"),
    Layout(8, 8, "--pp 2 --cp 2 --tp 2 --recompute selective"),
    Layout(8, 8, f"{EXPERTS} --pp 2 --cp 2 --tp 2 --ep 4 --zero 1"),
    Layout(16, 8, f"{EXPERTS} --dp 2 --pp 2 --cp 2 --tp 2 --ep 8 --zero 1 --schedule dualpipe"),
    # What float64 never calls: 16-bit kernels, the ring's blocks with their log-sum-exp, PyTorch's grouped product
    Layout(2, 8, f"{NARROW} --tp 2 --zero 1"),
    Layout(2, 8, f"{NARROW} --cp 2 --zero 3 --recompute full"),
    Layout(2, 8, f"{NARROW} {FREE} --ep 2"),
    Layout(4, 8, f"{NARROW} {FREE} --ep 2 --pp 2 --schedule zb-h1"),
]
# Step and flags of a run on one rank
REFERENCES = {"dense": (1, TRAINING), "experts": (7, f"{TRAINING} {EXPERTS}"), "free": (7, f"{TRAINING} {FREE}")}
QUICK = [0, 6]  # indices of some layouts
SHARED = [0, 3, 7, 9, 12, 14, 17]  # of those that run through gloo too; those of more than 4 ranks do so only


def train_layouts(folder: Path, device: str, indices: list[int]) -> None:
    """Train these layouts one after another, on the ranks that torchrun has started; rank 0 notes which are done."""
    place = init_distributed(device, TIMEOUT)
    all_reduce(torch.ones(1, device=place), build_mesh(Degrees(dp=environment().world_size), place).world)
    for index in indices:
        layout = LAYOUTS[index]
        if layout.step:
            flags = f"{TRAINING} {layout.flags} --device {device} --timeout {TIMEOUT}".split()
            config = parse(layout.step, [*flags, "--run-dir", f"{folder}/{index}"])
            config.resolve_and_check(layout.ranks)
            mesh = build_mesh(Degrees.of(config), place, config.model_config.kv_heads, timeout=TIMEOUT)
            importlib.import_module(f"{STEP_NAMES[layout.step - 1]}.train").train(config, mesh)
        else:
            mesh = build_mesh(Degrees(dp=layout.ranks), place)
            tour(mesh.world, place if mesh.world.backend == "nccl" else torch.device("cpu"))
        barrier(mesh.world)
        if environment().rank == 0:
            Path(folder, f"{index}.done").write_text(mesh.world.backend)


def check_layouts(found: Findings, indices: list[int], backend: str, together: bool = False) -> None:
    """Train these layouts on ranks that talk through `backend`, and compare each with one rank on the same device.

    Layouts with the same number of ranks share their processes. If one fails, those after it get new ones. Those that
    an interrupted check has compared are not run again.
    """
    indices = [index for index in indices if not found.has(str(LAYOUTS[index]))]
    for name in {LAYOUTS[index].reference for index in indices}:
        train_alone(found, name, *REFERENCES[name])
    for ranks in sorted({LAYOUTS[index].ranks for index in indices}):
        left = [index for index in indices if LAYOUTS[index].ranks == ranks]
        while left:
            command, seconds = [found.folder, found.device.type, *left], TIMEOUT + (10 + 2 * ranks) * len(left)
            command, name = ["-m", "tests.gpu_check.parity", *command], f"layouts-{left[0]}"
            statuses, errors = launching.run_on_ranks(found, name, command, ranks, seconds, together)
            first = left[0]
            while left and (done := found.folder / f"{left[0]}.done").exists():
                layout, index, used = LAYOUTS[left[0]], left.pop(0), done.read_text()
                worst = (
                    difference(found, str(index), layout.reference) if layout.step else 0.0
                )  # the tour asserts its own
                found.check(str(layout), worst < layout.bound and used == backend, f"{worst:.1e} through {used}")
            if left and None in statuses and left[0] != first:
                continue  # right, but slow
            if left:
                found.check(str(LAYOUTS[left.pop(0)]), False, f"statuses {statuses}; {errors}")
            else:
                found.check(f"{ranks} ranks end with status 0", set(statuses) == {0}, str(statuses))


def difference(found: Findings, run: str, expected: str) -> float:
    """Return the largest relative difference of any step's loss or gradient norm between two runs of a part."""
    ours, theirs = (steps_of(found.folder / each) for each in (run, expected))
    if len(ours) != len(theirs):
        return math.inf
    return max(relative_difference(b[key], a[key]) for a, b in zip(ours, theirs) for key in ("loss", "grad_norm"))


# ---- the parts -------------------------------------------------------------------------------------------------------


def nccl(found: Findings) -> None:
    """Parity in float64 of 2 and 4 ranks, which talk through NCCL, with one rank."""
    exact = [index for index, layout in enumerate(LAYOUTS) if layout.ranks <= 4 and layout.bound == TOLERANCE]
    over_nccl(found, QUICK if found.quick else exact)


def bfloat16(found: Findings) -> None:
    """Step 8's kernels in bfloat16 on ranks that talk through NCCL, beside one rank in float64."""
    narrow = [index for index, layout in enumerate(LAYOUTS) if layout.bound == BAND]
    over_nccl(found, narrow[:1] if found.quick else narrow)


def over_nccl(found: Findings, indices: list[int]) -> None:
    """`check_layouts`, if two ranks can talk at all."""
    if launching.ranks_can_meet(found):
        check_layouts(found, indices, "nccl" if found.device.type == "cuda" else "gloo")


def shared_gpu(found: Findings) -> None:
    """Parity in float64 of ranks that share the GPU, as more ranks than GPUs do: through gloo, in five dimensions."""
    many = [index for index, layout in enumerate(LAYOUTS) if layout.ranks > 4]
    check_layouts(found, [many[1]] if found.quick else [*SHARED, *many], "gloo", together=True)


def starts(found: Findings) -> None:
    """Short runs on two ranks, all of which must end with status 0."""
    if not launching.ranks_can_meet(found):
        return
    runs, at_once = (1, 1) if found.quick else (30, 5)
    flags = f"{SMALL} --steps 3 --timeout {TIMEOUT} --device {found.device.type}".split()

    def start(index: int) -> tuple[list[int | None], str]:
        return launching.run_on_ranks(found, f"run-{index}", ["step02_data_parallel/train.py", *flags], 2, 2 * TIMEOUT)

    with ThreadPoolExecutor(at_once) as pool:
        ended = list(pool.map(start, range(runs)))
    bad = [f"{statuses}: {errors}" for statuses, errors in ended if set(statuses) != {0}]
    found.check(f"{runs} runs, {at_once} at a time, end with status 0", not bad, "; ".join(bad) or "all")


if __name__ == "__main__":
    end_cleanly(lambda: train_layouts(Path(sys.argv[1]), sys.argv[2], [int(each) for each in sys.argv[3:]]))
