"""Run a step's real train() in float64 and compare it with another layout. A case is a list of flags.

`run_cases` trains cases inside one started world, `reference` in this process, and `differences` compares two results.
"""

import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.config import flag_names, spelled
from common.launching.command_line import STEP_NAMES
from common.start import environment
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks, steps_of
from tests.mutants.patches import patched  # loads every step once in the fork server, instead of in every rank

TOLERANCE = 1e-10
SMALL = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 24 --data synthetic --device cpu"
STEPS = 10 if os.environ.get("TEST_ALL") else 2  # the second one starts from the state that the first one leaves
SMALL += f" --global-batch 12 --micro-batch 1 --steps {STEPS} --dtype float64 --weight-decay 0.1 --seed 3"


SGD, ADAMW = "--optimizer sgd --lr 1e-2 --clip 0", "--optimizer adamw --lr 1e-3 --clip 0.5"
TIED, UNTIED = "--tie-embeddings", "--no-tie-embeddings"


@dataclass
class Result:
    """One training run: losses and gradient norms of its steps, and the final parameters of the whole model."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, np.ndarray]


def train_here(step: int, flags: str) -> list[tuple]:
    """Train with the train.py of `step` on this rank; (name, global shape, box, values) of what it owns at the end."""
    config = configure(step, flags)
    return boxes_of(importlib.import_module(f"{STEP_NAMES[step - 1]}.train").train(config, mesh_of(config)))


def boxes_of(tensors: list[torch.Tensor]) -> list[tuple]:
    """(name, global shape, box, values) of what this rank owns of these tensors, which have specs."""
    boxes = []
    for tensor in tensors:
        spec = tensor.spec
        if spec.owner:
            parts = spec.boxes(tensor.detach())
            boxes += [(spec.name, spec.global_shape, box, part.double().numpy().copy()) for box, part in parts]
    return boxes


def curve_of(run_dir: str | Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step in a run's record."""
    return [(float(line["loss"]), float(line["grad_norm"])) for line in steps_of(run_dir)]  # "inf" and "nan" too


def train_case(step: int, flags: str, mutant: str | None = None) -> dict:
    """Train on this rank. What it knows of the result: `curve` (rank 0 only) and the `boxes` of all that it owns."""
    with tempfile.TemporaryDirectory() as folder:
        with patched(mutant):
            boxes = train_here(step, f"{SMALL} {flags} --run-dir {folder}")
        return {"curve": curve_of(folder) if environment().rank == 0 else [], "boxes": boxes}


def train_cases(step: int, cases: list[str], mutants: list[str | None] | None = None) -> list[dict]:
    """`train_case` of each case, under its mutant."""
    mutants = mutants or [None] * len(cases)
    return [train_case(step, flags, mutant) for flags, mutant in zip(cases, mutants, strict=True)]


def run_cases(world: int, step: int, cases: list[str], mutants: list[str | None] | None = None) -> list[Result]:
    """Train every case with the train.py of `step` on `world` ranks."""
    return results_of(world, train_cases, step, cases, mutants)


def results_of(world: int, function: Callable, *args) -> list[Result]:
    """Call a function that trains several cases on `world` ranks; of each case, the parts of all ranks put together."""
    return [assemble(parts) for parts in zip(*run_ranks(world, function, *args, timeout=600), strict=True)]


def assemble(parts: Sequence[dict]) -> Result:
    """What all ranks know, as the result of the whole run. Every element must be owned by exactly one rank."""
    whole, owners = {}, {}
    for name, shape, box, values in (each for part in parts for each in part["boxes"]):
        inside = tuple(slice(start, min(stop, size)) for (start, stop), size in zip(box, shape, strict=True))
        if name not in whole:
            whole[name], owners[name] = np.full(shape, np.nan, values.dtype), np.zeros(shape, int)
        whole[name][inside] = values[tuple(slice(0, max(0, each.stop - each.start)) for each in inside)]
        owners[name][inside] += 1
    for name, count in owners.items():
        assert (count == 1).all(), f"{name}: elements are owned by {count.min()} to {count.max()} ranks"
    losses, norms = zip(*parts[0]["curve"], strict=True)
    return Result(list(losses), list(norms), whole)


def training_of(case: str, micro_batch: int | None = None) -> str:
    """The case without flags of the layout: one run is the reference of all. It takes all samples of a step as one
    micro-batch, or as micro-batches of this size: step 1's tests show that their number does not matter.
    """
    layout, kept, keeping = {spelled(name) for name in flag_names("layout")}, [], True
    for word in case.split():
        if word.startswith("--"):
            keeping = word.replace("--no-", "--") not in layout
        if keeping:
            kept.append(word)
    batch = kept[kept.index("--global-batch") + 1] if "--global-batch" in kept else 12
    return " ".join([*kept, f"--micro-batch {micro_batch or batch}"])


@functools.cache
def reference(flags: str, step: int | None = None) -> Result:
    """A training in one process by this step; by default step 1 unless it has what only a later step has."""
    earliest = 8 if "--mtp" in flags else 7 if "--experts" in flags else 6 if "--mask-documents" in flags else 1
    return assemble([train_case(step or earliest, flags)])


def differences(result: Result, expected: Result) -> dict[str, float]:
    """Relative differences: the largest of any step's loss and gradient norm, ||a-b|| / ||b|| of each parameter."""
    assert len(result.losses) == len(expected.losses) > 0, "the runs have different numbers of steps"
    assert result.parameters.keys() == expected.parameters.keys(), "the runs have different parameters"

    def largest(ours, theirs):
        return float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))

    found = {"loss": largest(result.losses, expected.losses), "grad_norm": largest(result.norms, expected.norms)}
    for name, theirs in expected.parameters.items():
        size = np.linalg.norm(theirs) or 1.0  # what stays 0 must be 0
        found[name] = float(np.linalg.norm(result.parameters[name] - theirs) / size)
    return found


def assert_parity(result: Result, expected: Result, case: str, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError naming the case and what differs."""
    wrong = {name: value for name, value in differences(result, expected).items() if not value < tolerance}
    assert not wrong, f"{case}: relative differences above {tolerance}: {wrong}"
