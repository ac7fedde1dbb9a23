"""Experts on two nodes: what crosses the cable, a copy of a token per expert or one per node, with and without a limit.

`OncePerNode` sends as DeepSeek-V3 does (arXiv:2412.19437, section 3.2.2): a token crosses to a node once, to the rank
that has the place of its own rank there, which hands it on to the ranks of its node. It is made of the same parts as
the layer of this step, and its gradients are the same.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from common.experiments.on_nodes import NODES, RANKS, Found, Workload, two_nodes
from common.experiments.training_step import groups_of
from common.group import Group
from common.model_config import ModelConfig
from common.process_groups import Degrees, Mesh
from step07_expert_parallel import cost
from step07_expert_parallel.apply_experts import routers_of
from step07_expert_parallel.experiments.layer import Training
from step07_expert_parallel.expert_parallel import TokenDispatcher
from step07_expert_parallel.moe import Choices, MoE, _Combine, _Copy
from step07_expert_parallel.router import Router

EXPERTS, TOP_K = 8, 4
MODEL = {"step_name": "step07_expert_parallel", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "vocab": 256}
MODEL |= {"experts": EXPERTS, "top_k": TOP_K, "expert_ffn": 32, "data": "synthetic", "warmup": 1}
MODEL |= {"seq_len": 256, "micro_batch": 4, "global_batch": 4 * NODES * RANKS}
MODEL |= {"ep": NODES * RANKS, "expert_groups": NODES}


class OncePerNode(MoE):
    """The layer, if a token is sent once to each node that holds some of its experts, and handed on there."""

    def forward(self, x):
        across, inside = groups(x.device)
        chosen, gates = self.router(x)
        gates = gates.new_zeros(len(gates), EXPERTS).scatter(1, chosen, gates).unflatten(1, (NODES, -1))

        nodes = choices_of(gates.sum(-1))  # as experts are chosen, but for each node: at most once
        rows = torch.cat((_Copy.apply(x.flatten(0, 1), nodes), gates.flatten(0, 1)[nodes.order]), -1)
        outer = TokenDispatcher(nodes.counts, across, self.before_wait)
        rows, _ = outer.arrive(outer.dispatch(rows))
        tokens, gates = rows.split((x.shape[-1], gates.shape[-1]), -1)  # gates of this node's experts

        experts = choices_of(gates)
        inner = TokenDispatcher(experts.counts, inside, self.before_wait)
        rows, counts = inner.arrive(inner.dispatch(_Copy.apply(tokens, experts)))
        rows = inner.back(self.experts(rows, counts))
        rows = outer.back(_Combine.apply(rows, gates.flatten()[experts.order], experts))  # the node's sum of a token
        return _Combine.apply(rows, rows.new_ones(len(rows)), nodes).view_as(x)


def groups(device: torch.device) -> tuple[Group, Group]:
    """The ranks of this one's place on all nodes, and the ranks of its node."""
    grid = groups_of(Degrees(dp=NODES, tp=RANKS), device)
    return replace(grid.dp, name="across"), replace(grid.tp, name="inside")


def choices_of(gates: Tensor) -> Choices:
    """gates (tokens, n), those of others than the chosen are 0: each token chooses as many of the n as it needs."""
    number = gates.shape[-1]
    return Choices(torch.where(gates > 0, torch.arange(number), number), number, some_dropped=True)


CASES = {
    f"{words}, {limit_words}": (kind, limit)
    for words, kind in (("a copy per expert (ours)", MoE), ("a copy per node", OncePerNode))
    for limit_words, limit in (("no limit", NODES), ("at most 1 node", 1))
}


def nodes(quick: bool) -> None:
    """Two nodes, a slow cable: bytes of a step's tokens and its time, with and without the node limit."""
    found = two_nodes("a step's gradients", step, CASES, predict, "20mbit", repeats=1 if quick else 3)
    for name, each in found.items():
        model, norm = each.value
        copies = cost.copies(model, NODES, CASES[name][0] is OncePerNode)
        print(f"  {name}: {copies:.2f} copies of a token cross (predicted); gradient norm {norm:.8f}")


def predict(case: tuple, found: Found) -> float:
    """Seconds on the cable: nothing hides."""
    return found.free + found.on_cable.total()


def step(mesh: Mesh, case: tuple[type, int]) -> Workload:
    """On a rank: the gradients of a step. Returns the model and the norm of the whole gradient each time."""
    kind, limit = case
    training = Training(mesh, **MODEL | {"node_limit": limit})
    for _, router in routers_of(training.pipeline.stages):
        router.choose = partial(choose_at_random, mesh.rank, router)
    for stage in training.pipeline.stages:
        for layer in stage.layers.values():
            layer.mlp.__class__ = kind

    def gradients() -> tuple[ModelConfig, float]:
        squares = sum(float(each.square().sum()) for each in training.gradients())
        return training.config.model_config, squares**0.5

    across, inside = groups(mesh.device)
    return Workload(gradients, SimpleNamespace(**vars(training.mesh), rank=mesh.rank, across=across, inside=inside))


def choose_at_random(rank: int, router: Router, scores: Tensor) -> Tensor:
    """As a router of balanced loads, so that both directions of the cable carry the same; every time alike."""
    return Router.choose(router, torch.rand(scores.shape, generator=torch.Generator().manual_seed(rank)))
