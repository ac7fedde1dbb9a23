"""Labs of step 8 in which the student writes who belongs together, and over whom each gradient is summed."""

import contextlib
import io
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import sends_at_most
from common.labs.write import Expected, WriteLab, page

NAMES = "dp", "pp", "cp", "tp", "ep", "dp_cp", "edp"  # of the groups, as the sketch lists them


def _place(case: Case, rank: int) -> dict[str, list[int]]:
    """The ranks of each group that a rank belongs to."""
    grid = torch.arange(case.ranks).view(case.dp, case.pp, case.cp, case.tp)
    dp, pp, cp, tp = (grid == rank).nonzero()[0].tolist()
    dealt = grid[:, pp].reshape(-1, case.ep)
    row, column = (dealt == rank).nonzero()[0].tolist()
    along = grid[:, pp, cp, tp], grid[dp, :, cp, tp], grid[dp, pp, :, tp], grid[dp, pp, cp]
    rest = dealt[row], grid[:, pp, :, tp].flatten(), dealt[:, column]
    return {name: ranks.tolist() for name, ranks in zip(NAMES, (*along, *rest))}


def _degrees(case: Case) -> tuple[int, ...]:
    return case.dp, case.pp, case.cp, case.tp, case.ep


# ---- write-08-a: groups ----------------------------------------------------------------------------------------------


def group(student, case: Case, rank: int) -> dict[str, Tensor]:
    groups = student.make_groups(*_degrees(case))
    if len(groups) != len(NAMES):
        raise ValueError(f"`make_groups` has returned {len(groups)} groups instead of {len(NAMES)}")
    ranks = [dist.get_process_group_ranks(each) if each else [] for each in groups]  # [] where no row names this rank
    return {f"ranks of {name}": torch.tensor(each, dtype=torch.int64) for name, each in zip(NAMES, ranks)}


def expect_groups(case: Case) -> list[Expected]:
    found = []
    for rank in range(case.ranks):
        place = {f"ranks of {name}": torch.tensor(ranks) for name, ranks in _place(case, rank).items()}
        grid = torch.arange(case.ranks).view(case.tp, case.cp, case.pp, case.dp)
        tp, cp, pp, dp = (grid == rank).nonzero()[0].tolist()
        turned = {"ranks of dp": grid[tp, cp, pp], "ranks of pp": grid[tp, cp, :, dp]}
        turned |= {"ranks of cp": grid[tp, :, pp, dp], "ranks of tp": grid[:, cp, pp, dp]}
        mistakes = {"tp is to be the fastest dimension: its ranks are neighbors, because they send the most.": turned}
        for name in NAMES[:4]:
            for other in set(NAMES[:4]) - {name}:
                text = f"these are the ranks along {other}. Along {name}, the other three coordinates stay the same."
                mistakes[text] = {f"ranks of {name}": place[f"ranks of {other}"]}
        grid = torch.arange(case.ranks).view(case.dp, case.cp, case.pp, case.tp)
        dp, cp, pp, tp = (grid == rank).nonzero()[0].tolist()
        mistakes["tp is the fastest dimension, then cp, then pp: here pp and cp have changed places."] = {
            "ranks of pp": grid[dp, cp, :, tp],
            "ranks of cp": grid[dp, :, pp, tp],
            "ranks of dp": grid[:, cp, pp, tp],
        }
        stage = torch.arange(case.ranks).view(case.dp, case.pp, -1)[:, _stage(case, rank)].reshape(-1)
        strided = stage.view(case.ep, -1)
        mistakes["ep deals the ranks of a stage in ascending order: a row of it is neighbors of this list."] = {
            "ranks of ep": strided[:, (strided == rank).nonzero()[0, 1]]
        }
        mistakes["edp joins the ranks that hold the same experts, a column of what ep has dealt; here it is dp."] = {
            "ranks of edp": place["ranks of dp"]
        }
        mistakes["dp_cp and edp have changed places: the order is dp, pp, cp, tp, ep, dp_cp, edp."] = {
            "ranks of dp_cp": place["ranks of edp"],
            "ranks of edp": place["ranks of dp_cp"],
        }
        mistakes["ep deals the ranks of one stage anew, and a row of it has no ranks of other stages."] = {
            "ranks of ep": _row(case, rank, case.ep)
        }
        mistakes[
            "ranks of a row of ep hold different experts; edp joins the ranks of a column, with the same ones."
        ] = {"ranks of edp": place["ranks of ep"]}
        mistakes["the ranks of cp hold the same weights, too, and saw other tokens: dp_cp joins both."] = {
            "ranks of dp_cp": place["ranks of dp"]
        }
        grid = torch.arange(case.ranks).view(_degrees(case)[:4])
        as_they_lie = [grid.permute(order).reshape(-1, case.dp * case.cp) for order in permutations(range(4))]
        mistakes["bring dp and cp next to each other, behind pp and tp (permute), before you reshape to rows."] = [
            {"ranks of dp_cp": rows[(rows == rank).nonzero()[0, 0]].sort().values} for rows in as_they_lie
        ]
        for name, degree in zip(NAMES[:3], _degrees(case)):
            mistakes[f"a reshape alone cuts rows along tp: bring the axis of {name} to the end first (movedim)."] = {
                f"ranks of {name}": _row(case, rank, degree)
            }
        if case.tp != case.dp * case.cp:
            mistakes["the last axis is still that of tp: bring dp and cp to the end before you join them."] = {
                "ranks of dp_cp": place["ranks of tp"]
            }
        mistakes["these are the first and the last rank alone; those between them belong to the group, too."] = [
            {f"ranks of {name}": place[f"ranks of {name}"][[0, -1]]} for name in NAMES
        ]
        mistakes["no row has this rank: all rows together are all ranks, each once."] = dict.fromkeys(
            place, torch.empty(0, dtype=torch.int64)
        )
        mistakes["the ranks of tp hold other parts of the weights: dp_cp joins dp and cp alone."] = {
            "ranks of dp_cp": stage
        }
        mistakes["the ranks of dp hold the same weights, too, and saw other sequences: dp_cp joins both."] = {
            "ranks of dp_cp": place["ranks of cp"]
        }
        dealt = torch.arange(case.ranks).view(case.dp, case.pp, -1).movedim(1, 0).reshape(-1, case.ep)
        mistakes["edp joins ranks of one stage: the experts of other stages are those of other layers."] = {
            "ranks of edp": dealt[:, (dealt == rank).nonzero()[0, 1]]
        }
        everybody = torch.arange(case.ranks)
        mistakes["edp joins ranks of its own stage that hold the same experts, and here other stages are in it."] = {
            "ranks of edp": everybody.view(-1, case.ep)[:, rank % case.ep]
        }
        mistakes["all ranks are in this group: edp joins those of a rank's own stage that hold the same experts."] = {
            "ranks of edp": everybody
        }
        mistakes["all ranks are in this group: ep joins some of a rank's own stage, which share out the experts."] = {
            "ranks of ep": everybody
        }
        mistakes["all ranks are in this group: dp_cp joins those whose coordinates along pp and tp are the same."] = {
            "ranks of dp_cp": everybody
        }
        mistakes["all ranks are in this group: it should have those along one dimension."] = {
            f"ranks of {name}": everybody for name in NAMES[:4]
        }
        found.append(Expected.of(place, mistakes))
    return found


