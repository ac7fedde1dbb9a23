"""The lab of step 4 in which the student writes tensor parallelism."""

import torch

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import sends_at_most, works_at_most
from common.labs.seen import keep, unseen
from common.labs.write import Expected, WriteLab, page


def _drawn(case: Case) -> tuple[torch.Tensor, ...]:
    """x, scale, w1, w2 and the gradient of y."""
    random = torch.Generator().manual_seed(case.seed)
    sizes = (case.tokens, case.width), (case.width,), (case.width, case.hidden), (case.hidden, case.width)
    x, scale, w1, w2 = (torch.randn(*size, generator=random, dtype=torch.float64) for size in sizes)
    return x, scale, w1, w2, torch.randn(case.tokens, case.width, generator=random, dtype=torch.float64)


def divide(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    x, scale, w1, w2, dy = _drawn(case)
    x, w2, dy = (each.chunk(case.ranks)[rank].clone() for each in (x, w2, dy))
    w1 = w1.chunk(case.ranks, dim=1)[rank].contiguous()
    keep(x=x, scale=scale, w1=w1, w2=w2, dy=dy)
    y, hidden = student.forward(x, scale, w1, w2)
    with unseen():  # a pipeline does so as well: the forward of other tokens before the backward of these
        student.forward(-x, scale, w1, w2)
    dx, dscale, dw1, dw2 = student.backward(dy, x, hidden, scale, w1, w2)
    return {"y": y, "dx": dx, "dscale": dscale, "dw1": dw1, "dw2": dw2}


def expect_division(case: Case) -> list[Expected]:
    drawn, ranks = _drawn(case), case.ranks
    x, scale, w1, w2 = (each.requires_grad_() for each in drawn[:4])
    dy = drawn[4]
    y = torch.relu(x * scale @ w1) @ w2
    whole = y.detach(), *torch.autograd.grad(y, (x, scale, w1, w2), dy)
    through = (dy @ w2.T) * (x * scale @ w1 > 0)  # the gradient in front of the relu
    before = x * scale @ w1
    unmasked = torch.autograd.grad((before + (before.relu() - before).detach()) @ w2, (x, scale, w1), dy)
    mixed, found = _mixed(case), []
    for rank in range(ranks):
        y, dx, dw2 = (whole[each].chunk(ranks)[rank] for each in (0, 1, 4))
        dw1 = whole[3].chunk(ranks, dim=1)[rank]
        mine, tokens = slice(rank * case.hidden // ranks, (rank + 1) * case.hidden // ranks), slice(None)
        rows = slice(rank * case.tokens // ranks, (rank + 1) * case.tokens // ranks)

        def of(tokens: slice, columns: slice, mine=mine) -> list[torch.Tensor]:
            """y, dx, dw1 and dw2 that come of some tokens and some columns alone."""
            part = torch.relu((x * scale)[tokens] @ w1[:, columns]) @ w2[columns]
            inputs = torch.autograd.grad(part, (x, w1, w2), dy[tokens])
            return [part.detach(), inputs[0], inputs[1][:, mine], inputs[2][mine]]

        columns, tokens = of(slice(None), mine), of(rows, slice(None))
        summand = {"y": columns[0][rows], "dx": columns[1][rows]}
        own = {"dw1": tokens[2], "dw2": tokens[3], "dscale": (whole[1] / scale * x)[rows].sum(0).detach()}
        mistakes = {
            "this is what the rank's own columns contribute: the ranks' summands must be added up.": summand,
            "this comes of the rank's own tokens alone, but all tokens have passed through these weights.": own,
            "the relu's derivative is missing: where `hidden` is 0, its gradient is 0, too.": {
                "dx": unmasked[0].chunk(ranks)[rank],
                "dscale": unmasked[1],
                "dw1": unmasked[2].chunk(ranks, dim=1)[rank],
            },
            "x passes through `scale` on its way, and so does its gradient, in the other direction.": {
                "dx": (whole[1] / scale).detach().chunk(ranks)[rank]
            },
            "`scale` meets x, so x is a factor of its gradient.": {"dscale": (whole[1] / scale).sum(0).detach()},
            "the first product takes x times `scale`, and so does the gradient of its weight.": {
                "dw1": (x.T @ through).detach().chunk(ranks, dim=1)[rank]
            },
            "dw1 and dw2 are of the rank's own columns, and all tokens are in them already: nothing needs a sum.": [
                {"dw1": sum(whole[3].chunk(ranks, dim=1))},
                {"dw2": sum(whole[4].chunk(ranks))},
            ],
            "ranks gather in different orders: one gathers dy where another gathers x, and each gets some of both. All "
            "ranks must call collectives in the same order.": [each[rank] for each in mixed],
            "the backward met what another forward has left behind, as other tokens may pass before it comes: gather "
            "again what it is not given.": {"dw1": -dw1},
        }
        right = {"y": y, "dx": dx, "dscale": whole[2], "dw1": dw1, "dw2": dw2}
        found.append(Expected.of(right, mistakes))
    return found


def _mixed(case: Case) -> list[list[dict[str, torch.Tensor]]]:
    """What each rank has if some gather x and then dy, and others dy first; for each choice of those."""
    (x, scale, w1, w2, dy), ranks, found = _drawn(case), case.ranks, []
    columns = list(zip(w1.chunk(ranks, dim=1), w2.chunk(ranks)))
    for choice in range(1, 2 ** (ranks - 1)):  # the last rank gathers dy first
        some = [bool(choice >> rank & 1) for rank in range(ranks)]
        early = torch.tensor(some).repeat_interleave(case.tokens // ranks)[:, None]
        first, second = torch.where(early, x * scale, dy), torch.where(early, dy, x * scale)
        weights, dscaled = [], torch.zeros_like(x)
        for (up, down), takes_x in zip(columns, some):
            tokens, gradient = (first, second) if takes_x else (second, first)
            hidden = torch.relu(x * scale @ up)
            dhidden = (gradient @ down.T) * (hidden > 0)
            weights.append({"dw1": tokens.T @ dhidden, "dw2": hidden.T @ gradient})
            dscaled += dhidden @ up.T
        found.append([{"dx": dx} | each for dx, each in zip((dscaled * scale).chunk(ranks), weights)])
    return found


def errors_of_shapes(case: Case) -> dict[str, str]:
    """What torch says where a tensor of the rank's own tokens meets one of all tokens."""
    own, hidden = case.tokens // case.ranks, case.hidden // case.ranks
    dy = "dy has the rank's own tokens, and `hidden` has all of them: gather dy before they meet."
    x = "dw1 needs the inputs of all tokens, and x has the rank's own: gather them once more."
    return {
        f"({hidden}x{case.tokens} and {own}x{case.width})": dy,
        f"tensor a ({own}) must match the size of tensor b ({case.tokens})": dy,
        f"({case.width}x{own} and {case.tokens}x{hidden})": x,
    }


def judge_division(case: Case, rank: int, notes: Notes):
    tokens, scale = 8 * case.tokens * case.width, 8 * case.width
    product = case.tokens * case.width * case.hidden // case.ranks
    what = "Two products in the forward and four in the backward are all: `hidden` tells what the first two have found."
    small = 2 * case.tokens * case.width  # such as dscale's, by einsum
    yield from works_at_most(notes, 6 * product + small, what)
    if case.ranks > 1 and (whole := notes.of("all_reduce", least=tokens)):
        yield (
            f"the all_reduce in line {whole[0].line} sends {whole[0].sent:,.0f} bytes, and gives every rank the sums "
            "of all tokens. Each needs those of its own tokens alone: a reduce-scatter sends half as many bytes."
        )
        return
    if case.ranks > 1 and len(sums := notes.of("all_reduce")) > 1:
        largest = max(reversed(sums), key=lambda call: call.bytes)
        yield f"{len(sums)} all-reduces are sent, and one is enough, for dscale. Line {largest.line} has another."
    why = {
        "all_gather": "tokens are gathered before a product; what is between the two products stays where it is.",
        "all_reduce": "only dscale is a part of a sum.",
    }
    yield from sends_at_most(notes, (5 * tokens + 2 * scale) * (1 - 1 / case.ranks), why)


LABS = [
    WriteLab(
        **page(__file__, "write-04-a"),
        source="step04_tensor_parallel/sketch.py",
        bodies=(1, 2),
        cases=(
            Case(ranks=1, tokens=3, width=4, hidden=6),
            Case(ranks=2, tokens=8, width=6, hidden=10),
            Case(ranks=3, tokens=9, width=4, hidden=21),
            Case(ranks=4, tokens=12, width=5, hidden=16),
        ),
        run=divide,
        expect=expect_division,
        judge=judge_division,
        errors=errors_of_shapes,
    ),
]
