"""A token that is sent once to each node: the same gradients as with a copy per expert."""

import pytest
import torch

from common.process_groups import Degrees, build_mesh
from step07_expert_parallel.experiments import nodes
from tests.harness.ranks import run_ranks

WORLD = nodes.NODES * nodes.RANKS


def norms(limit: str) -> list[float]:
    mesh = build_mesh(Degrees(dp=WORLD), torch.device("cpu"))
    return [step["norm"] for step in nodes.steps(mesh, [(way, limit) for way in nodes.WAYS], 1)]


@pytest.mark.parametrize("limit", nodes.LIMITS)
def test_once_per_node_is_the_same_layer(limit):
    per_expert, per_node = run_ranks(WORLD, norms, limit)[0]
    assert per_node == pytest.approx(per_expert, rel=2e-7)  # in float32
