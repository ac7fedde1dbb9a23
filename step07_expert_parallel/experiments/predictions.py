"""What theory says of step 7: bytes that travel to experts and back, bytes that a rank holds, and what hides what.

n is the number of tokens of a rank, h their width, k the experts of a token, E all experts, f_e the width of an expert,
EP the ranks that share the experts, beta the bytes of an element.
"""

import math
from dataclasses import dataclass

from common.counts import count_parameters
from common.model_config import ModelConfig

# ---- traffic ---------------------------------------------------------------------------------------------------------


def dispatch_bytes(tokens: float, top_k: int, hidden: int, ep: int, beta: float) -> float:
    """Bytes that a rank sends in one all-to-all of tokens, if experts are equally busy: k n h beta (EP-1)/EP.

    A layer's forward has two (dispatch and combine), and its backward two more.
    """
    return top_k * tokens * hidden * beta * (ep - 1) / ep


def counts_bytes(experts: int, ep: int) -> int:
    """Bytes of the first all-to-all, of how many tokens each expert gets from this rank: int64."""
    return 8 * experts * (ep - 1) // ep


def exact_rows(counts: list[list[int]], rank: int) -> tuple[int, int]:
    """Rows that a rank sends to others, and that others send to it. `counts[source][expert]`: tokens of a rank."""
    ep, each = len(counts), len(counts[0]) // len(counts)

    def rows(source: int, target: int) -> int:
        return sum(counts[source][target * each : (target + 1) * each])

    others = [other for other in range(ep) if other != rank]
    return sum(rows(rank, other) for other in others), sum(rows(other, rank) for other in others)


