"""A report of the bytes that a rank sends for each dimension, and of what it holds: all of them at once, by formula."""

import statistics

import pytest

from common.experiments.training_step import on_every_case
from step08_5d.experiments import cost, formulas
from step08_5d.experiments.tools import DENSE, EXPERTS, FIVE_D, FOUR_D
from tests.harness.observing import mesh_of
from tests.harness.ranks import run_ranks

SMALL = {"layers": 4, "hidden": 32, "ffn": 48, "vocab": 256, "seq_len": 16, "global_batch": 2}


def ranks_measure(cases: list[dict]) -> list[dict]:
    """On a rank."""
    mesh = mesh_of(cost.resolved(DENSE))
    return on_every_case(mesh, lambda: None, cost.measure, cases)


def test_bytes_of_every_dimension():
    cases = [DENSE | FOUR_D | SMALL, EXPERTS | FIVE_D | SMALL | {"expert_ffn": 16, "zero": 1}]
    cases.append(DENSE | SMALL | {"zero": 3, "global_batch": 16})  # two micro-batches
    ranks = run_ranks(8, ranks_measure, cases)
    for index, flags in enumerate(cases):
        config, found = cost.resolved(flags), [rank[index] for rank in ranks]
        assert cost.by_dimension(found, "sent") == pytest.approx(formulas.sent(config), rel=1e-12)
        for kind, size in formulas.held(config).items():
            assert statistics.mean(rank["held"][kind] for rank in found) == pytest.approx(size, rel=1e-2), kind
