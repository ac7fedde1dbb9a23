"""Labs of step 8 in which the student writes who belongs together, and over whom each gradient is summed."""

import contextlib
import io

import torch
import torch.distributed as dist
from torch import Tensor

from common.labs.ranks import Case
from common.labs.rules import sends_at_most
from common.labs.seen import Notes
from common.labs.write import Expected, WriteLab, page


def _place(case: Case, rank: int) -> dict[str, list[int]]:
    """The ranks along each dimension that a rank belongs to."""
    grid = torch.arange(case.ranks).view(case.dp, case.pp, case.tp)
    dp, pp, tp = (grid == rank).nonzero()[0].tolist()
    return {"dp": grid[:, pp, tp].tolist(), "pp": grid[dp, :, tp].tolist(), "tp": grid[dp, pp].tolist()}


def _train(student, case: Case, run) -> list[Tensor]:
    """One step of the student's training, with a function of ours for what a stage computes."""
    student.DEGREES = {case.ranks: (case.dp, case.pp, case.tp)}
    student.LAYERS, student.WIDTH, student.TOKENS, student.STEPS = case.pp, case.width, 8 * case.dp, 1
    student.LEARNING_RATE, student.run = 1.0, run
    with contextlib.redirect_stdout(io.StringIO()):
        return student.train(dist.get_rank(), case.ranks, torch.float64)[1]


# ---- write-08-a: groups ----------------------------------------------------------------------------------------------


def group(student, case: Case, rank: int) -> dict[str, Tensor]:
    found = {}

    def run(weights, gradients, samples, targets, pp, tp) -> Tensor:
        found["pp"], found["tp"] = (torch.tensor(dist.get_process_group_ranks(each)) for each in (pp, tp))
        return samples.new_zeros(())

    reduce = dist.all_reduce

    def listen(tensor, *args, **options):
        if options.get("group") is not None:
            found.setdefault("dp", torch.tensor(dist.get_process_group_ranks(options["group"])))  # its first sum
        return reduce(tensor, *args, **options)

    dist.all_reduce = listen
    try:
        _train(student, case, run)
    finally:
        dist.all_reduce = reduce
    return {f"ranks of {name}": found.get(name) for name in ("dp", "pp", "tp")}


def expect_groups(case: Case) -> list[Expected]:
    found = []
    for rank in range(case.ranks):
        place = {name: torch.tensor(ranks) for name, ranks in _place(case, rank).items()}
        right = {f"ranks of {name}": ranks for name, ranks in place.items()}
        grid = torch.arange(case.ranks).view(case.tp, case.pp, case.dp)
        tp, pp, dp = (grid == rank).nonzero()[0].tolist()
        turned = {"ranks of dp": grid[tp, pp], "ranks of pp": grid[tp, :, dp], "ranks of tp": grid[:, pp, dp]}
        mistakes = {"tp is to be the fastest dimension: its ranks are neighbors, because they send the most.": turned}
        for name in place:
            for other in {"dp", "pp", "tp"} - {name}:
                text = f"these are the ranks along {other}. Along {name}, the other two coordinates stay the same."
                mistakes[text] = {f"ranks of {name}": place[other]}
        mistakes["all ranks are in this group: it should have those along one dimension."] = dict.fromkeys(
            right, torch.arange(case.ranks)
        )
        found.append(Expected.of(right, mistakes))
    return found


# ---- write-08-b: sums ------------------------------------------------------------------------------------------------


def _gradients(case: Case, rank: int) -> list[Tensor]:
    """Of a rank's part of scale, w1 and w2, as its stage would compute them."""
    random = torch.Generator().manual_seed(100 * case.seed + rank)
    sizes = (1, case.width), (1, case.width, case.width // case.tp), (1, case.width // case.tp, case.width)
    return [torch.randn(*size, generator=random, dtype=torch.float64) for size in sizes]


def add_up(student, case: Case, rank: int) -> dict[str, Tensor]:
    before = []

    def run(weights, gradients, samples, targets, pp, tp) -> Tensor:
        before.extend(weight.clone() for weight in weights)
        for gradient, drawn in zip(gradients, _gradients(case, rank)):
            gradient += drawn
        return samples.new_zeros(())

    after = _train(student, case, run)
    return {name: old - new for name, old, new in zip(("dscale", "dw1", "dw2"), before, after)}


def expect_totals(case: Case) -> list[Expected]:
    drawn = [dict(zip(("dscale", "dw1", "dw2"), _gradients(case, rank))) for rank in range(case.ranks)]
    found = []
    for rank in range(case.ranks):
        place = _place(case, rank)
        both = [each for replica in place["dp"] for each in _place(case, replica)["tp"]]

        def total(over: list[int], *names: str) -> dict[str, Tensor]:
            return {name: sum(drawn[each][name] for each in over) for name in names}

        right = total(both, "dscale") | total(place["dp"], "dw1", "dw2")
        mistakes = {
            "this is the rank's own gradient; the ranks of dp saw other samples.": total(
                [rank], "dscale", "dw1", "dw2"
            ),
            "every rank of tp has the same scale, but saw other tokens: their gradients are summands.": (
                total(place["dp"], "dscale")
            ),
            "the ranks of tp hold different columns or rows of this weight: there is nothing to add up over tp.": (
                total(both, "dw1", "dw2")
            ),
            "summed over tp alone: the ranks of dp hold the same weight, and saw other samples.": (
                total(place["tp"], "dscale")
            ),
            "summed over pp: its ranks hold different layers.": total(place["pp"], "dscale", "dw1", "dw2"),
            "summed over all ranks: those of other stages hold other layers.": (
                total(list(range(case.ranks)), "dscale", "dw1", "dw2")
            ),
            "gradients were averaged; losses are shares of the global mean already, so they are summed.": {
                name: each / case.dp for name, each in right.items()
            },
        }
        found.append(Expected.of(right, mistakes))
    return found


def judge_totals(case: Case, rank: int, notes: Notes):
    scale, weights = 8 * case.width, 2 * 8 * case.width**2 // case.tp
    over = [(scale + weights, case.dp), (scale, case.tp), (8, case.ranks)]
    why = {"all_gather": "sums are all that is needed."}
    yield from sends_at_most(notes, sum(2 * bytes * (1 - 1 / ranks) for bytes, ranks in over), why)


CASES = (
    Case(ranks=2, dp=1, pp=2, tp=1, width=4),
    Case(ranks=6, dp=3, pp=1, tp=2, width=12),
    Case(ranks=4, dp=2, pp=2, tp=1, width=8),
    Case(ranks=8, dp=2, pp=2, tp=2, width=16),
)
LABS = [
    WriteLab(
        **page(__file__, "write-08-a"),
        source="step08_5d/sketch.py",
        bodies=(1,),
        cases=CASES,
        run=group,
        expect=expect_groups,
        judge=lambda case, rank, notes: (),
    ),
    WriteLab(
        **page(__file__, "write-08-b"),
        source="step08_5d/sketch.py",
        bodies=(2,),
        cases=CASES,
        run=add_up,
        expect=expect_totals,
        judge=judge_totals,
    ),
]
