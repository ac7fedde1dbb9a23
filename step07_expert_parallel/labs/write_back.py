"""The lab of step 7 in which the student writes the way back from the experts."""

import torch
from torch import Tensor

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import sends_at_most, works_at_most
from common.labs.seen import keep
from common.labs.write import Expected, WriteLab, page
from step07_expert_parallel.labs.routing import LAB, arrived, bytes_of_a_trip, drawn, mix, prepared


def go_back(student, case: Case, rank: int) -> dict[str, Tensor]:
    torch.set_deterministic_debug_mode("warn")  # what is made empty is nan, and not 0 by chance
    x, router, ups, downs, dy = prepared(student, case, rank)
    _, kept = student.forward(x, router, ups, downs)
    keep(dy=dy, router=router, ups=ups, downs=downs, x=x)
    return dict(zip(("dx", "drouter", "dups", "ddowns"), student.backward(dy, router, ups, downs, kept)))


def expect_back(case: Case) -> list[Expected]:
    x, router, ups, downs, dy = drawn(case)
    leaves = [each.requires_grad_() for each in (x, router, ups, downs)]
    y = mix(case, *leaves)
    dx, drouter, dups, ddowns = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    unscaled = torch.autograd.grad(mix(case, *leaves, rule="no gates"), (ups, downs), dy)
    unmasked = torch.autograd.grad(mix(case, *leaves, rule="no mask"), (x, ups), dy)
    fixed = x.detach().clone().requires_grad_()  # without the way through the router
    best, chosen = (x @ router).detach().topk(case.choices)
    gates = x.new_zeros(len(x), case.experts).scatter(1, chosen, best.softmax(-1))
    gates.requires_grad_()

    def back(gates: Tensor, *to: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch.einsum("te,etw->tw", gates, torch.relu(fixed @ ups) @ downs), to, dy)

    past, dgates = back(gates, fixed, gates)
    last = chosen.amax(1, keepdim=True), chosen[:, -1:]  # the choice that writes last: sorted by expert, or not
    single = [back(torch.zeros_like(gates).scatter(1, each, gates.gather(1, each)), fixed)[0] for each in last]
    misplaced, found = _misplaced(case), []
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
            "an expert that nobody chose has a gradient, too: zeros. Whoever adds it to others', or updates the expert "
            "by it, needs a tensor.": {"dups": None, "ddowns": None},
            "drouter is asked for of my tokens alone. Whoever updates the router adds up those of all ranks, once.": {
                "drouter": drouter
            },
            "the relu's derivative is missing: where `hidden` is 0, its gradient is 0, too.": {
                "dups": unmasked[1].chunk(case.ranks)[rank],
                "dx": unmasked[0].chunk(case.ranks)[rank],
            },
            "a token gets a gradient from each of its experts. Here the next one was written over it instead of "
            "added.": [{"dx": (dx - past + each).chunk(case.ranks)[rank]} for each in single],
        }
        for text, ways in misplaced.items():
            mistakes[text] = [{name: each.chunk(case.ranks)[rank] for name, each in way.items()} for way in ways]
        mistakes[
            "dups and ddowns are of the rank's own experts, and whole: added up over ranks, they mix those of others."
        ] = [{name: sum(each.chunk(case.ranks)) for name, each in (("dups", dups), ("ddowns", ddowns))}]
        dgate, gate = (each.detach().gather(1, chosen).chunk(case.ranks)[rank] for each in (dgates, gates))
        softmax = (
            "between the gradient of a gate and that of a score is the softmax: a score moves all of a token's gates."
        )
        mistakes[softmax] = []
        for dbest in (dgate, gate * dgate, gate * (1 - gate) * dgate):
            dlogits = dbest.new_zeros(len(dbest), case.experts).scatter(1, chosen.chunk(case.ranks)[rank], dbest)
            mistakes[softmax].append(
                {
                    "dx": past.chunk(case.ranks)[rank] + dlogits @ router.detach().T,
                    "drouter": x.detach().chunk(case.ranks)[rank].T @ dlogits,
                }
            )
        right = {"dups": part[1], "ddowns": part[2], "drouter": own[1], "dx": part[0]}
        empty = "an expert to which no token came has a gradient, too: 0. Until it is filled, an empty tensor has "
        found.append(Expected.of(right, mistakes, infinite=f"{empty}whatever was in memory."))
    return found


def _misplaced(case: Case) -> dict[str, list[dict[str, Tensor]]]:
    """dups and ddowns of all ranks if gates, or the rows of dy, are not in the order in which rows left."""
    x, router, ups, downs, dy = drawn(case)
    leaves = [each.requires_grad_() for each in (ups, downs)]

    def with_rows(of_gates: bool, of_dy: bool) -> dict[str, Tensor]:
        """Whose gates are in the order of rows, or whose dy is."""
        total = torch.zeros((), dtype=torch.float64)
        for tokens, gradients in zip(x.chunk(case.ranks), dy.chunk(case.ranks)):
            best, chosen = (tokens @ router).topk(case.choices)
            gates, expert = best.softmax(-1).flatten(), chosen.flatten()
            order, place = expert.argsort(stable=True), torch.arange(len(expert))
            rows, expert = tokens[order // case.choices], expert[order]
            results = (torch.relu(rows[:, None] @ ups[expert]) @ downs[expert])[:, 0]
            of = gradients[(order if of_dy else place) // case.choices]
            total = total + (results * gates[order if of_gates else place, None] * of).sum()
        return dict(zip(("dups", "ddowns"), torch.autograd.grad(total, leaves)))

    return {
        "gates are in the order of choices, and rows left in another: `order` says which choice, and so which gate, is "
        "in which row.": [with_rows(of_gates=False, of_dy=True)],
        "row i is no choice of token i // CHOICES: `order` says which choice is in row i, and that one // CHOICES is "
        "its token, whose dy it needs.": [with_rows(of_gates=each, of_dy=False) for each in (True, False)],
    }


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
    why = {
        "all_reduce": "experts' gradients are whole, because all of their tokens came to them.",
        "all_gather": "a row's gradient is needed by one rank.",
        "all_to_all": "two exchanges mirror those of the forward, and what the gates' gradients need is at home.",
    }
    # The forward, which the check runs as well, and its mirror
    router = 5 * case.tokens // case.ranks * case.width * case.experts  # it may be asked once more
    what = "An expert multiplies the rows that came for it, and none that came for others."
    yield from works_at_most(notes, 6 * arrived(case)[rank] * case.width * case.hidden + router, what)
    yield from sends_at_most(notes, 2 * bytes_of_a_trip(case) + 8 * case.experts, why)


LABS = [
    WriteLab(
        **page(__file__, "write-07-b"),
        **LAB,
        bodies=(2,),
        hidden={"forward": "write-07-a"},
        run=go_back,
        expect=expect_back,
        judge=judge_back,
    ),
]
