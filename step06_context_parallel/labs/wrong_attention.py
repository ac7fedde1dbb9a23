"""What ring attention's output and log-sum-exp are, and what they are with known mistakes."""

import torch
from torch import Tensor

from common.labs.ranks import Case
from common.labs.write import Expected
from step06_context_parallel.labs.rings import Steep, attention, drawn, places

STEEP = (
    "exp(score) alone is infinite, or 0, where scores are large. `logsumexp` subtracts a row's largest score before it "
    "takes exp; weights are exp(score - lse), with the lse of the keys so far and these."
)
EMPTY_ROW = "a row of -inf has no softmax: does `block` return queries that see no key?"


def seen_by(case: Case, rank: int, sign: int = -1, before: str = "all early", after: str = "late all") -> Tensor:
    """Which keys a rank's queries see (tokens, tokens) if its own block is right, and perhaps nothing else.

    Args:
        sign: keys that arrive in hop h are taken for those of rank + sign * h.
        before, after: which half of my queries sees which half of the keys of an earlier rank, and of a later one.
    """
    half = case.tokens // case.ranks // 2
    halves = {"all": slice(None), "early": slice(0, half), "late": slice(half, None), "none": slice(0)}
    mine, seen = places(case, rank), torch.ones(case.tokens, case.tokens, dtype=torch.bool).tril()
    for hop in range(1, case.ranks):
        theirs, source = places(case, (rank - hop) % case.ranks), (rank + sign * hop) % case.ranks
        queries, keys = (halves[each] for each in (before if source < rank else after).split())
        seen[mine[:, None], theirs] = False
        seen[mine[queries][:, None], theirs[keys]] = True
    return seen


def expect_attention(case: Case) -> list[Expected]:
    q, k, v, _ = drawn(case)
    out, lse = attention(case, q, k, v)
    place, found, infinite = torch.arange(case.tokens), [], STEEP if isinstance(case, Steep) else EMPTY_ROW
    source = torch.empty_like(place)
    for rank in range(case.ranks):
        source[places(case, rank)] = rank
    for rank in range(case.ranks):
        mine = places(case, rank)
        causal, own = place[:, None] >= place, (source == rank)[None, :]

        def of(seen: Tensor, mine=mine, q=q, k=k, v=v) -> dict[str, Tensor]:
            wrong = attention(case, q, k, v, seen)
            return {"lse": wrong[1][mine], "out": wrong[0][mine]}

        merged = torch.zeros_like(out[mine])  # blocks added up, each with a softmax of its own
        kept = torch.zeros_like(merged)  # blocks weighted when they come, and not when further ones do
        total = merged.new_full((len(mine),), -torch.inf)
        last = total.clone()  # sums of the last block that a query saw
        blocks = torch.zeros_like(total)  # how many it saw
        for hop in range(case.ranks):
            block, sums = attention(case, q, k, v, causal & (source == (rank - hop) % case.ranks))
            block, sums = torch.nan_to_num(block[mine]), sums[mine]
            merged += block
            total = torch.logaddexp(total, sums)
            last = torch.where(sums.isneginf(), last, sums)
            blocks += sums.isfinite()
            kept += block * (sums - total).exp()[:, None]
        empty = torch.full_like(total, -torch.inf)
        stay = torch.cat([mine] * case.ranks)[torch.cat([places(case, each) for each in range(case.ranks)]).argsort()]
        mistakes = {
            "blocks were averaged over all hops: a block's weight is the share of its exponentials in those of all "
            "blocks, and `lse` is what tells it.": {"out": merged / case.ranks, "lse": empty},
            "blocks were averaged: a block's weight is the share of its exponentials in those of all blocks, and `lse` "
            "is what tells it.": {"out": merged / blocks[:, None], "lse": empty},
            "`lse` is still -inf: write each block's new sum into `lse[queries]`, for the next block.": {"lse": empty},
            "`lse` is the sum of exponentials, and should be its logarithm.": {"lse": lse[mine].exp()},
            "query i does not see key i, its own: within your own block, mask what is above the diagonal, triu(1).": (
                of(causal & ~torch.eye(case.tokens, dtype=torch.bool))
            ),
            "values have come around the ring, and keys were the rank's own in every hop.": of(causal, k=k[stay]),
            "keys have come around the ring, and values were the rank's own in every hop.": of(causal, v=v[stay]),
            "what came around the ring was never used: keys and values were the rank's own in every hop.": (
                of(causal, k=k[stay], v=v[stay])
            ),
            "these queries have seen the rank's own keys only. The others must come around the ring.": of(causal & own),
            "this is a sequence cut into one piece per rank: a smaller rank's keys all come before mine, and a larger "
            "one's all after. Here each rank has an early part and a late one, so `block` returned the wrong halves.": (
                of(seen_by(case, rank, before="all all", after="none none"))
            ),
            "queries see keys that come after them. Is the rank's own block masked?": of(causal | own),
            "every query sees every key: which keys come before a query depends on both ranks' parts.": of(
                causal | True
            ),
            "blocks were added, each with weights that sum to 1: together, all keys' weights must sum to 1.": (
                {"out": merged}
            ),
            "a new block gets its share, but the output so far keeps the weights that it had among fewer keys.": (
                {"out": kept}
            ),
            "only one block's exponentials are in this sum: those of all blocks that a query sees must be added up.": (
                {"lse": last}
            ),
            "scores are q · k times WIDTH**-0.5, and the factor is missing.": of(causal, q=q * case.width**0.5),
            "keys were taken for those of another rank. Messages go to the next rank: where did keys start that have "
            "come h hops?": of(seen_by(case, rank, sign=1)),
            "the wrong halves meet. A smaller rank's first half comes before all of my queries; only my second half "
            "comes after a larger rank's keys.": [
                of(seen_by(case, rank, before="all late")),
                of(seen_by(case, rank, after="early all")),
                of(seen_by(case, rank, before="all late", after="early all")),
                of(seen_by(case, rank, before="late all", after="all early")),
            ],
            "my second half saw one half of a larger rank's keys. It comes after both.": [
                of(seen_by(case, rank, after="late late")),
                of(seen_by(case, rank, after="late early")),
            ],
            "one of my halves saw a smaller rank's first half of keys. Both come after it.": [
                of(seen_by(case, rank, before="late early")),
                of(seen_by(case, rank, before="early early")),
            ],
            "halves saw halves of their own kind alone. But my first half comes after none of a larger rank's keys, "
            "and my second half comes after both halves of them.": [
                of(seen_by(case, rank, before="early early", after="late late")),
                of(seen_by(case, rank, before="late early", after="late late")),
            ],
        }
        found.append(Expected.of({"lse": lse[mine], "out": out[mine]}, mistakes, infinite=infinite))
    return found