def distinct_ranks(model: ModelConfig, ep: int) -> float:
    """On how many other ranks a token's experts are, on average, if any k of the E experts are equally likely."""
    elsewhere = math.comb(model.experts - model.experts // ep, model.top_k) / math.comb(model.experts, model.top_k)
    return (ep - 1) * (1 - elsewhere)


# ---- memory ----------------------------------------------------------------------------------------------------------

WIDTHS = {"float32": (4, 4, 8), "bfloat16": (2, 4, 12)}  # of parameters, gradients, optimizer state


def split_parameters(model: ModelConfig) -> tuple[int, int]:
    """The parameters of routed experts, and all others."""
    experts = (model.layers - model.dense_layers) * model.experts * 3 * model.hidden * model.expert_ffn
    return experts, count_parameters(model).total - experts


def held(model: ModelConfig, ranks: int, ep: int, zero: int, dtype: str) -> dict[str, tuple[float, float]]:
    """Bytes of (experts, all else) that a rank holds, by kind, in a run with dp = `ranks` and nothing else.

    A rank has 1/EP of the experts. ZeRO shards these over edp = ranks/EP, and all else over all ranks.
    """
    experts, rest = split_parameters(model)
    result = {}
    for kind, width, first in zip(("parameters", "gradients", "optimizer state"), WIDTHS[dtype], (3, 2, 1)):
        shards = (ranks // ep, ranks) if zero >= first else (1, 1)  # first: the stage that shards this kind
        result[kind] = experts / ep / shards[0] * width, rest / shards[1] * width
    return result


def activations(model: ModelConfig, tokens: int, rows: int, beta: int, ep: int) -> int:
    """Bytes that a layer of experts without shared ones keeps for the backward.

    Args:
        tokens: of this rank. rows: of its experts, on average k times as many.
    """
    h, experts, choices = model.hidden, model.experts, model.top_k * tokens
    router = tokens * 4 * (h + experts + 1)  # tokens in float32, their scores, the sums of their gates
    router += choices * (8 + 4 + 1)  # what was chosen, gates, and which choices were dropped
    router += 4 * experts * h if beta < 4 else 0  # its weights in float32
    sorting = 3 * choices * 8 + tokens * 8  # of each row: which choice it is, of which token; rows by token
    arrived = 2 * rows * 8 if ep > 1 else 0  # the order of rows, and back
    of_experts = rows * (h + 4 * model.expert_ffn) * beta  # inputs; gate, silu, up and their product
    outputs = choices * (h * beta + 4)  # the rows that have come back, and their gates
    return router + sorting + arrived + of_experts + outputs


# ---- does it hide ----------------------------------------------------------------------------------------------------


def width_to_hide(peak: float, bandwidth: float, ep: int, beta: float = 2, backward: bool = False) -> float:
    """The width f_e of an expert from which on its computation takes as long as dispatch and combine. Derived here.

    The experts of a rank get k n tokens (on average), and each costs 3 matrices: 6 k n h f_e FLOPs in the forward,
    twice that in the backward. Meanwhile tokens travel twice, 2 k n h beta (EP-1)/EP bytes:

        forward    6 k n h f_e / peak >= 2 k n h beta (EP-1)/EP / bandwidth
        backward  12 k n h f_e / peak >= the same
        so f_e >= beta (EP-1)/EP peak / (3 bandwidth), in the backward half of it.

    n, k, h and E have cancelled.

    Args:
        peak: FLOP/s of a rank. bandwidth: bytes/s that leave it.
    """
    return beta * (ep - 1) / ep * peak / ((6 if backward else 3) * bandwidth)


def shared_to_hide(model: ModelConfig, peak: float, bandwidth: float, ep: int, beta: float = 2) -> float:
    """The width of all shared experts from which on they hide the dispatch, in the forward. k does not cancel here.

    6 n h f_s / peak >= k n h beta (EP-1)/EP / bandwidth.
    """
    return model.top_k * beta * (ep - 1) / ep * peak / (6 * bandwidth)


def attention_flops(model: ModelConfig, seq: int) -> float:
    """FLOPs of one token in the forward of an attention: 2 for each weight, and half of its sequence's scores."""
    return 2 * count_parameters(model).attention + 2 * seq * model.heads * model.head_width


def expert_flops(model: ModelConfig) -> float:
    """FLOPs of one token in the forward of its k experts, the shared ones and the router: 2 for each weight."""
    return 2 * count_parameters(model).moe_active


def layer_flops(model: ModelConfig, seq: int) -> float:
    """FLOPs of one token in the forward of a layer with experts."""
    return attention_flops(model, seq) + expert_flops(model)


def nodes_reached(model: ModelConfig) -> float:
    """Nodes beside its own that a token is sent to if each group of experts is a node and all allowed ones are used."""
    return model.groups_per_token * (model.expert_groups - 1) / model.expert_groups


def cheatsheet(model: ModelConfig, peak: float, bandwidth: float, ep: int) -> float:
    """The playbook's ratio of communication to computation: (EP-1) peak / (12 num_experts hidden bandwidth)."""
    return (ep - 1) * peak / (12 * model.experts * model.hidden * bandwidth)


@dataclass
class Clock:
    """One rank that computes, and its link, on which one all-to-all at a time travels. Times in seconds."""

    now: float = 0.0
    free: float = 0.0  # when the link is idle again
    blocked: float = 0.0

    def send(self, seconds: float) -> float:
        """Start an all-to-all. Returns when it will be complete."""
        self.free = max(self.now, self.free) + seconds
        return self.free

    def wait(self, until: float) -> None:
        self.blocked += max(0.0, until - self.now)
        self.now = max(self.now, until)


# What an action does, in order: ("compute", seconds); ("travel", seconds) for an all-to-all of tokens; "counts" for the
# one of their numbers, in whose wait nobody else gets a turn
Part = tuple[str, float]


def alone(parts: list[Part]) -> float:
    """Seconds of an action that runs on its own: nothing hides."""
    return sum(seconds for _, seconds in parts)


def in_turns(first: list[Part], second: list[Part]) -> float:
    """Seconds of two actions that take turns: whoever is about to wait for an all-to-all lets the other one run."""
    clock, tasks, arrives, running = Clock(), [list(first), list(second)], [0.0, 0.0], 0
    while any(tasks) or any(arrives):
        clock.wait(arrives[running])
        arrives[running] = 0.0
        while tasks[running] and not arrives[running]:
            kind, seconds = tasks[running].pop(0)
            if kind == "compute":
                clock.now += seconds
            elif kind == "counts":
                clock.wait(clock.send(seconds))
            else:
                arrives[running] = clock.send(seconds)
        if tasks[1 - running] or arrives[1 - running]:
            running = 1 - running
    return clock.now
