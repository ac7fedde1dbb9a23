"""Experts on two nodes: what crosses the cable, a copy of a token per expert or one per node, with and without a limit.

`OncePerNode` sends as DeepSeek-V3 does (arXiv:2412.19437, section 3.2.2): a token crosses to a node once, to the rank
that has the place of its own rank there, which hands it on to the ranks of its node. It is made of the same parts as
the layer of this step, and its gradients are the same.
"""

from unittest.mock import patch

import torch
from torch import Tensor

from common import collectives
from common.drawing.tables import print_table
from common.errors import UsageError
from common.experiments.on_nodes import HEADER, NODES, RANKS, compared_cells, crosses, on_nodes, seconds_on, timed
from common.experiments.training_step import groups_of
from common.process_groups import Degrees, Mesh
from step07_expert_parallel import moe
from step07_expert_parallel.experiments.node_limit import fan_out
from step07_expert_parallel.experiments.ranks import Run
from step07_expert_parallel.expert_parallel import Journey
from step07_expert_parallel.moe import Choices, MoE, _Combine, _Copy
from step07_expert_parallel.router import Router

CABLE = "20mbit"
LAYERS, HIDDEN, TOKENS, EXPERTS, TOP_K = 2, 64, 1024, 8, 4  # tokens of a rank
MODEL = {"step_name": "step07_expert_parallel", "layers": LAYERS, "hidden": HIDDEN, "heads": 4, "kv_heads": 4}
MODEL |= {"experts": EXPERTS, "top_k": TOP_K, "expert_ffn": 32, "vocab": 256, "data": "synthetic", "warmup": 1}
MODEL |= {"seq_len": 256, "micro_batch": TOKENS // 256, "global_batch": NODES * RANKS * TOKENS // 256}
MODEL |= {"ep": NODES * RANKS, "expert_groups": NODES}
LIMITS = {"no limit": NODES, "at most 1 node": 1}


class OncePerNode(MoE):
    """The layer, if a token is sent once to each node that holds some of its experts, and handed on there."""

    def forward(self, x):
        grid = groups_of(Degrees(dp=NODES, tp=RANKS), x.device)
        across, inside = grid.dp, grid.tp  # the ranks of this one's place on all nodes; the ranks of its node
        chosen, gates = self.router(x)
        gates = gates.new_zeros(len(gates), EXPERTS).scatter(1, chosen, gates).unflatten(1, (NODES, -1))

        nodes = choices_of(gates.sum(-1))  # as experts are chosen, but for each node: at most once
        rows = torch.cat((_Copy.apply(x.flatten(0, 1), nodes), gates.flatten(0, 1)[nodes.order]), -1)
        outer = Journey(nodes.counts, across)
        rows, _ = outer.arrive(outer.start(rows))
        tokens, gates = rows.split((x.shape[-1], gates.shape[-1]), -1)  # gates of this node's experts

        experts = choices_of(gates)
        inner = Journey(experts.counts, inside)
        rows, counts = inner.arrive(inner.start(_Copy.apply(tokens, experts)))
        rows = inner.back(self.experts(rows, counts))
        rows = outer.back(_Combine.apply(rows, gates.flatten()[experts.order], experts))  # the node's sum of a token
        return _Combine.apply(rows, rows.new_ones(len(rows)), nodes).view_as(x)


def choices_of(gates: Tensor) -> Choices:
    """gates (tokens, n), those of others than the chosen are 0: each token chooses as many of the n as it needs."""
    number = gates.shape[-1]
    return Choices(torch.where(gates > 0, torch.arange(number), number), number, some_dropped=True)


WAYS = {"a copy per expert (ours)": MoE, "a copy per node": OncePerNode}


def nodes(quick: bool) -> None:
    """Two nodes, a slow cable: bytes of a step's tokens and its time, with and without the node limit."""
    repeats, cases = 1 if quick else 3, [(way, limit) for way in WAYS for limit in LIMITS]
    try:
        free = on_nodes(NODES, RANKS, steps, cases, repeats)[0]
        slow = on_nodes(NODES, RANKS, steps, cases, repeats, bandwidth=CABLE)
    except UsageError as error:
        print(f"  left out: {error}")
        return
    rows = []
    for index, (way, limit) in enumerate(cases):
        alone, ranks = free[index], [part[index] for part in slow]
        crossing = copies(way, LIMITS[limit])
        sent = sum(token_bytes(way, crossing) + each["others"] for each in ranks[:RANKS])
        predicted = alone["seconds"] + seconds_on(CABLE, sent)
        cells = compared_cells(sent, predicted, CABLE, alone, ranks[0])
        rows.append((f"{way}, {limit}", f"{crossing:.2f}", *cells, f"{ranks[0]['norm']:.8f}"))
    title = f"{NODES} nodes of {RANKS} ranks, a cable of {CABLE}: sent by a node in a step, and the step's time"
    print_table(title, (HEADER[0], "copies that cross", *HEADER[1:], "gradient norm"), rows)


def copies(way: str, limit: int) -> float:
    """Predicted copies of a token that leave its node in a dispatch."""
    per_node = WAYS[way] is OncePerNode
    return (fan_out(limit, EXPERTS * limit // NODES, TOP_K) if per_node else TOP_K) * (NODES - 1) / NODES


def token_bytes(way: str, crossing: float) -> float:
    """Predicted bytes of tokens that a rank sends over the cable in a step.

    There are four journeys in each layer: to the experts and back, in the forward and in the backward. With one copy
    per node two of them carry the gates of the node's experts, or their gradients.
    """
    gates = EXPERTS // NODES if WAYS[way] is OncePerNode else 0
    return LAYERS * crossing * TOKENS * 4 * (4 * HIDDEN + 2 * gates)


def steps(mesh: Mesh, cases: list[tuple[str, str]], repeats: int) -> list[dict]:
    """On a rank: for each case the time of a step's gradients, and the bytes that its node sent for them.

    `others` is what this rank's part of all bytes but those of tokens is, `norm` that of the gradients.
    """
    found, choose = [], Router.choose

    def choose_at_random(self: Router, scores: Tensor) -> Tensor:
        """As a router of balanced loads, so that both directions of the cable carry the same; every time alike."""
        generator = torch.Generator().manual_seed(mesh.rank)
        return choose(self, torch.rand(scores.shape, generator=generator))

    for way, limit in cases:
        with patch.object(moe, "MoE", WAYS[way]):
            run = Run(mesh, **MODEL | {"node_limit": LIMITS[limit]})
        with patch.object(Router, "choose", choose_at_random):
            with collectives.record() as calls:
                run.gradients()
            (result,) = timed(mesh, [run.gradients], repeats)
        others = sum(crosses(call, run.mesh) for call in calls if call.op != "all_to_all")
        found.append(result | {"others": others, "norm": float(run.norm)})
    return found
