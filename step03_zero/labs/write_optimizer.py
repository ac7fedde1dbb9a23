"""The lab of step 3 in which the student writes ZeRO-1: an optimizer of which each rank has a part."""

import torch

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import holds_at_most, sends_at_most
from common.labs.seen import count
from common.labs.write import Expected, WriteLab, page

FAR = 1024.0  # a power of two, so that adding and subtracting it costs no more than rounding
UPDATED = "weights of others"  # what is counted


def _states(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and each rank's gradients in each of two steps."""
    random = torch.Generator().manual_seed(case.seed)
    size = case.ranks * case.share
    weights = torch.randn(size, generator=random, dtype=torch.float64)
    return weights, torch.randn(2, case.ranks, size, generator=random, dtype=torch.float64)


def optimize(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    weights, gradients = _states(case)
    momentum, values = torch.zeros(case.share, dtype=torch.float64), {}
    others = torch.arange(case.ranks * case.share) // case.share != rank  # of which this rank has no momentum
    for step in range(2):
        weights += FAR * others  # their owners say what they are, unless this rank updates them as well
        before = weights.clone()
        values[f"norm, step {step}"] = student.step(weights, gradients[step, rank].clone(), momentum, case.limit)
        kept = others & (weights > FAR / 2)
        if (kept & (weights != before)).any():
            count(UPDATED)
        weights -= FAR * kept
        values |= {f"momentum, step {step}": momentum.clone(), f"weights, step {step}": weights.clone()}
    return values


def expect_update(case: Case) -> list[Expected]:
    def run(
        rank: int, mean: bool = False, normed: str = "sum", limit: float = case.limit, rule: str = ""
    ) -> dict[str, torch.Tensor]:
        """The values on a rank; `normed` says of what it takes the norm, `rule` what is unusual about the update."""
        weights, gradients = _states(case)
        mine, values, momentum = slice(rank * case.share, (rank + 1) * case.share), {}, torch.zeros_like(weights)
        for step in range(2):
            own = gradients[step]  # of each rank's samples
            gradient = own.mean(0) if mean else own.sum(0)
            norm = {
                "sum": gradient,
                "my part": gradient[mine],
                "my samples": own[rank],
                "my samples, my part": own[rank, mine],
                "all samples": own,
                "all samples, their parts": own.view(case.ranks, case.ranks, case.share).diagonal(),
            }[normed].norm()
            scale = (limit / (norm + 1e-6 * (rule == "1e-6"))).clamp(max=torch.inf if rule == "always" else 1.0)
            before, scaled = momentum, gradient.clamp(-limit, limit) if rule == "each" else gradient * scale
            momentum = (0.9 * momentum + gradient) * scale if rule == "momentum" else 0.9 * momentum + scaled
            weights = weights - 0.1 * {"before": before, "ahead": 0.9 * momentum + scaled}.get(rule, momentum)
            values |= {f"norm, step {step}": norm, f"momentum, step {step}": momentum[mine]}
            values[f"weights, step {step}"] = weights
        return values

    texts = {
        "this is the norm of the rank's own part; the norm of the gradient needs the squares of all parts.": (
            ["my part"]
        ),
        "this is the norm of the gradient of the rank's own samples: first sum, then take the norm.": (
            ["my samples", "my samples, my part"]
        ),
        "every rank squared the gradient of its own samples, and these squares were added up. The square of a sum is "
        "not the sum of the squares: add up the gradients first.": ["all samples", "all samples, their parts"],
    }
    clipped = "the norm is right, but the gradient was scaled by another one: scale it by the norm of the whole sum."
    found = []
    for rank in range(case.ranks):
        mistakes = {"gradients were averaged; the gradient is their sum.": [run(rank, mean=True)], clipped: []}
        mistakes |= {
            "the weights were updated with the momentum as it was before this step.": (
                _named(run(rank, rule="before"), "norm")
            ),
            "`weights` are as they were: the new ones must be written into this tensor (copy_), not to a new one.": (
                {"weights, step 0": _states(case)[0]}
            ),
            "`momentum` is as it was: change this tensor in place, because the next step meets it again.": (
                {"momentum, step 0": torch.zeros(case.share, dtype=torch.float64)}
            ),
            "the gradient was not scaled: its norm may be `limit` at most.": _named(run(rank, limit=torch.inf), "norm"),
            "the gradient was scaled up to `limit`, although its norm is smaller already.": (
                _named(run(rank, rule="always"), "norm")
            ),
            "each number was limited; scaled is the whole gradient, by one factor, so that it keeps its direction.": (
                _named(run(rank, rule="each"), "norm")
            ),
            "the momentum was scaled with the gradient: limit the gradient alone, before it is added.": (
                _named(run(rank, rule="momentum"), "norm")
            ),
            "the weights went further than the momentum: that is Nesterov's way, and the plain one is asked for.": (
                _named(run(rank, rule="ahead"), "norm")
            ),
            "1e-6 was added to the norm, as PyTorch's `clip_grad_norm_` does. It changes the seventh digit: divide by "
            "the norm itself.": _named(run(rank, rule="1e-6"), "norm"),
            "this is the norm after scaling, and the one before is asked for.": (
                {name: value.clamp(max=case.limit) for name, value in run(rank).items() if "norm" in name}
            ),
            "this is the square of the norm: take the root.": (
                {name: value**2 for name, value in run(rank).items() if "norm" in name}
            ),
            "each rank took the root of its own part's squares, and these were added up: add up squares, then take the "
            "root.": {"norm, step 0": _states(case)[1][0].sum(0).view(case.ranks, -1).norm(dim=1).sum()},
        }
        for text, kinds in texts.items():
            wrong = [run(rank, normed=each) for each in kinds]
            mistakes[text] = [{name: value for name, value in each.items() if "norm" in name} for each in wrong]
            mistakes[clipped] += [{name: value for name, value in each.items() if "norm" not in name} for each in wrong]
        found.append(Expected.of(run(rank), mistakes))
    return found


def _named(values: dict[str, torch.Tensor], without: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if without not in name}


def judge_optimizer(case: Case, rank: int, notes: Notes):
    whole = 8 * case.ranks * case.share
    why = {
        "all_reduce": "a rank updates only its own part, so it needs no more than that part of the sum.",
        "all_gather": "what must be whole on every rank are the new weights, once.",
    }
    yield from sends_at_most(notes, 2 * 2 * whole * (1 - 1 / case.ranks), why)
    if case.ranks > 1:
        what = "No rank needs a state, or the optimizer's intermediate results, for more than its own part."
        yield from holds_at_most(notes, 3 * whole + 2.5 * 8 * case.share, what)
    if notes.counts[UPDATED]:
        yield (
            "it has updated all weights, by momentum of the others, so each update is computed once per rank. Update "
            "your own part, and gather the new weights."
        )


LABS = [
    WriteLab(
        **page(__file__, "write-03-b"),
        source="step03_zero/labs/sharded_optimizer.py",
        bodies=(1,),
        cases=(
            Case(ranks=1, share=12, limit=1000.0),
            Case(ranks=2, share=40, limit=2.0),
            Case(ranks=2, share=8, limit=1000.0),  # whether to clip is the same on all ranks
            Case(ranks=3, share=7, limit=1.0),
            Case(ranks=4, share=500, limit=5.0),
        ),
        run=optimize,
        expect=expect_update,
        judge=judge_optimizer,
    ),
]
