"""To how many nodes does a token travel? Random and trained routers, with and without a limit."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import comb
from unittest.mock import patch

import torch
from torch import Tensor

from common.collectives import record
from common.drawing.figures import SERIES, new_figure, save_figure
from common.drawing.tables import print_comparison, print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.process_groups import Mesh
from step07_expert_parallel.experiments.ranks import ExpertLayer, checked
from step07_expert_parallel.experiments.tools import SMALL, watch
from step07_expert_parallel.router import Router

# DeepSeek-V3: 256 experts on 8 nodes, 8 for each token, on 4 nodes at most (arXiv:2412.19437, sections 2.1.2 and 4.2)
NODES, LIMIT, EXPERTS, TOP_K = 8, 4, 256, 8
MODEL = SMALL | {"experts": EXPERTS, "top_k": TOP_K, "expert_ffn": 8, "gate": "sigmoid", "expert_groups": NODES}
MODEL |= {"balance": "bias", "bias_rate": 0.01}
LIMITS = {"no limit": NODES, f"at most {LIMIT} nodes": LIMIT}


def fan_out(nodes: int, experts: int, chosen: int) -> float:
    """The expected number of nodes of a token that chooses any `chosen` of the `experts` on `nodes` nodes.

    It misses a node if all its choices are among the experts of the others: C(E - E/nodes, k) of C(E, k) cases.
    """
    return nodes * (1 - comb(experts - experts // nodes, chosen) / comb(experts, chosen))


def node_limit(quick: bool) -> None:
    """Nodes that a token travels to, with and without the limit: by formula, by our router, after it has learned."""
    cases = [MODEL | {"node_limit": limit, "steps": 20 if quick else 200} for limit in LIMITS.values()]
    found = on_ranks(1, on_every_case, route, cases, title="node_limit", jobs=len(cases))[0]
    rows, parts = [], []
    for (name, limit), (counts, loss) in zip(LIMITS.items(), found):
        predicted = fan_out(limit, EXPERTS * limit // NODES, TOP_K)
        for how, reached in counts.items():
            rows.append((f"{name}, {how}", predicted, reached.mean().item()))
            parts.append((f"{name}, {how}", *(f"{share:.1%}" for share in shares(reached)), int(reached.max())))
        print(f"  {name}: loss {loss:.3f} at the end of the training")
    print_comparison(f"nodes of a token, on average; predicted: any {TOP_K} experts of allowed nodes", "", rows, ".2f")
    print_table("share of the tokens by number of nodes", ("", *range(1, NODES + 1), "most"), parts)
    draw_nodes({name: counts["trained router"] for name, (counts, _) in zip(LIMITS, found)}, compare_copies(quick))


def route(mesh: Mesh, flags: dict) -> tuple[dict[str, Tensor], float]:
    """On the only rank: nodes of tokens with random scores, and with those of the last steps of a training; its loss.

    The loss is the mean of the last 20 steps.
    """
    config, mesh = checked(mesh, **flags)
    scores = torch.randn(32, 1024, EXPERTS, generator=torch.Generator().manual_seed(0)).sigmoid()
    random = Router(config, mesh).choose(scores)
    with all_choices() as seen:
        training = watch(mesh, None, flags)
    layers = config.model_config.layers
    learned = torch.cat(seen[-16 * layers :])  # 16 steps of one micro-batch each
    return {"random scores": nodes_of(random), "trained router": nodes_of(learned)}, training.mean("loss", 20)


@contextmanager
def all_choices() -> Iterator[list[Tensor]]:
    """All that routers choose in here: a tensor (batch, seq, k) for each time that one is asked."""
    seen, choose = [], Router.choose

    def choose_and_keep(self: Router, scores: Tensor) -> Tensor:
        seen.append(choose(self, scores))
        return seen[-1]

    with patch.object(Router, "choose", choose_and_keep):
        yield seen


def nodes_of(chosen: Tensor) -> Tensor:
    """chosen (..., k) -> (tokens,): the number of nodes that hold at least one of a token's experts."""
    return on_node(chosen).sum(-1).flatten()


