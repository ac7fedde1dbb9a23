"""Labs of step 7 in which the student writes expert parallelism, forward and backward."""

import torch
from torch import Tensor

from common.labs.ranks import Case
from common.labs.rules import sends_at_most
from common.labs.seen import Notes
from common.labs.write import Expected, WriteLab, page

COUNTED = "`received` is"


def _drawn(case: Case) -> tuple[Tensor, ...]:
    """Tokens, the router, both weights of all experts, and the gradient of the output."""
    random = torch.Generator().manual_seed(case.seed)
    sizes = [(case.tokens, case.width), (case.width, case.experts), (case.experts, case.width, case.hidden)]
    sizes += [(case.experts, case.hidden, case.width), (case.tokens, case.width)]
    return tuple(torch.randn(*size, generator=random, dtype=torch.float64) for size in sizes)


def _mix(case: Case, x: Tensor, router: Tensor, ups: Tensor, downs: Tensor, rule: str = "") -> Tensor:
    """Every token through all experts, most of them with a gate of 0."""
    best, chosen = (x @ router).topk(case.choices)
    weights = torch.ones_like(best) if rule == "no gates" else best.softmax(-1)
    if rule == "softmax over all":
        weights = (x @ router).softmax(-1).gather(1, chosen)
    if rule == "others":  # rows leave sorted by expert, and gates stay where they were
        order, right = chosen.flatten().argsort(stable=True), weights.flatten()
        weights = torch.empty_like(right).index_copy(0, order, right).view_as(weights)
    gates = x.new_zeros(len(x), case.experts).scatter(1, chosen, weights)
    hidden = x @ ups
    relu = hidden + (hidden.relu() - hidden).detach() if rule == "no mask" else hidden.relu()
    relu = hidden if rule == "no relu" else relu
    return torch.einsum("te,etw->tw", gates, relu @ downs)


def _mine(case: Case, rank: int, x: Tensor, router: Tensor, ups: Tensor, downs: Tensor, dy: Tensor) -> list[Tensor]:
    x, ups, downs, dy = (each.chunk(case.ranks)[rank].clone() for each in (x, ups, downs, dy))
    return [x, router, ups, downs, dy]


def _set(student, case: Case) -> None:
    student.EXPERTS, student.CHOICES, student.HIDDEN = case.experts, case.choices, case.hidden
    student.TOKENS, student.WIDTH = case.tokens, case.width


# ---- write-07-a: forward ---------------------------------------------------------------------------------------------


def route(student, case: Case, rank: int) -> dict[str, Tensor]:
    _set(student, case)
    x, router, ups, downs, _ = _mine(case, rank, *_drawn(case))
    student.exchange = _that_looks(student.exchange, _table(case), rank)
    y, _ = student.forward(x, router, ups, downs)
    return {"y": y}


def _table(case: Case) -> Tensor:
    """How many rows each rank (a line) sends to each rank (a column)."""
    x, router, *_ = _drawn(case)
    rank = (x @ router).topk(case.choices)[1] // (case.experts // case.ranks)
    return torch.stack([each.flatten().bincount(minlength=case.ranks) for each in rank.chunk(case.ranks)])


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
    }


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


