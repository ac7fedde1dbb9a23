"""Labs of step 6 in which the student writes ring attention, forward and backward."""

import torch
from torch import Tensor

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import holds_at_most, sends_at_most, works_at_most
from common.labs.seen import keep
from common.labs.write import Expected, WriteLab, page
from step06_context_parallel.labs.rings import Steep, attention, drawn, places
from step06_context_parallel.labs.wrong_attention import expect_attention, seen_by

# ---- write-06-a: forward ---------------------------------------------------------------------------------------------


def attend(student, case: Case, rank: int) -> dict[str, Tensor]:
    mine = places(case, rank)
    student.WIDTH, student.TOKENS = case.width, case.tokens
    q, k, v = (each[mine].clone() for each in drawn(case)[:3])
    keep(q=q, k=k, v=v)
    out, lse = student.forward(q, k, v)
    return {"lse": lse, "out": out}


def judge_attention(case: Case, rank: int, notes: Notes):
    row = 8 * case.width * case.tokens // case.ranks  # bytes of a rank's keys
    why = {
        "all_gather": "keys and values go once around the ring.",
        "send": "after N - 1 hops, keys and values have been on every rank, and what is sent later helps no one.",
    }
    yield from sends_at_most(notes, (case.ranks - 1) * 2 * row, why)
    came = sum(call.bytes for call in notes.of("receive"))
    if came < 2 * row * (case.ranks - 1) and {call.op for call in notes.calls} <= {"send", "receive"}:
        yield f"keys and values of {came // (2 * row)} other ranks have come, and there are {case.ranks - 1} of them."
    pairs = (case.tokens // case.ranks) ** 2 * (case.ranks + 1) / 2  # of a query and a key
    what = "Of another rank's block, every query that `block` returns sees every key: leave out what is all masked."
    yield from works_at_most(notes, 2 * pairs * case.width, what)
    scores = 8 * (case.tokens // case.ranks) ** 2
    what = "At any time a rank needs the keys and values of one other rank, and the scores with these."
    yield from holds_at_most(notes, 9 * row + 6 * scores, what)


# ---- write-06-b: backward --------------------------------------------------------------------------------------------

DELTA = "delta is one number for each query: a sum over the width, and not over the queries."


def differentiate(student, case: Case, rank: int) -> dict[str, Tensor]:
    mine = places(case, rank)
    student.WIDTH, student.TOKENS = case.width, case.tokens
    whole = drawn(case)
    out, lse = attention(case, *whole[:3])
    q, k, v, dout = (each[mine].clone() for each in whole)
    out, lse = out[mine], lse[mine]
    keep(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    return dict(zip(("dq", "dk", "dv"), student.backward(dout, q, k, v, out, lse)))


def _backward(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, list[tuple[Tensor, ...]]]:
    """What a mistake in the softmax's backward is -> dq, dk and dv with it, in each of its variants."""
    causal = torch.ones(case.tokens, case.tokens, dtype=torch.bool).tril()
    scores = (q @ k.T * case.width**-0.5).masked_fill(~causal, -torch.inf)
    dp, p, p_of_block = dout @ v.T, scores.softmax(-1), torch.zeros_like(scores)
    sums, sums_of_block, sums_of_both = (p * dp).sum(-1, keepdim=True), torch.zeros_like(p), torch.zeros_like(p)
    for rank in range(case.ranks):
        keys = places(case, rank)
        p_of_block[:, keys] = torch.nan_to_num(scores[:, keys].softmax(-1))  # no key of this block: no weight
        sums_of_block[:, keys] = (p * dp)[:, keys].sum(-1, keepdim=True)
        sums_of_both[:, keys] = (p_of_block * dp)[:, keys].sum(-1, keepdim=True)
    nothing = torch.zeros_like(sums)

    # What every rank's queries see if keys are taken for those of another rank, or of that from which they came last
    turned, early, delta = torch.zeros_like(causal), torch.zeros_like(causal), (p @ v * dout).sum(-1)
    ours, first, all_of = torch.zeros_like(p), torch.zeros_like(sums), torch.zeros_like(sums)
    for rank in range(case.ranks):
        mine = places(case, rank)
        turned[mine] = seen_by(case, rank, sign=1)[mine]
        early[mine] = _seen_after_passing(case, rank)[mine]
        first[mine] = (p @ v * dout)[mine].sum(0)[0]  # of all queries, in the first place of the width
        all_of[mine] = delta[mine].sum()
        for source in range(case.ranks):  # whose keys meet my queries as if they were at the same places among mine
            ours[mine[:, None], mine] += (p * (dp - sums))[mine[:, None], places(case, source)]
    total = scores.logsumexp(-1, keepdim=True)
    of_all = (q @ k.T * case.width**-0.5) - total
    p_turned, p_early = of_all.exp() * turned, of_all.exp() * early

    def gradients(p: Tensor, sums: Tensor, dp: Tensor = dp) -> tuple[Tensor, ...]:
        dscores = p * (dp - sums) * case.width**-0.5
        return dscores @ k, dscores.T @ q, p.T @ dout

    of_scores = p * (dp - sums) * case.width**-0.5
    return {
        "the sum of dout * out over the width tells how a score moves the weights of all other keys; here it was taken "
        "of out * out.": [gradients(p, (p @ v).square().sum(-1, keepdim=True))],
        "a score is a query times a key, so the gradient of a query is made of keys, and no values.": [
            (of_scores @ v, of_scores.T @ q, p.T @ dout)
        ],
        "a score was taken to change its own weight alone. A query's weights sum to 1: when one grows, those of all "
        "other keys shrink.": [gradients(p, nothing)],
        "a score's gradient depends on a sum over the whole row, all keys of all blocks; here it was one block's.": [
            gradients(p, sums_of_block)
        ],
        "in each block, a query's weights sum to 1: they must do so over the keys of all blocks together, as they did "
        "in the forward.": [gradients(p_of_block, each) for each in (sums, sums_of_both, nothing)],
        "exponentials of scores were taken for weights: first divide them by their sum over the keys of all blocks.": [
            gradients(scores.exp(), each) for each in (sums, (scores.exp() * dp).sum(-1, keepdim=True), nothing)
        ],
        "keys were taken for those of another rank. Messages go to the next rank: where did keys start that have come "
        "h hops?": [gradients(p_turned, sums)],
        "keys had moved on before they were used: those of rank (rank - hop) are here until `pass_on`, then those of "
        "the rank before it. Add first, then pass on.": [gradients(p_early, sums)],
        "a query's gradient is made of the keys that are visiting, those in `ring`; here it was the rank's own keys.": [
            (ours * case.width**-0.5 @ k, *gradients(p, sums)[1:])
        ],
        DELTA: [
            gradients(p, first),
            gradients(p, all_of),
        ],
        "the scores that `block` returns are multiplied by WIDTH**-0.5 already, and here they were once more.": [
            gradients((scores * case.width**-0.5 - total).exp(), sums)
        ],
        "a weight meets its value, so the gradient of a weight is dout times that value, and no key.": [
            gradients(p, sums, dout @ k.T)
        ],
    }


def _seen_after_passing(case: Case, rank: int) -> Tensor:
    """Which keys a rank's queries see (tokens, tokens) if those of rank r - 1 are taken for those of rank r."""
    half = case.tokens // case.ranks // 2
    mine, seen = places(case, rank), torch.zeros(case.tokens, case.tokens, dtype=torch.bool)
    for source in range(case.ranks):
        theirs = places(case, (source - 1) % case.ranks)
        queries, keys = mine[half if source > rank else 0 :], theirs[: half if source < rank else None]
        seen[queries[:, None], keys] = True
        if source == rank:
            seen[queries[:, None], keys] = torch.ones(2 * half, 2 * half, dtype=torch.bool).tril()
    return seen


def _left_behind(case: Case, own: list[tuple[Tensor, ...]], rank: int) -> dict[str, list[dict[str, Tensor]]]:
    """dk and dv of a rank if they do not travel, or are written over; `own` are those of each rank's queries alone."""
    stays = [sum(each[places(case, source)] for source in range(case.ranks)) for each in own[rank]]
    last = [torch.zeros_like(each) for each in stays]
    for hop in range(case.ranks):
        guest = (rank + hop) % case.ranks  # at which my keys are
        seen = slice(0, len(stays[0]) // 2 if guest > rank else None)
        for written, each in zip(last, own[guest]):
            written[seen] = each[places(case, rank)][seen]
    return {
        "keys and values travel on, but the gradients stayed: each rank has added up what belongs to others' keys. "
        "Pass all four on.": [dict(zip(("dk", "dv"), stays))],
        "every rank that keys visit has a part of their gradient. Here the next one was written over it instead of "
        "added.": [dict(zip(("dk", "dv"), last))],
    }


def expect_gradients(case: Case) -> list[Expected]:
    *inputs, dout = drawn(case)
    q, k, v = (each.requires_grad_() for each in inputs)
    out, _ = attention(case, q, k, v)
    whole = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    in_softmax = _backward(case, q.detach(), k.detach(), v.detach(), dout)
    found, parts = [], []  # of the queries of one rank
    for rank in range(case.ranks):
        mask = torch.zeros(case.tokens, 1, dtype=torch.float64)
        mask[places(case, rank)] = 1
        parts.append(torch.autograd.grad(out, (k, v), dout * mask, retain_graph=True))
    for rank in range(case.ranks):
        mine = places(case, rank)

        def named(gradients, mine=mine) -> dict[str, Tensor]:
            return {name: each[mine] for name, each in zip(("dq", "dk", "dv"), gradients)}

        stay = "only the rank's own queries have contributed: dk and dv travel with their keys."
        unscaled = {name: each * case.width**0.5 for name, each in named(whole).items() if name != "dv"}
        scale = "the scores were multiplied by WIDTH**-0.5; so is the way back."
        guest = places(case, (rank + 1) % case.ranks)
        mistakes = {
            stay: {name: each[mine] for name, each in zip(("dk", "dv"), parts[rank])},
            scale: unscaled,
            "dk and dv are those of the next rank's keys: they have not come home yet.": (
                {"dk": whole[1][guest], "dv": whole[2][guest]}
            ),
        }
        mistakes |= _left_behind(case, parts, rank)
        mistakes |= {text: [named(each) for each in variants] for text, variants in in_softmax.items()}
        found.append(Expected.of(named(whole), mistakes))
    return found


def errors_of_gradients(case: Case) -> dict[str, str]:
    """What torch says where a number for each query should be, and one for each place of the width is."""
    return {f"must match the size of tensor b ({case.width})": DELTA}


def judge_gradients(case: Case, rank: int, notes: Notes):
    row = 8 * case.width * case.tokens // case.ranks
    why = {
        "all_gather": "keys, values and their gradients go around the ring; nobody needs all of them at once.",
        "all_reduce": "a gradient that travels with its keys collects the sum on its way.",
    }
    yield from sends_at_most(notes, case.ranks * 4 * row if case.ranks > 1 else 0, why)
    scores = 8 * (case.tokens // case.ranks) ** 2
    yield from holds_at_most(notes, 17 * row + 8 * scores, "A rank needs the keys of one other rank at a time.")


CASES = (
    Case(ranks=1, tokens=6, width=4),
    Case(ranks=2, tokens=24, width=8),
    Case(ranks=3, tokens=30, width=7),
    Case(ranks=4, tokens=32, width=512),
)
LABS = [
    WriteLab(
        **page(__file__, "write-06-a"),
        source="step06_context_parallel/sketch.py",
        bodies=(1, 2),
        hidden={"backward": "write-06-b"},
        cases=(*CASES, Steep(ranks=2, tokens=16, width=6)),
        run=attend,
        expect=expect_attention,
        judge=judge_attention,
    ),
    WriteLab(
        **page(__file__, "write-06-b"),
        source="step06_context_parallel/sketch.py",
        bodies=(3,),
        hidden=dict.fromkeys(("block", "forward"), "write-06-a"),
        cases=CASES,
        run=differentiate,
        expect=expect_gradients,
        judge=judge_gradients,
        errors=errors_of_gradients,
    ),
]
