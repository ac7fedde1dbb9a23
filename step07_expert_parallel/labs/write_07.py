"""The lab of step 7 in which the student sends tokens to their experts, and back."""

import torch
from torch import Tensor

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import holds_at_most, sends_at_most, works_at_most
from common.labs.seen import keep
from common.labs.write import Expected, WriteLab, page
from step07_expert_parallel.labs.routing import (
    COUNTED,
    LAB,
    arrived,
    bytes_of_a_trip,
    drawn,
    mix,
    prepared,
    rows_between,
)

ANEW = (
    "an expert keeps its number when nobody chooses it: rows came to others, because numbers were counted anew among "
    "the experts that were chosen."
)
BY_RANK = "rows arrive sorted by rank, and only those of one rank by expert: some came to another's expert."


def route(student, case: Case, rank: int) -> dict[str, Tensor]:
    x, router, ups, downs, _ = prepared(student, case, rank)
    student.exchange = _that_looks(student.exchange, rows_between(case), rank)
    keep(x=x, router=router, ups=ups, downs=downs)
    y, kept = student.forward(x, router, ups, downs)
    return {"y": y} | _by_group(case, rank, *kept[1:4], *kept[6:])


def _by_group(case: Case, rank: int, gates, chosen, order, rows, expert, hidden, results) -> dict[str, Tensor]:
    """What is kept for the backward, whatever the order of a token's choices, and of the rows that went from a rank to
    an expert.
    """
    kept = {"gates": gates, "expert": expert, "rows": rows, "hidden": hidden, "results": results}
    if gates.shape == chosen.shape:
        kept["gates"] = gates.new_zeros(len(gates), case.experts).scatter(1, chosen, gates)
    if expert.shape == (sum(sizes := arriving(case, rank).flatten().tolist()),):
        for name in ("rows", "hidden"):
            if len(kept[name]) == len(expert):
                kept[name] = torch.stack([part.sum(0) for part in kept[name].split(sizes)])
    if order.shape == results.shape[:1] and order.sort()[0].equal(torch.arange(chosen.numel())):
        token, expert = order // case.choices, chosen.flatten()[order]
        kept["results"] = results[(token * case.experts + expert).argsort()]
    return {f"{name}, as kept": value for name, value in kept.items()}


def arriving(case: Case, rank: int) -> Tensor:
    """How many rows come to a rank from each rank (a line), for each of its experts (a column)."""
    x, router, *_ = drawn(case)
    chosen = (x @ router).topk(case.choices)[1].chunk(case.ranks)
    counts = torch.stack([each.flatten().bincount(minlength=case.experts) for each in chosen])
    return counts.chunk(case.ranks, 1)[rank]


