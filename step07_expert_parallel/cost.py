"""What experts cost a rank in a step: bytes that travel to them and back, bytes held, operations, and what hides what.

n is the number of tokens of a rank, h their width, k the experts of a token, E all experts, f_e the width of an expert,
EP the ranks that share the experts, beta the bytes of a number. All experts are taken to be equally busy.
"""

import math
from typing import NamedTuple

from common.costs.alpha_beta import Player
from common.costs.vocabulary import KINDS, WIDTHS, Message, sent
from common.counts import count_parameters
from common.model_config import ModelConfig

# ---- messages --------------------------------------------------------------------------------------------------------


def dispatch_bytes(tokens: float, top_k: int, hidden: int, ep: int, width: float) -> float:
    """Return the bytes that a rank sends in one all-to-all of tokens: k n h beta (EP-1)/EP."""
    return sent("all_to_all", top_k * tokens * hidden * width, ep)


def messages(model: ModelConfig, tokens: float, ep: int, width: float, times: float = 1) -> list[Message]:
    """Return what a rank sends over `ep`: how many tokens go where (int64), the tokens, and their gradients.

    Args:
        tokens: of this rank in a micro-batch, after sequence parallelism.
        times: layers with experts, times micro-batches, that the rank runs in a step.
    """
    if ep == 1:
        return []
    rows = dispatch_bytes(tokens, model.top_k, model.hidden, ep, width)
    meanwhile = "shared experts" if model.shared_experts else ""
    return [
        Message("ep", "all_to_all", sent("all_to_all", 8 * model.experts, ep), times),
        Message("ep", "all_to_all", rows, 2 * times, meanwhile),  # dispatch, and gradients on their way back from it
        Message("ep", "all_to_all", rows, 2 * times),  # combine, and its mirror
    ]


