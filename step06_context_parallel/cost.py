"""What context parallelism costs: who computes how much, who sends how much, what a rank keeps, when a hop hides.

N ranks share sequences of s tokens, n = s / N each. h is the width of all query heads, h_kv that of all K/V heads, beta
the bytes of an activation. Sums of gradients travel in at least float32: beta_sum bytes.
"""

import torch

from common.costs.alpha_beta import Player
from common.costs.vocabulary import Message
from common.model_config import ModelConfig
from step01_single_gpu.cost import layer_activations, total_bytes

SPLITS = ("contiguous", "zigzag", "striped")

# ---- balance ---------------------------------------------------------------------------------------------------------


def hop_pairs(split: str, rank: int, hop: int, tokens: int, ranks: int) -> int:
    """(query, key) pairs that a rank computes in a hop of the causal ring, with the keys of the rank `hop` before it.

    contiguous: a triangle, then squares as long as those keys come earlier in the sequence, then nothing
    zigzag: of four squares of parts always two, of which two halves in hop 0
    striped: always a triangle, without its diagonal if the other rank's stripe is one token ahead
    """
    n = tokens // ranks
    if split == "contiguous":
        return n * (n + 1) // 2 if hop == 0 else n * n * (hop <= rank)
    if split == "zigzag":
        return 2 * (n // 2) ** 2 + (n // 2) * (hop == 0)
    return n * (n + 1) // 2 if hop <= rank else n * (n - 1) // 2


def all_pairs(split: str, tokens: int, ranks: int) -> list[list[int]]:
    """The pairs of all ranks, `[rank][hop]`."""
    return [[hop_pairs(split, rank, hop, tokens, ranks) for hop in range(ranks)] for rank in range(ranks)]


def critical_path(table: list[list[float]]) -> float:
    """The sum over the ring's hops of what its busiest rank does, in a table `[rank][hop]`: all wait for that one."""
    return sum(map(max, zip(*table)))


# ---- messages --------------------------------------------------------------------------------------------------------


def ring_sends(split: str, ranks: int, causal: bool = True) -> dict[str, int]:
    """Tensors that all ranks together send in one layer: keys and values, and the sums of their gradients.

    Keys and values of each rank travel to the other N - 1. Contiguous and causal, those of rank j are of no use to
    ranks before it, so they stop at the last rank, after N - 1 - j hops. The sums travel as far, and then home.
    """
    reaches = [ranks - 1 - rank if split == "contiguous" and causal else ranks - 1 for rank in range(ranks)]
    return {
        "forward, K and V": 2 * sum(reaches),
        "backward, K and V": 2 * sum(reaches),
        "backward, dK and dV": 2 * sum(reach + 1 for reach in reaches if reach),
    }


def pair_width(model: ModelConfig, tp: int = 1) -> float:
    """Numbers of a token that ring or all-gather send for K and V together; they are two tensors.

    Latent and rotated key are whole on every tensor rank, where K and V have only its heads.
    """
    if model.latent:
        return model.latent.shared_width
    return 2 * max(1, model.kv_heads // tp) * model.head_width


def layer_bytes(mode: str, split: str, ranks: int, tokens: int, h: int, h_kv: int, beta: int, beta_sum: int) -> dict:
    """Bytes that a rank sends for one layer, on average over ranks, by phase. `tokens`: batch times sequence length.

    Ulysses sends (N-1)/N of its part of q, k, v and of the output, and the same of their gradients. If there are fewer
    K/V heads than ranks, it repeats them first, and h_kv is the width of all N.
    """
    part = tokens // ranks * h_kv  # elements of a rank's keys
    if mode == "ring":
        sends = {phase: number / ranks for phase, number in ring_sends(split, ranks).items()}
        backward = sends["backward, K and V"] * beta + sends["backward, dK and dV"] * beta_sum
        return {"forward": sends["forward, K and V"] * part * beta, "backward": backward * part}
    if mode == "allgather":
        elements = 2 * (ranks - 1) * part
        return {"forward": elements * beta, "backward": elements * (beta + beta_sum)}
    both_ways = (ranks - 1) * tokens // ranks**2 * 2 * (h + h_kv) * beta
    return {"forward": both_ways, "backward": both_ways}


def messages(
    mode: str,
    split: str,
    ranks: int,
    model: ModelConfig,
    tokens: int,
    beta: int,
    beta_sum: int,
    count: float = 1,
    tp: int = 1,
) -> list[Message]:
    """What a rank sends for `count` layers and micro-batches, on average over ranks. One of them is a tensor.

    Args:
        tokens: of a whole micro-batch, batch times sequence length. beta, beta_sum: bytes of an activation, and of a
            sum of gradients. tp: ranks that share the heads; where there are more of them than K/V heads, each has one.
    """
    part = tokens // ranks * pair_width(model, tp) / 2  # elements of a rank's keys
    if mode == "ring":
        sends = {phase: number / ranks for phase, number in ring_sends(split, ranks).items()}
        keys, sums = sends["forward, K and V"] + sends["backward, K and V"], sends["backward, dK and dV"]
        return [
            Message("cp", "send", part * beta, count * keys, "attention"),
            Message("cp", "send", part * beta_sum, count * sums, "attention"),  # but for the way home
        ]
    if mode == "allgather":
        size = (ranks - 1) * part
        return [
            Message("cp", "all_gather", size * beta, count * 4, "attention"),  # of a rank's own block
            Message("cp", "reduce_scatter", size * beta_sum, count * 2),
        ]
    size, heads = (ranks - 1) * tokens // ranks**2 * beta, model.heads // tp
    if model.latent:  # expanded before they are sent: K as wide as q, V as wide as the output
        h, h_kv = heads * model.head_width, heads * model.value_width
    else:  # those of K and V are repeated until there is one for each rank
        h, h_kv = heads * model.head_width, max(1, model.kv_heads // tp, ranks) * model.head_width
    return [Message("cp", "all_to_all", size * h, count * 4), Message("cp", "all_to_all", size * h_kv, count * 4)]


# ---- latents ---------------------------------------------------------------------------------------------------------


def expansions(mode: str, ranks: int, recompute: str = "none") -> int:
    """How often a layer's forward and backward multiply by the matrix that expands latents: a rank's own, as often.

    The backward multiplies twice. Where latents travel, a rank expands those of all ranks, and in the backward once
    more; `selective` and `full` recompute the forward.
    """
    again = recompute != "none"
    return 3 + again if ranks == 1 or mode == "ulysses" else ranks * (4 + again)


# ---- memory ----------------------------------------------------------------------------------------------------------


def buffers(mode: str, ranks: int, part: int, beta: int, beta_sum: int) -> dict[str, int]:
    """Bytes of keys and values, and of sums of their gradients, that a rank holds beyond what one rank alone would.

    The ring holds what it computes with and what arrives. An all-gather holds the whole sequence, but makes room for
    the gradients of a rank's own keys and values (2 parts) only when all the others have been released.

    Args:
        part: elements of a rank's keys.
    """
    if ranks == 1:
        return {"forward": 0, "backward": 0}
    if mode == "ring":
        held = min(2, ranks - 1)
        # a hop's own sums are there in any case; with them those that arrive and those that leave
        return {"forward": 2 * held * part * beta, "backward": 2 * part * (held * beta + 2 * beta_sum)}
    return {"forward": 2 * ranks * part * beta, "backward": 2 * part * (ranks * beta + (ranks - 2) * beta_sum)}


def while_scattering(ranks: int, part: int, queries: int, beta: int, beta_sum: int) -> int:
    """Bytes of an all-gather's backward while gloo's reduce-scatter runs: others' parts arrive in a new buffer.

    The sums of all ranks' keys and values, what arrives for one of them, the gathered keys and values, and the results:
    gradients of the rank's queries (`queries` elements), keys and values.
    """
    return part * ((3 * ranks - 1) * beta_sum + 2 * ranks * beta + 2 * beta_sum) + queries * beta_sum


def kept(model: ModelConfig, batch: int, tokens: int, dtype: torch.dtype, ulysses: int = 0) -> int:
    """Bytes that one layer keeps for the backward: those of step 1, for the tokens of a rank.

    Args:
        ulysses: tokens of the whole sequence. Their order is kept, and the output twice: of a rank's heads for all
            tokens, and of its tokens for all heads.
    """
    whole = total_bytes(layer_activations(model, batch, tokens, dtype, "fused", "none"))
    return whole + (ulysses > 0) * batch * tokens * model.heads * model.head_width * dtype.itemsize + 8 * ulysses


def bytes_per_token(model: ModelConfig, ranks: int, mode: str, tp: int, recompute: str) -> float:
    """Bytes that a token of a rank costs at the worst moment of a step: bfloat16, tp ranks with sequence parallelism.

    All layers' activations, and either the loss's float32 log-probabilities and two more tensors of that size, or the
    keys and values of the last layer's backward.
    """
    dtype = torch.bfloat16
    layers = model.layers * total_bytes(layer_activations(model, 1, 1, dtype, "fused", recompute)) / tp
    if recompute == "full":  # one layer is there as a whole
        layers += kept(model, 1, 1, dtype) / tp
    head = 2 * 4 * model.hidden / tp
    loss = 3 * 4 * model.vocab / tp
    keys = buffers(mode, ranks, model.kv_heads * model.head_width, 2, 4)["backward"] / tp
    return layers + head + max(loss, keys)


# ---- does it hide ----------------------------------------------------------------------------------------------------


def tokens_to_hide(peak: float, bandwidth: float, ratio: float, causal: bool = True, backward: bool = False) -> float:
    """Tokens of a rank from which on a hop's computation takes as long as its transfer. Derived here.

    A hop has n^2 / 2 pairs (n^2 if not causal). In the forward they cost 4 h FLOPs each (q k' and p v), while K and V,
    2 n h_kv elements of 2 bytes, travel. In the backward 10 h (five products), and the float32 sums travel as well:

        forward    2 h n^2 / peak >= 4 n h_kv / bandwidth     n >= 2 (h_kv / h) peak / bandwidth
        backward   5 h n^2 / peak >= 12 n h_kv / bandwidth    n >= 2.4 (h_kv / h) peak / bandwidth

    Batch size, number of ranks and tensor parallelism (which divides h and h_kv) have canceled.

    Args:
        peak: FLOP/s of a rank. bandwidth: bytes/s to the next rank. ratio: h_kv / h.
    """
    return (2.4 if backward else 2.0) * ratio * peak / bandwidth * (1 if causal else 0.5)


def play_layer(
    mode: str, phase: str, player: Player, hops: list[float], part: float, sums: float, groups: float
) -> None:
    """One attention layer of a rank, all of which do the same (zigzag).

    Args:
        hops: seconds that each hop computes.
        part: bytes of a rank's keys. sums: those of the sums of their gradients.
        groups: query heads per K/V head.
    """
    ranks = len(hops)
    if mode == "ulysses":
        for tensors in ((groups, 1, 1), (groups,)) if phase == "forward" else ((groups,), (groups, 1, 1)):
            for size in tensors:
                player.wait(player.message(size * part))
            if (len(tensors) > 1) == (phase == "forward"):
                player.now += sum(hops)
        return
    if mode == "allgather":
        arriving = [player.message(ranks * part) for _ in "kv"]
        player.now += hops[0]
        player.wait(arriving[-1])
        player.now += sum(hops[1:])
        if phase == "backward":
            for _ in "kv":
                player.wait(player.message(ranks * sums))
        return
    travelling = 0.0
    for hop, seconds in enumerate(hops):
        arriving = player.exchange(2 * part) if hop < ranks - 1 else 0.0
        player.now += seconds
        if phase == "backward":
            player.wait(travelling)
            travelling = player.exchange(2 * sums)
        player.wait(arriving)
    player.wait(travelling)
