"""On several ranks that `test_training` has started: train layouts one after another."""

import importlib
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from common.collectives import all_reduce, barrier
from common.launching.command_line import STEP_NAMES, parse
from common.launching.launch import end_cleanly
from common.process_groups import Degrees, build_mesh
from common.start import environment, init_distributed
from step02_data_parallel.collectives_tour import tour

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


def groups(*indices: int) -> dict[str, list[int]]:
    """Those with the same step and number of ranks, which train one after another on the same ranks."""
    found: dict[str, list[int]] = {}
    for index in indices:
        found.setdefault(f"{LAYOUTS[index].ranks} ranks, step {LAYOUTS[index].step}", []).append(index)
    return found


def train_layouts(folder: Path, device: str, backend: str, indices: list[int]) -> None:
    """Train these layouts one after another, on ranks that must talk through this backend."""
    place = init_distributed(device, TIMEOUT)
    world = build_mesh(Degrees(dp=environment().world_size), place).world
    all_reduce(torch.ones(1, device=place), world)
    assert world.backend == backend, f"{world.backend} instead of {backend}"
    for index in indices:
        layout = LAYOUTS[index]
        if layout.step:
            flags = f"{TRAINING} {layout.flags} --device {device} --timeout {TIMEOUT}".split()
            config = parse(layout.step, [*flags, "--run-dir", f"{folder}/{index}"])
            config.resolve_and_check(layout.ranks)
            mesh = build_mesh(Degrees.of(config), place, config.model_config.kv_heads, timeout=TIMEOUT)
            importlib.import_module(f"{STEP_NAMES[layout.step - 1]}.train").train(config, mesh)
        else:
            tour(world, place if backend == "nccl" else torch.device("cpu"))
        barrier(world)


if __name__ == "__main__":
    folder, device, backend, *indices = sys.argv[1:]
    end_cleanly(lambda: train_layouts(Path(folder), device, backend, list(map(int, indices))))