def fan_out(nodes: int, experts: int, chosen: int) -> float:
    """Return the expected number of nodes of a token that chooses any `chosen` of the `experts` on `nodes` nodes.

    It misses a node if all its choices are among the experts of the others: C(E - E/nodes, k) of C(E, k) cases.
    """
    return nodes * (1 - math.comb(experts - experts // nodes, chosen) / math.comb(experts, chosen))


def copies(model: ModelConfig, nodes: int, once_per_node: bool) -> float:
    """Return how many copies of a token leave its node in a dispatch: one per expert or, if so wanted, one per node.

    A token uses all nodes that a limit (`groups_per_token`) allows: they are those with its best experts.
    """
    reached = fan_out(nodes, model.experts, model.top_k)
    if model.groups_per_token < model.expert_groups == nodes:
        reached = min(model.groups_per_token, model.top_k)
    return (reached if once_per_node else model.top_k) * (nodes - 1) / nodes


# ---- memory ----------------------------------------------------------------------------------------------------------


def split_parameters(model: ModelConfig) -> tuple[int, int]:
    """Return the parameters of routed experts, and all others."""
    experts = len(model.expert_layers) * model.experts * 3 * model.hidden * model.expert_ffn
    return experts, count_parameters(model).total - experts


def held(model: ModelConfig, ranks: int, ep: int, zero: int, dtype: str) -> dict[tuple[str, str], float]:
    """Return the bytes that a rank holds, by kind and part (experts, all else), with dp = `ranks` and nothing else.

    A rank has 1/EP of the experts. ZeRO shards these over edp = ranks/EP, and all else over all ranks.
    """
    experts, rest = split_parameters(model)
    result = {}
    for kind, width, first in zip(KINDS, WIDTHS[dtype], (3, 2, 1)):  # first: the stage of ZeRO that shards this kind
        shards = (ranks // ep, ranks) if zero >= first else (1, 1)
        result[kind, "experts"] = experts / ep / shards[0] * width
        result[kind, "all else"] = rest / shards[1] * width
    return result


def activations(model: ModelConfig, tokens: int, rows: int, width: int, ep: int) -> int:
    """Return the bytes that a layer of experts without shared ones keeps for the backward.

    Args:
        tokens: of this rank. rows: of its experts, on average k times as many.
    """
    h, experts, choices = model.hidden, model.experts, model.top_k * tokens
    router = tokens * 4 * (h + experts + 1)  # tokens in float32, their scores, the sums of their gates
    router += choices * (8 + 4 + 1)  # what was chosen, gates, and which choices were dropped
    router += 4 * experts * h if width < 4 else 0  # its weights in float32
    sorting = 3 * choices * 8 + tokens * 8  # of each row: which choice it is, of which token; rows by token
    arrived = 2 * rows * 8 if ep > 1 else 0  # the order of rows, and back
    of_experts = rows * (h + 4 * model.expert_ffn) * width  # inputs; gate, silu, up and their product
    outputs = choices * (h * width + 4)  # the rows that have come back, and their gates
    return router + sorting + arrived + of_experts + outputs


# ---- operations, and what hides --------------------------------------------------------------------------------------


def operations(model: ModelConfig, seq: int) -> dict[str, float]:
    """Return the FLOPs of one token in the forward of a layer: 2 per weight that it uses, and half of its scores."""
    count = count_parameters(model)
    core = 2 * seq * model.heads * model.head_width  # causal
    return {"attention": 2 * count.attention + core, "experts": 2 * count.moe_active}


def repeated_work(model: ModelConfig, seq: int, ep: int) -> float:
    """Return how many times the FLOPs a layer takes if EP ranks divide its experts, and nothing else.

    Without dp, cp or tp all of them read the same tokens, so each repeats attention (and router, and shared experts);
    only the work of routed experts is divided.
    """
    flops = operations(model, seq)
    routed = 2 * model.top_k * 3 * model.hidden * model.expert_ffn
    return 1 + (ep - 1) * (sum(flops.values()) - routed) / sum(flops.values())


class Grown(NamedTuple):
    """What a rank and a step have with EP ranks that each read sequences of their own."""

    sequences: int  # of a step, at least
    experts: int  # of a layer on a rank
    rows: float  # that a rank's experts get in a layer and micro-batch
    states: float  # bytes of a rank, float32 sums and bfloat16 weights, no ZeRO
    sent: float  # bytes that a rank sends in one all-to-all of tokens


def grown(model: ModelConfig, seq: int, ep: int) -> Grown:
    """Return what grows with EP, and what shrinks, with micro-batches of one sequence."""
    states = sum(held(model, ep, ep, 0, "bfloat16").values())
    sent_ = dispatch_bytes(seq, model.top_k, model.hidden, ep, 2)
    return Grown(ep, model.experts // ep, model.top_k * seq, states, sent_)


def width_to_hide(peak: float, bandwidth: float, ep: int, width: float = 2, backward: bool = False) -> float:
    """Return the width f_e of an expert from which on its computation takes as long as dispatch and combine.

    The experts of a rank get k n tokens (on average), and each costs 3 matrices: 6 k n h f_e FLOPs in the forward,
    twice that in the backward. Meanwhile tokens travel twice, 2 k n h beta (EP-1)/EP bytes:

        forward    6 k n h f_e / peak >= 2 k n h beta (EP-1)/EP / bandwidth
        backward  12 k n h f_e / peak >= the same
        so f_e >= beta (EP-1)/EP peak / (3 bandwidth), in the backward half of it.

    n, k, h and E have canceled.

    Args:
        peak: FLOP/s of a rank. bandwidth: bytes/s that leave it. width: bytes of a number.
    """
    return width * (ep - 1) / ep * peak / ((6 if backward else 3) * bandwidth)


def cheatsheet(model: ModelConfig, peak: float, bandwidth: float, ep: int) -> float:
    """Return the playbook's ratio of communication to computation: (EP-1) peak / (12 num_experts hidden bandwidth)."""
    return (ep - 1) * peak / (12 * model.experts * model.hidden * bandwidth)


# ---- a forward and a backward that hide each other's all-to-alls -----------------------------------------------------

# What an action does, in order: ("compute", seconds); ("travel", seconds) for an all-to-all of tokens; "counts" for the
# one of their numbers, in whose wait nobody else gets a turn
Part = tuple[str, float]


def parts(kind: str, attention: float, experts: float, travel: float, layers: int) -> list[Part]:
    """Return what an action of a stage does: a backward takes twice as long as the forward, its first half (I) as long.

    Args:
        kind: F, B, I or W. attention, experts, travel: seconds of a layer's forward, and of one all-to-all.
    """
    if kind == "W":
        return [("compute", attention + experts)] * layers
    times = 2 if kind == "B" else 1
    layer = [("compute", times * attention), ("travel", travel), ("compute", times * experts), ("travel", travel)]
    if kind != "F":
        return layer[::-1] * layers
    return [*layer[:1], ("counts", 0.0), *layer[1:]] * layers


def alone(actions: list[Part]) -> float:
    """Return the seconds of an action that runs on its own: nothing hides."""
    return sum(seconds for _, seconds in actions)


def in_turns(first: list[Part], second: list[Part]) -> float:
    """Return the seconds of two actions that take turns: whoever is about to wait lets the other one compute."""
    player, tasks, arrives, running = Player(), [list(first), list(second)], [0.0, 0.0], 0
    while any(tasks) or any(arrives):
        player.wait(arrives[running])
        arrives[running] = 0.0
        while tasks[running] and not arrives[running]:
            kind, seconds = tasks[running].pop(0)
            if kind == "compute":
                player.now += seconds
            elif kind == "counts":
                player.wait(player.travel(seconds))
            else:
                arrives[running] = player.travel(seconds)
        if tasks[1 - running] or arrives[1 - running]:
            running = 1 - running
    return player.now
