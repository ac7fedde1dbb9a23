"""Gradients of a parallel run against those of one process, rank by rank and parameter by parameter."""

import functools
import importlib
from types import ModuleType

import torch

from common.drawing.tables import print_comparison
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import reference_gradients
from common.experiments.training_step import Training, checked, on_every_case
from common.process_groups import Mesh


def compare_with_one_process(train: ModuleType, cases: list[tuple[int, str, dict]]) -> None:
    """Print a table of the largest difference of any gradient in each case from that of one process.

    Args:
        train: the step's train.py, as a module.
        cases: (ranks, name, flags). One process takes the whole global batch at once.
    """
    rows, difference = [], functools.partial(_difference, train.__name__)
    for ranks in sorted({ranks for ranks, *_ in cases}):
        names, flags = zip(*[(name, flags) for size, name, flags in cases if size == ranks])
        found = on_ranks(ranks, on_every_case, difference, list(flags), title="gradients", jobs=len(flags))
        rows += [(f"{ranks} ranks, {name}", 0.0, max(worst)) for name, worst in zip(names, zip(*found))]
    title = "largest ||a - b|| / ||b|| of any rank's part of any parameter's gradient, float64"
    print_comparison(title, "", rows, ".1e")
    print(f"  largest of all: {max(worst for *_, worst in rows):.1e}")


def _difference(train: str, mesh: Mesh, flags: dict) -> float:
    """On a rank: the largest difference of one of its gradients from its part of one process's."""
    run = Training(importlib.import_module(train), *checked(mesh, **flags))
    return worst_difference(run.shards, run.gradients(), reference_gradients(run.config, run.batches))


def worst_difference(
    shards: list[torch.Tensor], gradients: list[torch.Tensor], whole: dict[str, torch.Tensor]
) -> float:
    """Return the largest ||a - b|| / ||b|| of the gradient of one of this rank's shards and its part of the whole."""
    worst = 0.0
    for shard, gradient in zip(shards, gradients, strict=True):
        squares = [0.0, 0.0]
        for box, mine in shard.spec.boxes(gradient):
            expected = whole[shard.spec.name][tuple(slice(*bounds) for bounds in box)]  # without rows that pad
            squares[0] += (mine[tuple(map(slice, expected.shape))] - expected).square().sum().item()
            squares[1] += expected.square().sum().item()
        worst = max(worst, (squares[0] / max(squares[1], 1e-300)) ** 0.5)
    return worst