def _that_looks(exchange, table: Tensor, rank: int):
    """`exchange`, which says so if rows leave as they should, but those that come are counted wrong: gloo would die."""

    def looking(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        comes = table[:, rank].tolist()
        if rows.is_floating_point() and list(sent) == table[rank].tolist() and list(received) != comes:
            raise ValueError(f"{COUNTED} {list(received)}, and ranks send {comes} rows to rank {rank}")
        return exchange(rows, sent, received)

    return looking


def _misplace(case: Case, x: Tensor, router: Tensor, ups: Tensor, downs: Tensor) -> dict[str, list[dict[str, Tensor]]]:
    """What a mistake in the order of rows is -> y with it, in each of its variants."""
    best, chosen = (x @ router).topk(case.choices)
    gates, chosen, tokens = best.softmax(-1).flatten()[:, None], chosen.flatten(), torch.arange(len(x))
    token, order = tokens.repeat_interleave(case.choices), chosen.argsort(stable=True)
    experts = torch.relu(x @ ups) @ downs  # (experts, tokens, width)
    unsorted, right = experts[chosen[order], token], experts[chosen, token]  # by choice
    taken = torch.arange(len(chosen)) % len(x)  # for the token of a choice

    def add(weighted: Tensor, to: Tensor) -> dict[str, Tensor]:
        return {"y": torch.zeros_like(x).index_add(0, to, weighted)}

    each = (right * gates).view(len(x), case.choices, -1)
    last = chosen.view(len(x), -1).argmax(1)  # which of a token's choices is the last row, if sorted by expert
    return {
        "choice i is one of token i // CHOICES: choices of one token are neighbors, so the remainder names another.": (
            [add(experts[chosen, taken] * gates, each) for each in (token, taken)] + [add(right * gates, taken)]
        ),
        "rows left in the order of tokens, so they came to experts that others chose: first sort them by expert.": (
            [add(unsorted * gates, token), add(unsorted * gates[order], token[order])]
        ),
        "results come home sorted by expert, and were added to the tokens in this order: first put them back.": (
            [add(right[order] * gates, token), add(right[order] * gates[order], token)]
        ),
        "a token has the result of one expert alone: the next one was written over it instead of added.": (
            [{"y": each[tokens, last]}, {"y": each[:, -1]}]
        ),
        ANEW: ([add(experts[_counted_anew(case, chosen)[chosen], token] * gates, token)]),
    }


def _counted_anew(case: Case, chosen: Tensor) -> Tensor:
    """By expert: the one whose place it takes if each rank counts only those of its experts that anybody has chosen."""
    used = chosen.bincount(minlength=case.experts).bool().view(case.ranks, -1)
    first = torch.arange(0, case.experts, case.experts // case.ranks)[:, None]
    return ((used.cumsum(1) - 1).clamp(min=0) + first).flatten()


def _confuse(case: Case, x: Tensor, router: Tensor, ups: Tensor, downs: Tensor) -> Tensor:
    """y of all tokens if a rank takes what has arrived, by rank and expert, to be sorted by expert alone."""
    best, chosen = (x @ router).topk(case.choices)
    gates, chosen = best.softmax(-1).flatten()[:, None], chosen.flatten()
    token = torch.arange(len(x)).repeat_interleave(case.choices)
    rank, source = chosen // (case.experts // case.ranks), token // (len(x) // case.ranks)
    arrival = ((rank * case.ranks + source) * case.experts + chosen).argsort(stable=True)
    taken_for = torch.empty_like(chosen).index_copy(0, arrival, chosen.sort()[0])
    results = (torch.relu(x @ ups) @ downs)[taken_for, token]
    return torch.zeros_like(x).index_add(0, token, results * gates)


def _right_and_wrong(case: Case, rank: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """What a rank keeps for the backward, as `_by_group` says it; and what it is by mistake, by text."""
    x, router, ups, downs, _ = drawn(case)
    best, chosen = (x @ router).topk(case.choices)
    counts, mine = arriving(case, rank), case.experts // case.ranks
    expert = torch.arange(mine).repeat(case.ranks).repeat_interleave(counts.flatten())
    came = torch.zeros(len(x), case.experts, dtype=torch.bool).scatter(1, chosen, True).chunk(case.ranks)
    token = [each.T[rank * mine : (rank + 1) * mine].nonzero()[:, 1] for each in came]  # of each rank, by expert
    rows = torch.cat([part[each] for part, each in zip(x.chunk(case.ranks), token)])
    before = torch.einsum("rw,rwh->rh", rows, ups[rank * mine + expert])
    after = before.relu()
    choices, gates = chosen.chunk(case.ranks)[rank], best.softmax(-1).chunk(case.ranks)[rank]
    own, shares = choices.flatten(), (x @ router).softmax(-1).gather(1, chosen).chunk(case.ranks)[rank]
    taken = x.chunk(case.ranks)[rank].repeat_interleave(case.choices, 0)
    results = (torch.relu(taken[:, None] @ ups[own]) @ downs[own])[:, 0]
    sent = torch.arange(len(own))

    def kept(order=slice(None), hidden=after, results=results, gates=gates) -> dict[str, Tensor]:
        return _by_group(case, rank, gates, choices, sent, rows[order], expert[order], hidden[order], results)

    sorted_again = expert.argsort(stable=True)
    anew = _counted_anew(case, chosen.flatten())[rank * mine + expert] - rank * mine
    wrong = {
        "`expert` is counted from 0 on each rank, as `ups` and `downs` are; here it is the number among all experts.": {
            "expert, as kept": rank * mine + expert
        },
        ANEW: {"expert, as kept": anew},
        BY_RANK: {"expert, as kept": expert[sorted_again]},
        "the gates to keep are those that results are multiplied by.": {
            "gates, as kept": kept(gates=shares)["gates, as kept"]
        },
        "the backward needs the experts' results without their gates: a gate's gradient is made of them.": {
            "results, as kept": kept(results=results * gates.reshape(-1, 1))["results, as kept"]
        },
        "the results to keep are those of my own tokens, home again, and not those of my experts.": {
            "results, as kept": torch.einsum("rh,rhw->rw", after, downs[rank * mine + expert])
        },
        "`hidden` is kept as it leaves the relu: the backward sees by its zeros where no gradient passes.": {
            "hidden, as kept": kept(hidden=before)["hidden, as kept"]
        },
        "what came is kept in the order in which it came, by rank and then by expert: in this order gradients travel "
        "home.": kept(sorted_again),
    }
    return kept(), wrong


def expect_mixture(case: Case) -> list[Expected]:
    x, router, ups, downs, _ = drawn(case)
    texts = {
        "experts' results were added without their gates.": "no gates",
        "an expert is relu(row @ up) @ down, and the relu is missing.": "no relu",
        "gates are a softmax over all experts; here it is one over the chosen ones.": "softmax over all",
        "results come home sorted by expert, but gates are in the order of tokens: rows got others' gates.": "others",
    }
    confused, found = _confuse(case, x, router, ups, downs), []
    for rank in range(case.ranks):
        mine = x.chunk(case.ranks)[rank]
        mistakes = {text: {"y": mix(case, mine, router, ups, downs, rule)} for text, rule in texts.items()}
        mistakes |= _misplace(case, mine, router, ups, downs)
        mistakes[BY_RANK] = {"y": confused.chunk(case.ranks)[rank]}
        here = torch.zeros(case.experts, 1, 1, dtype=torch.float64)
        here[rank * case.experts // case.ranks : (rank + 1) * case.experts // case.ranks] = 1
        doubled = mix(case, mine, router, ups, downs) + mine
        mistakes[
            "this is the experts' part and the token itself; only the sum of the experts' results is asked for."
        ] = {"y": doubled}
        text = "only the rank's own experts have contributed: rows travel to their expert's rank, and back."
        mistakes[text] = {"y": mix(case, mine, router, ups, downs * here)}
        kept, wrong = _right_and_wrong(case, rank)
        both = {text: [*_variants(mistakes.get(text)), *_variants(wrong.get(text))] for text in mistakes | wrong}
        first = {"expert, as kept": kept["expert, as kept"]}  # where rows went to no expert, `y` says nothing of why
        found.append(Expected.of(first | {"y": mix(case, mine, router, ups, downs)} | kept, both))
    return found


def _variants(wrong: dict | list | None) -> list[dict]:
    return wrong if isinstance(wrong, list) else [wrong] if wrong else []


def judge_route(case: Case, rank: int, notes: Notes):
    why = {
        "all_gather": "a token is needed by the experts that it chose; the others need not see it.",
        "all_reduce": "an expert's result is needed by one rank, the one that its token came from.",
    }
    share = 1 - 1 / case.ranks
    counts = 8 * case.experts
    most = max(arrived(case))  # rows of the rank whose experts are most popular
    numbers = 8 * max(most, case.tokens // case.ranks * case.choices)  # if the number of its expert travels with a row
    yield from sends_at_most(notes, bytes_of_a_trip(case) + share * (counts + numbers), why)
    came, went = arrived(case)[rank], case.tokens // case.ranks * case.choices
    router = 2 * case.tokens // case.ranks * case.width * case.experts  # it may be asked once more
    what = "An expert multiplies the rows that came for it, and none that came for others."
    yield from works_at_most(notes, 2 * came * case.width * case.hidden + router, what)
    rows = 4 * (came + went) * case.width + 4 * came * case.hidden  # also if each expert's are padded, or sorted again
    scores = 2 * went * (case.experts + 8)  # and choices, and what counts them
    what = "A rank needs rows, and of each expert one weight: no copy of it for each row."
    yield from holds_at_most(notes, 8 * (rows + scores), what)


LABS = [
    WriteLab(
        **page(__file__, "write-07-a"),
        **LAB,
        bodies=(1,),
        hidden={"backward": "write-07-b"},
        run=route,
        expect=expect_mixture,
        judge=judge_route,
    ),
]
