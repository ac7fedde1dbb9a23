"""Run a step's real train() in float64 and compare it with another layout.

A case is a list of flags. `reference` trains it in this process with step 1; `cases_on_ranks` (to be called by
run_ranks) trains many cases inside one started world; `differences` compares two results.
"""

import functools
import importlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.command_line import STEP_NAMES, parse
from common.process_groups import Degrees, build_mesh, environment

TOLERANCE = 1e-10
SMALL = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 24 --data synthetic --device cpu"
SMALL += " --global-batch 12 --micro-batch 1 --steps 10 --dtype float64 --weight-decay 0.1 --seed 3"


@dataclass
class Result:
    """One training run: per-step losses and gradient norms, and the final parameters that this rank owns, by name."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, np.ndarray]


def train_case(step: int, flags: str, mutant: str | None = None) -> Result:
    """Train with the train.py of `step` in the world that this process is in. Losses are known to rank 0 only."""
    from tests.mutants.patches import patched

    module = importlib.import_module(f"{STEP_NAMES[step - 1]}.train")
    with tempfile.TemporaryDirectory() as folder:
        config = parse(step, [*SMALL.split(), *flags.split(), "--run-dir", folder])
        config.validate(environment()[1])
        device = __import__("torch").device("cpu")
        mesh = build_mesh(Degrees(dp=config.dp), device, config.model_config.kv_heads)
        with patched(mutant):
            model = module.train(config, mesh)
        lines = []
        if mesh.rank == 0:
            lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    owned = {p.spec.name: p.detach().numpy().copy() for p in model.parameters() if p.spec.owner}
    return Result([line["loss"] for line in lines], [line["grad_norm"] for line in lines], owned)


def cases_on_ranks(step: int, cases: list[str], mutants: list[str | None] | None = None) -> list[Result]:
    """Every case in turn on this rank, within one world."""
    return [train_case(step, flags, mutant) for flags, mutant in zip(cases, mutants or [None] * len(cases))]


@functools.cache
def reference(flags: str) -> Result:
    """The same training in one process by step 1."""
    return train_case(1, flags)


def differences(result: Result, expected: Result) -> dict[str, float]:
    """Relative differences: the largest of any step's loss and gradient norm, ||a-b|| / ||b|| of each parameter."""
    assert len(result.losses) == len(expected.losses) > 0, "the runs have different numbers of steps"
    assert result.parameters.keys() == expected.parameters.keys(), "the runs have different parameters"

    def largest(ours, theirs):
        return float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))

    found = {"loss": largest(result.losses, expected.losses), "grad_norm": largest(result.norms, expected.norms)}
    for name, theirs in expected.parameters.items():
        found[name] = float(np.linalg.norm(result.parameters[name] - theirs) / np.linalg.norm(theirs))
    return found


def assert_parity(result: Result, expected: Result, case: str, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError naming the case and what differs."""
    found = differences(result, expected)
    wrong = {name: value for name, value in found.items() if not value < tolerance}
    assert not wrong, f"{case}: relative differences above {tolerance}: {wrong}"
