"""What the labs of step 7 share: tokens, the router and experts, and what goes where."""

import torch
from torch import Tensor

from common.labs.ranks import Case

COUNTED = "`received` is"
CASES = (
    Case(ranks=1, tokens=6, width=4, hidden=5, experts=8, choices=1),  # two experts get no token at least
    Case(ranks=2, tokens=24, width=6, hidden=8, experts=4, choices=3),
    # Nobody chooses the two experts of rank 0, nor one of rank 1; and the last one is not chosen by tokens of rank 0
    Case(ranks=4, tokens=32, width=5, hidden=3, experts=8, choices=2, unchosen=3),
    Case(ranks=3, tokens=21, width=5, hidden=7, experts=6, choices=2),
    Case(ranks=4, tokens=40, width=16, hidden=32, experts=8, choices=2),  # an expert is larger than its rows
)


def drawn(case: Case) -> tuple[Tensor, ...]:
    """Tokens, the router, both weights of all experts, and the gradient of the output."""
    random = torch.Generator().manual_seed(case.seed)
    sizes = [(case.tokens, case.width), (case.width, case.experts), (case.experts, case.width, case.hidden)]
    sizes += [(case.experts, case.hidden, case.width), (case.tokens, case.width)]
    x, router, *others = (torch.randn(*size, generator=random, dtype=torch.float64) for size in sizes)
    if unchosen := vars(case).get("unchosen", 0):
        x[:, 0], x[:, 1] = 1, torch.arange(case.tokens) < case.tokens // case.ranks  # each token; those of rank 0
        router[:2], router[0, :unchosen], router[1, -1] = 0, -100, -100
    return x, router, *others


def mix(case: Case, x: Tensor, router: Tensor, ups: Tensor, downs: Tensor, rule: str = "") -> Tensor:
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


def part_of(case: Case, rank: int, x: Tensor, router: Tensor, ups: Tensor, downs: Tensor, dy: Tensor) -> list[Tensor]:
    x, ups, downs, dy = (each.chunk(case.ranks)[rank].clone() for each in (x, ups, downs, dy))
    return [x, router, ups, downs, dy]


def prepared(student, case: Case, rank: int) -> list[Tensor]:
    """A rank's part of what is drawn, once the student's module has the sizes of the case."""
    student.EXPERTS, student.CHOICES, student.HIDDEN = case.experts, case.choices, case.hidden
    student.TOKENS, student.WIDTH = case.tokens, case.width
    return part_of(case, rank, *drawn(case))


def rows_between(case: Case) -> Tensor:
    """How many rows each rank (a line) sends to each rank (a column)."""
    x, router, *_ = drawn(case)
    rank = (x @ router).topk(case.choices)[1] // (case.experts // case.ranks)
    return torch.stack([each.flatten().bincount(minlength=case.ranks) for each in rank.chunk(case.ranks)])


def arrived(case: Case) -> list[int]:
    """How many rows come to each rank."""
    return rows_between(case).sum(0).tolist()


def bytes_of_a_trip(case: Case) -> float:
    """What a rank sends whose experts are the most popular ones: its rows, and home what they make of others'."""
    rows = case.tokens // case.ranks * case.choices + max(arrived(case))
    return (1 - 1 / case.ranks) * 8 * case.width * rows


def errors_of_route(case: Case) -> dict[str, str]:
    """What an exchange says whose sizes are not those of its rows, and ranks if one of them takes no part in one."""
    absent = "every rank takes part in every exchange."
    if "unchosen" in vars(case):
        absent += " A rank with experts that nobody may have chosen has nothing to send there, but others wait for it."
    text = "the sizes of an exchange are those of what leaves, then of what comes. On the way home the two lists swap."
    zero = "an expert that none of my tokens chose has a count, too: 0. So there are EXPERTS counts in all: `bincount` "
    zero += "needs `minlength`, and `unique` leaves out what does not occur."
    return {
        "has come to its end": absent,
        COUNTED: "each rank knows where its own rows go, and must be told how many come: has every rank sent the "
        "others its counts?",
        "TypeError in `exchange`": "sizes of an exchange are lists of whole numbers (int): counts in another type, "
        "such as that of `x`, make others of them.",
        "exchange": text,
        "plit sizes": text,
        "out of bounds": "experts are counted from 0 on each rank: the number of an expert among mine.",
        "is invalid for input of size": zero,
        "repeats must have the same size": zero,
    }


LAB = {"source": "step07_expert_parallel/sketch.py", "cases": CASES, "errors": errors_of_route}