def on_node(chosen: Tensor) -> Tensor:
    """chosen (..., k) -> (..., nodes): 1 where the node holds at least one of the token's experts."""
    return torch.zeros(*chosen.shape[:-1], NODES).scatter_(-1, chosen // (EXPERTS // NODES), 1)


def shares(counts: Tensor) -> list[float]:
    """The part of the tokens that travel to 1, 2, ... nodes."""
    return [(counts == number).float().mean().item() for number in range(1, NODES + 1)]


# ---- what that means for bytes ---------------------------------------------------------------------------------------


def compare_copies(quick: bool) -> list[tuple[str, float, float]]:
    """Copies of a token that leave its node: one for each expert, as we send them, or one for each node.

    Ranks play the nodes. Measured are the bytes of the dispatch; one copy for each node is counted from the choices.
    Returns (name, predicted, measured).
    """
    model = MODEL | {"layers": 1, "ep": NODES, "micro_batch": 2 if quick else 8, "global_batch": 16 if quick else 64}
    cases = [model | {"node_limit": limit} for limit in LIMITS.values()]
    found = on_ranks(NODES, on_every_case, dispatch, cases, title="copies", jobs=len(cases))
    rows, away = [], (NODES - 1) / NODES  # of all nodes but its own
    for kind, way in enumerate(("one per expert (ours)", "one per node")):
        for index, (name, limit) in enumerate(LIMITS.items()):
            copies = TOP_K if kind == 0 else fan_out(limit, EXPERTS * limit // NODES, TOP_K)
            rows.append((f"{way}, {name}", copies * away, sum(part[index][kind] for part in found) / NODES))
    print_comparison("copies of a token that leave its node in a dispatch", "", rows, ".2f")
    return rows


def dispatch(mesh: Mesh, flags: dict) -> tuple[float, float]:
    """On a rank: copies of a token that it sent to others, and how many it would send with one for each node."""
    layer = ExpertLayer(mesh, **flags)
    with record() as calls, all_choices() as seen:
        layer.forward()
    rows, _ = (call for call in calls if call.dtype != "int64")  # dispatch and combine
    others = on_node(seen[0]).sum() - on_node(seen[0])[..., mesh.rank].sum()
    return rows.bytes / (layer.tokens * layer.x.shape[-1] * layer.x.element_size()), others.item() / layer.tokens


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw_nodes(found: dict[str, Tensor], copies: list[tuple[str, float, float]]) -> None:
    """Left, the share of a trained router's tokens by number of nodes; right, the copies that leave the node."""
    figure, (left, right) = new_figure(1, 2, width=10, height=3.6, width_ratios=(1.25, 1))
    for place, (name, reached) in enumerate(found.items()):
        x = [number + 0.4 * place - 0.2 for number in range(1, NODES + 1)]
        left.bar(x, shares(reached), width=0.38, color=SERIES[place], label=f"{name}: {reached.mean():.2f} on average")
    left.set_title("nodes of a token (trained router)", loc="left", fontsize=10, fontweight="bold")
    left.set(xlabel="nodes", ylabel="share of the tokens", ylim=(0, 1.28), xticks=range(1, NODES + 1))
    left.set_yticks((0, 0.25, 0.5, 0.75, 1))
    left.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    left.legend(frameon=False, fontsize=9, loc="upper left")
    for place, (_, _, measured) in enumerate(copies):
        x = place + place // 2 * 0.5
        right.bar(x, measured, width=0.9, color=SERIES[place % 2])
        right.text(x, measured + 0.1, f"{measured:.2f}", ha="center", va="bottom", fontsize=10)
    right.set_title("copies that leave its node (random weights)", loc="left", fontsize=10, fontweight="bold")
    right.set_xticks((0.5, 3), ("one copy per expert\n(as here)", "one copy per node\n(as DeepSeek-V3)"))
    right.set_ylim(0, TOP_K)
    for panel in (left, right):
        panel.grid(visible=False, axis="x")
        panel.spines[["top", "right"]].set_visible(False)
    save_figure(figure, "node_limit")