def expect_mixture(case: Case) -> list[Expected]:
    x, router, ups, downs, _ = _drawn(case)
    texts = {
        "experts' results were added without their gates.": "no gates",
        "an expert is relu(row @ up) @ down, and the relu is missing.": "no relu",
        "gates are a softmax over all experts; here it is one over the chosen ones.": "softmax over all",
        "results come home sorted by expert, but gates are in the order of tokens: rows got others' gates.": "others",
    }
    confused, found = _confuse(case, x, router, ups, downs), []
    for rank in range(case.ranks):
        mine = x.chunk(case.ranks)[rank]
        mistakes = {text: {"y": _mix(case, mine, router, ups, downs, rule)} for text, rule in texts.items()}
        mistakes |= _misplace(case, mine, router, ups, downs)
        mistakes["rows arrive sorted by rank, and only those of one rank by expert: some came to another's expert."] = {
            "y": confused.chunk(case.ranks)[rank]
        }
        here = torch.zeros(case.experts, 1, 1, dtype=torch.float64)
        here[rank * case.experts // case.ranks : (rank + 1) * case.experts // case.ranks] = 1
        doubled = _mix(case, mine, router, ups, downs) + mine
        mistakes[
            "this is the experts' part and the token itself; only the sum of the experts' results is asked for."
        ] = {"y": doubled}
        text = "only the rank's own experts have contributed: rows travel to their expert's rank, and back."
        mistakes[text] = {"y": _mix(case, mine, router, ups, downs * here)}
        found.append(Expected.of({"y": _mix(case, mine, router, ups, downs)}, mistakes))
    return found


def _rows(case: Case) -> float:
    """Bytes of a rank's choices, as they travel."""
    return 8 * case.tokens // case.ranks * case.choices * case.width


def judge_route(case: Case, rank: int, notes: Notes):
    why = {
        "all_gather": "a token is needed by the experts that it chose; the others need not see it.",
        "all_reduce": "an expert's result is needed by one rank, the one that its token came from.",
    }
    share = 1 - 1 / case.ranks
    counts = 8 * case.experts
    most = max(_arrived(case))  # rows of the rank whose experts are most popular
    numbers = 8 * max(most, case.tokens // case.ranks * case.choices)  # if the number of its expert travels with a row
    yield from sends_at_most(notes, share * (_rows(case) + most * 8 * case.width + counts + numbers), why)


def errors_of_route(case: Case) -> dict[str, str]:
    """What an exchange says whose sizes are not those of its rows."""
    text = "the sizes of an exchange are those of what leaves, then of what comes. On the way home the two lists swap."
    return {
        COUNTED: "each rank knows where its own rows go, and must be told how many come: has every rank sent the "
        "others its counts?",
        "exchange": text,
        "plit sizes": text,
        "out of bounds": "experts are counted from 0 on each rank: the number of an expert among mine.",
    }


def _arrived(case: Case) -> list[int]:
    """How many rows come to each rank."""
    return _table(case).sum(0).tolist()


# ---- write-07-b: backward --------------------------------------------------------------------------------------------


def go_back(student, case: Case, rank: int) -> dict[str, Tensor]:
    _set(student, case)
    x, router, ups, downs, dy = _mine(case, rank, *_drawn(case))
    _, kept = student.forward(x, router, ups, downs)
    return dict(zip(("dx", "drouter", "dups", "ddowns"), student.backward(dy, router, ups, downs, kept)))


def expect_back(case: Case) -> list[Expected]:
    x, router, ups, downs, dy = _drawn(case)
    leaves = [each.requires_grad_() for each in (x, router, ups, downs)]
    y = _mix(case, *leaves)
    dx, _, dups, ddowns = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    unscaled = torch.autograd.grad(_mix(case, *leaves, rule="no gates"), (ups, downs), dy)
    unmasked = torch.autograd.grad(_mix(case, *leaves, rule="no mask"), (x, ups), dy)
    fixed = x.detach().clone().requires_grad_()  # without the way through the router
    best, chosen = (x @ router).detach().topk(case.choices)
    gates = x.new_zeros(len(x), case.experts).scatter(1, chosen, best.softmax(-1))
    gates.requires_grad_()

    def back(gates: Tensor, *to: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch.einsum("te,etw->tw", gates, torch.relu(fixed @ ups) @ downs), to, dy)

    past, dgates = back(gates, fixed, gates)
    last = chosen.amax(1, keepdim=True), chosen[:, -1:]  # the choice that writes last: sorted by expert, or not
    single = [back(torch.zeros_like(gates).scatter(1, each, gates.gather(1, each)), fixed)[0] for each in last]
    found = []
    for rank in range(case.ranks):
        mask = torch.zeros(case.tokens, 1, dtype=torch.float64)
        mask.chunk(case.ranks)[rank].fill_(1)
        own = torch.autograd.grad(y, leaves, dy * mask, retain_graph=True)
        part = [each.chunk(case.ranks)[rank] for each in (dx, dups, ddowns)]
        mistakes = {
            "gates are a part of the product: what goes back to an expert is dy times the gate.": {
                "dups": unscaled[0].chunk(case.ranks)[rank],
                "ddowns": unscaled[1].chunk(case.ranks)[rank],
            },
            "the router gets a gradient through the gates, and so do the tokens through the router.": {
                "dx": past.chunk(case.ranks)[rank],
                "drouter": torch.zeros_like(router).detach(),
            },
            "only the rank's own tokens have contributed; others' tokens came to these experts, too.": {
                "dups": own[2].chunk(case.ranks)[rank],
                "ddowns": own[3].chunk(case.ranks)[rank],
            },
            "the router's part of dx and drouter is added after the last line of the gap: it is here twice.": {
                "dx": (2 * dx - past).chunk(case.ranks)[rank]
            },
            "`order` says which choice is in which row: gradients of gates come in the order of rows, and must be put "
            "back.": _shuffled(case, rank, *[each.detach() for each in (x, router, ups, downs, dy, past)]),
            "the relu's derivative is missing: where `hidden` is 0, its gradient is 0, too.": {
                "dups": unmasked[1].chunk(case.ranks)[rank],
                "dx": unmasked[0].chunk(case.ranks)[rank],
            },
            "a token gets a gradient from each of its experts. Here the next one was written over it instead of "
            "added.": [{"dx": (dx - past + each).chunk(case.ranks)[rank]} for each in single],
        }
        dgate, gate = (each.detach().gather(1, chosen).chunk(case.ranks)[rank] for each in (dgates, gates))
        softmax = (
            "between the gradient of a gate and that of a score is the softmax: a score moves all of a token's gates."
        )
        mistakes[softmax] = []
        for dbest in (dgate, gate * dgate):
            dlogits = dbest.new_zeros(len(dbest), case.experts).scatter(1, chosen.chunk(case.ranks)[rank], dbest)
            mistakes[softmax].append(
                {
                    "dx": past.chunk(case.ranks)[rank] + dlogits @ router.detach().T,
                    "drouter": x.detach().chunk(case.ranks)[rank].T @ dlogits,
                }
            )
        right = {"dups": part[1], "ddowns": part[2], "drouter": own[1], "dx": part[0]}
        found.append(Expected.of(right, mistakes))
    return found


def _shuffled(case: Case, rank: int, *tensors: Tensor) -> dict[str, Tensor]:
    """dx and drouter of a rank if the gradients of gates stay in the order in which rows left."""
    x, router, ups, downs, dy, past = tensors
    x, dy, past = (each.chunk(case.ranks)[rank] for each in (x, dy, past))
    best, chosen = (x @ router).topk(case.choices)
    gates, flat = best.softmax(-1), chosen.flatten()
    order, token = flat.argsort(stable=True), torch.arange(len(x)).repeat_interleave(case.choices)
    results = (torch.relu(x @ ups) @ downs)[flat, token]
    dgates = (dy[token] * results).sum(-1)[order].view_as(gates)
    dbest = gates * (dgates - (gates * dgates).sum(-1, keepdim=True))
    dlogits = x.new_zeros(len(x), case.experts).scatter(1, chosen, dbest)
    return {"dx": past + dlogits @ router.T, "drouter": x.T @ dlogits}


def judge_back(case: Case, rank: int, notes: Notes):
    share, most = 1 - 1 / case.ranks, max(_arrived(case)) * 8 * case.width
    why = {
        "all_reduce": "experts' gradients are whole, because all of their tokens came to them.",
        "all_gather": "a row's gradient is needed by one rank.",
    }
    # The forward, which the check runs as well, and its mirror
    yield from sends_at_most(notes, 2 * share * (_rows(case) + most) + 8 * case.experts, why)


CASES = (
    Case(ranks=1, tokens=6, width=4, hidden=5, experts=3, choices=1),
    Case(ranks=2, tokens=24, width=6, hidden=8, experts=4, choices=3),
    Case(ranks=3, tokens=21, width=5, hidden=7, experts=6, choices=2),
    Case(ranks=4, tokens=40, width=16, hidden=4, experts=8, choices=2),
)
LABS = [
    WriteLab(
        **page(__file__, "write-07-a"),
        source="step07_expert_parallel/sketch.py",
        bodies=(1,),
        hidden={"backward": "write-07-b"},
        cases=CASES,
        run=route,
        expect=expect_mixture,
        judge=judge_route,
        errors=errors_of_route,
    ),
    WriteLab(
        **page(__file__, "write-07-b"),
        source="step07_expert_parallel/sketch.py",
        bodies=(2,),
        hidden={"forward": "write-07-a"},
        cases=CASES,
        run=go_back,
        expect=expect_back,
        judge=judge_back,
        errors=errors_of_route,
    ),
]
