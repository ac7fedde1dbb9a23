"""What the labs of step 7 share: tokens, the router and experts, and what goes where."""

import torch
from torch import Tensor

from common.labs.ranks import Case

COUNTED = "`received` is"
CASES = (
    Case(ranks=1, tokens=6, width=4, hidden=5, experts=8, choices=1),  # two experts get no token at least
    Case(ranks=2, tokens=24, width=6, hidden=8, experts=4, choices=3),
    Case(ranks=3, tokens=21, width=5, hidden=7, experts=6, choices=2),
    Case(ranks=4, tokens=40, width=16, hidden=4, experts=8, choices=2),
)


def drawn(case: Case) -> tuple[Tensor, ...]:
    """Tokens, the router, both weights of all experts, and the gradient of the output."""
    random = torch.Generator().manual_seed(case.seed)
    sizes = [(case.tokens, case.width), (case.width, case.experts), (case.experts, case.width, case.hidden)]
    sizes += [(case.experts, case.hidden, case.width), (case.tokens, case.width)]
    return tuple(torch.randn(*size, generator=random, dtype=torch.float64) for size in sizes)


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


def set_sizes(student, case: Case) -> None:
    student.EXPERTS, student.CHOICES, student.HIDDEN = case.experts, case.choices, case.hidden
    student.TOKENS, student.WIDTH = case.tokens, case.width


def rows_between(case: Case) -> Tensor:
    """How many rows each rank (a line) sends to each rank (a column)."""
    x, router, *_ = drawn(case)
    rank = (x @ router).topk(case.choices)[1] // (case.experts // case.ranks)
    return torch.stack([each.flatten().bincount(minlength=case.ranks) for each in rank.chunk(case.ranks)])


def arrived(case: Case) -> list[int]:
    """How many rows come to each rank."""
    return rows_between(case).sum(0).tolist()


def bytes_of_rows(case: Case) -> float:
    """Bytes of a rank's choices, as they travel."""
    return 8 * case.tokens // case.ranks * case.choices * case.width


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