def _row(case: Case, rank: int, length: int) -> Tensor:
    """The row with this rank, of all ranks cut into rows as they lie."""
    return torch.arange(case.ranks).view(-1, length)[rank // length]


def _stage(case: Case, rank: int) -> int:
    return rank // (case.cp * case.tp) % case.pp


def errors_of_groups(case: Case) -> dict[str, str]:
    sizes = "the sizes of the grid are dp, pp, cp and tp, and their product is the number of ranks."
    return {
        "groups instead of": "seven groups are asked for: dp, pp, cp, tp, ep, dp_cp and edp.",
        "not enough values to unpack": "seven groups are asked for: dp, pp, cp, tp, ep, dp_cp and edp.",
        "is invalid for input": sizes,
        "'list' object has no attribute": "`rows` is a list of tensors: the last line makes lists of their last axis.",
        "it does not end": "to make groups, ranks wait for each other, so all must name the same ones: each rank has "
        "to name the rows of all ranks, and not only its own.",
        "multiple subgroups": "each rank is in one row only: all rows together are all ranks, each once.",
    }


# ---- write-08-b: sums ------------------------------------------------------------------------------------------------

GRADIENTS = "dqkv", "dout", "drouter", "dup", "ddown"


def _gradients(case: Case, rank: int) -> list[Tensor]:
    """Of a rank's part of all weights, as its stage would compute them."""
    random = torch.Generator().manual_seed(100 * case.seed + rank)
    heads, experts, width = 4 // case.tp, 8 // case.ep, case.width
    sizes = (3, heads, width, 4), (heads, 4, width), (width, 8), (experts, width, width), (experts, width, width)
    return [torch.randn(1, *size, generator=random, dtype=torch.float64) for size in sizes]


def add_up(student, case: Case, rank: int) -> dict[str, Tensor]:
    """What one step of the student's training changes, with a function of ours for what a stage computes."""
    before = []

    def run(weights, samples, targets, pp, cp, tp, ep) -> Tensor:
        before.extend(weight.detach().clone() for weight in weights)
        for weight, drawn in zip(weights, _gradients(case, rank)):
            weight.grad = drawn
        return samples.new_zeros(())

    student.DEGREES = {case.ranks: _degrees(case)}
    student.LAYERS, student.WIDTH, student.HEADS, student.HEAD, student.EXPERTS = case.pp, case.width, 4, 4, 8
    student.SEQUENCES, student.TOKENS, student.STEPS, student.LEARNING_RATE = case.dp, 8, 1, 1.0
    student.run = run
    with contextlib.redirect_stdout(io.StringIO()):
        after = student.train(rank, case.ranks, torch.float64)[1]
    return {name: old - new.detach() for name, old, new in zip(GRADIENTS, before, after)}


def expect_totals(case: Case) -> list[Expected]:
    drawn = [dict(zip(GRADIENTS, _gradients(case, rank))) for rank in range(case.ranks)]
    found = []
    for rank in range(case.ranks):
        place = _place(case, rank)
        both = [each for other in place["dp_cp"] for each in _place(case, other)["tp"]]

        def total(over: list[int], *names: str) -> dict[str, Tensor]:
            return {name: sum(drawn[each][name] for each in over) for name in names}

        cut, experts = ("dqkv", "dout"), ("dup", "ddown")
        right = total(place["dp_cp"], *cut) | total(both, "drouter") | total(place["edp"], *experts)
        mistakes = {
            "this is the rank's own gradient; other ranks hold the same weight, and saw other tokens.": total(
                [rank], *GRADIENTS
            ),
            "the ranks of cp hold the same weights, too, and saw other tokens of the same sequences.": (
                total(place["dp"], *cut)
            ),
            "every rank of tp has the same router, but saw other tokens: their gradients are summands.": (
                total(place["dp_cp"], "drouter")
            ),
            "the ranks of tp hold different heads: there is nothing to add up over tp.": total(both, *cut),
            "the ranks of ep hold different experts: there is nothing to add up over ep.": total(place["ep"], *experts),
            "an expert saw the tokens of all ranks of its row of ep; its copies are on the ranks of edp.": (
                total(place["dp_cp"], *experts)
            ),
            "summed over tp alone: the ranks of dp_cp hold the same router, and saw other tokens.": (
                total(place["tp"], "drouter")
            ),
            "summed over pp: its ranks hold different layers.": total(place["pp"], *GRADIENTS),
            "summed over all ranks, of which many hold other weights: ask of each weight who has the same one.": (
                total(list(range(case.ranks)), *GRADIENTS)
            ),
            "the ranks of dp alone: copies of an expert are on all ranks of edp.": total(place["dp"], *experts),
            "every rank of tp has the whole sum of the others already: this was summed over tp twice.": {
                "drouter": case.tp * sum(drawn[each]["drouter"] for each in both)
            },
            "gradients were averaged; losses are shares of the global mean already, so they are summed.": {
                name: each / len(place["edp" if name in experts else "dp_cp"]) for name, each in right.items()
            },
        }
        found.append(Expected.of(right, mistakes))
    return found


def judge_totals(case: Case, rank: int, notes: Notes):
    """Bytes of each sum, and its ranks. The last one is that of the loss, on all ranks."""
    sizes = [8 * each.numel() for each in _gradients(case, rank)]
    over = [(sum(sizes[:3]), case.dp * case.cp), (sizes[2], case.tp), (8, case.ranks)]
    over.append((sum(sizes[3:]), case.dp * case.cp * case.tp // case.ep))
    why = {"all_gather": "sums are all that is needed."}
    yield from sends_at_most(notes, sum(2 * bytes * (1 - 1 / ranks) for bytes, ranks in over), why)


GRIDS = (  # each degree is 1, 2 and 3 somewhere; where two are, those first that tell most mistakes apart
    Case(ranks=6, dp=3, pp=1, cp=1, tp=2, ep=2),
    Case(ranks=4, dp=2, pp=2, cp=1, tp=1, ep=2),
    Case(ranks=8, dp=1, pp=2, cp=2, tp=2, ep=2),
    Case(ranks=6, dp=2, pp=1, cp=3, tp=1, ep=6),
    Case(ranks=6, dp=1, pp=3, cp=2, tp=1, ep=1),
    Case(ranks=6, dp=1, pp=2, cp=1, tp=3, ep=3),
    Case(ranks=8, dp=2, pp=1, cp=2, tp=2, ep=4),
    Case(ranks=2, dp=1, pp=2, cp=1, tp=1, ep=1),
)
SUMS = (
    Case(ranks=2, dp=1, pp=2, cp=1, tp=1, ep=1, width=4),
    Case(ranks=6, dp=3, pp=1, cp=1, tp=2, ep=2, width=12),
    Case(ranks=4, dp=2, pp=2, cp=1, tp=1, ep=2, width=8),
    Case(ranks=8, dp=2, pp=1, cp=2, tp=2, ep=4, width=8),
    Case(ranks=8, dp=1, pp=2, cp=2, tp=2, ep=2, width=16),
)
LABS = [
    WriteLab(
        **page(__file__, "write-08-a"),
        source="step08_5d/sketch.py",
        bodies=(1,),
        hidden={"train": "write-08-b"},
        cases=GRIDS,
        run=group,
        expect=expect_groups,
        judge=lambda case, rank, notes: (),
        errors=errors_of_groups,
    ),
    WriteLab(
        **page(__file__, "write-08-b"),
        source="step08_5d/sketch.py",
        bodies=(2,),
        hidden={"make_groups": "write-08-a"},
        cases=SUMS,
        run=add_up,
        expect=expect_totals,
        judge=judge_totals,
    ),
]
