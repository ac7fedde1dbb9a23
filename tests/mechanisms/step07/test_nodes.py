"""A token that is sent once to each node: the same gradients as with a copy per expert."""

import pytest
import torch

from common.experiments.on_nodes import NODES, RANKS
from common.process_groups import Degrees, build_mesh
from step07_expert_parallel.experiments import nodes
from tests.harness.ranks import run_ranks


def norms(cases: list[tuple]) -> list[float]:
    mesh = build_mesh(Degrees(dp=NODES * RANKS), torch.device("cpu"))
    return [nodes.step(mesh, case).function()[1] for case in cases]


@pytest.mark.parametrize("limit", [NODES, 1])
def test_once_per_node_is_the_same_layer(limit):
    cases = [case for case in nodes.CASES.values() if case[1] == limit]
    for per_expert, per_node in run_ranks(NODES * RANKS, norms, cases):
        assert per_node == pytest.approx(per_expert, rel=2e-7)  # in float32
