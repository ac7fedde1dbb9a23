"""The lab of step 3 in which the student writes ZeRO-3: a training step on shards."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import holds_at_most, sends_at_most
from common.labs.seen import count, keep, lend, patiently
from common.labs.write import Expected, WriteLab, page

KEPT = "gathered while the last weight is there"
OTHERS_ROWS = (
    "a shard was updated with rows that are another's: those of rank r begin at r * len(shard), however many ranks."
)


def _drawn(case: Case) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(case.seed)
    weights = torch.randn(case.layers, case.width, case.width, generator=random, dtype=torch.float64)
    x, target = torch.randn(2, case.samples, case.width, generator=random, dtype=torch.float64)
    return weights * (2 / case.width) ** 0.5, x, target


def run(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    """Two steps: the second one meets what the first one has left."""
    weights, x, target = _drawn(case)
    student.LEARNING_RATE, student.LAYERS, student.WIDTH = 0.5, case.layers, case.width
    shards = [weight.chunk(case.ranks)[rank].clone() for weight in weights]
    x, target = x.chunk(case.ranks)[rank].clone(), target.chunk(case.ranks)[rank].clone()
    del weights
    lend(shards)
    keep(x=x, target=target)  # shards are what a step changes
    student.gather = _that_counts(student.gather, case.width)
    values = {}
    for step in range(2):
        values[f"loss, step {step}"] = student.train_step(shards, x, target, case.ranks)
        for layer in reversed(range(case.layers)):
            values[f"shard of layer {layer}, step {step}"] = shards[layer].clone()
    return values


def _that_counts(gather, width: int):
    """`gather`, which counts how often it is called while the weight that it returned before is still alive."""
    last: list[StorageWeakRef] = []

    def counting(shard: torch.Tensor) -> torch.Tensor:
        if not patiently(lambda: all(each.expired() for each in last)):  # a thread of gloo may hold it a bit longer
            count(KEPT)
        whole = gather(shard)
        if len(whole) == width:  # and not of samples
            last[:] = [StorageWeakRef(whole.untyped_storage())]
        return whole

    return counting


def _descend(case: Case, gradients) -> list[dict[str, torch.Tensor]]:
    """The values of every rank if each updates its shards by `gradients(layer, per rank) -> per rank`."""
    weights, x, target = _drawn(case)
    values = [{} for _ in range(case.ranks)]
    copies = [weights.clone() for _ in range(case.ranks)]  # what each rank's forward uses: the shards of all
    for step in range(2):
        whole = torch.cat([copies[r].chunk(case.ranks, 1)[r] for r in range(case.ranks)], 1).requires_grad_()
        parts = []
        for rank in range(case.ranks):
            y = x.chunk(case.ranks)[rank]
            for weight in whole:
                y = torch.relu(y @ weight)
            loss = (y - target.chunk(case.ranks)[rank]).square().sum() / target.numel()
            values[rank][f"loss, step {step}"] = loss.detach()
            parts.append(torch.autograd.grad(loss, whole)[0])
        for rank, gradient in enumerate(gradients(parts)):
            copies[rank] = whole.detach() - 0.5 * gradient
            for layer in reversed(range(case.layers)):
                values[rank][f"shard of layer {layer}, step {step}"] = copies[rank][layer].chunk(case.ranks)[rank]
    return values


def _one_step(
    case: Case,
    early: bool = False,
    behind: int | None = 1,
    turned: bool = False,
    first: str = "",
    of: int = 0,
    in_place: bool = False,
    rows_of: int = 0,
) -> list[dict[str, torch.Tensor]]:
    """The shards of every rank after a step of one process that makes a mistake.

    Args:
        early: each weight is updated before `dy` passes through it.
        behind: dy becomes 0 where activation `layer + behind` is; None: nowhere.
        turned: dy meets the weight as it is, and not transposed.
        of: a weight's gradient is made of activation `layer + of`.
        in_place: the target is subtracted from the last activation itself.
        rows_of: a shard is updated with the rows of the rank that comes so many later.
        first: "weights" or "both": the backward begins with the first layer, for its weight alone or with what it took.
    """
    weights, x, target = _drawn(case)
    activations = [x]
    for weight in weights:
        activations.append(torch.relu(activations[-1] @ weight))
    dy = 2 * (activations[-1] - target) / target.numel()
    activations[-1] = activations[-1] - target if in_place else activations[-1]
    for number in reversed(range(case.layers)):
        layer = case.layers - 1 - number if first else number
        taken = layer if first == "both" else number
        if behind is not None:
            dy = dy * (activations[taken + behind] > 0)
        old = weights[layer].clone()
        dweight = activations[taken + of].T @ dy
        weights[layer] -= 0.5 * dweight.roll(-rows_of * case.width // case.ranks, 0)
        dy = dy @ (old if turned else weights[layer].T if early else old.T)
    return _shards(case, weights)


def _shards(case: Case, weights: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    parts = [weight.chunk(case.ranks) for weight in weights]
    return [{f"shard of layer {n}, step 0": each[rank] for n, each in enumerate(parts)} for rank in range(case.ranks)]


def expect(case: Case) -> list[Expected]:
    right = _descend(case, lambda parts: [sum(parts)] * case.ranks)
    known = {
        "a rank's shard was updated with the gradient of its own samples alone: sum `dweight` over the ranks first.": (
            lambda parts: parts
        ),
        "gradients were averaged, but every rank's loss is a share of the global mean already: a sum is right.": (
            lambda parts: [sum(parts) / case.ranks] * case.ranks
        ),
        "each rank took the mean over its own numbers, and these means were added up: the loss is a mean over the "
        "numbers of all ranks.": lambda parts: [sum(parts) * case.ranks] * case.ranks,
        "the square's derivative is 2 times the error, and the 2 is missing.": (
            lambda parts: [sum(parts) / 2] * case.ranks
        ),
    }
    wrong = {text: _descend(case, gradients) for text, gradients in known.items()}
    wrong |= {
        "the weight of the layer above was updated before `dy` passed through it: `dy` needs the forward's weight.": (
            _one_step(case, early=True)
        ),
        "the relu's derivative is missing: where a layer's output is 0, its gradient is 0, too.": (
            _one_step(case, behind=None)
        ),
        "the gradient was set to 0 where the layer's input is 0: look at its output.": _one_step(case, behind=0),
        "a weight's gradient is made of the layer's input, and here it is made of the output.": _one_step(case, of=1),
        "where the output is 0 was looked up in the error. If `error` is made in place (`-=`), it is the last layer's "
        "output itself, which the backward still needs: make a new tensor.": _one_step(case, in_place=True),
        OTHERS_ROWS: [_one_step(case, rows_of=each) for each in range(1, case.ranks)],
        "dy passes back through a layer by its weight transposed (`weight.T`), and here the weight is as it is: it is "
        "square, so nothing else complains.": _one_step(case, turned=True),
        "the backward begins with the last layer: what passes back is the loss's gradient, and it meets the layers in "
        "reverse.": [_one_step(case, first=each) for each in ("weights", "both")],
        "the shard is as it was. `shard = shard - ...` makes a new tensor, and the list keeps the old one: change it "
        "in place (`shard -= ...`).": _shards(case, _drawn(case)[0]),
    }
    each = {text: [of] if of and isinstance(of[0], dict) else of for text, of in wrong.items()}
    of = [{text: [way[rank] for way in ways] for text, ways in each.items()} for rank in range(case.ranks)]
    return [Expected.of(right[rank], of[rank]) for rank in range(case.ranks)]


def errors(case: Case) -> dict[str, str]:
    """What torch says where a rank's rows meet a whole weight."""
    rows = case.width // case.ranks
    text = "a rank has some rows of a weight: gather it before you multiply by it."
    return {
        f"({case.samples // case.ranks}x{case.width} and {rows}x{case.width})": text,
        f"tensor a ({rows}) must match the size of tensor b ({case.width})": "`dweight` is whole, and a shard is this "
        "rank's rows: reduce-scatter it first.",
        f"tensor a ({rows}) must match the size of tensor b (": OTHERS_ROWS,
    }


def judge(case: Case, rank: int, notes: Notes):
    weight, share = 8 * case.width**2, 1 - 1 / case.ranks
    why = {
        "all_reduce": "each rank needs no more than its own rows of the sum, and a reduce-scatter sends half as much.",
        "all_gather": "a weight is needed whole once in the forward and once in the backward.",
    }
    faults = list(sends_at_most(notes, 2 * case.layers * 3 * weight * share, why))
    yield from faults
    gathers = notes.of("all_gather")
    if not faults and sum(call.sent for call in gathers) > 2 * case.layers * 2 * weight * share + 64:
        least = min(gathers, key=lambda call: call.bytes)
        yield (
            f"the all_gather of {least.bytes:,} bytes in line {least.line} is none of a weight. Samples stay where "
            "they are: each rank computes its own, and what travels besides weights are sums of gradients."
        )
    if notes.counts[KEPT]:
        yield (
            f"a layer's whole weight is still there when the next one is gathered, {notes.counts[KEPT]} times in two "
            "steps: a variable or a list still holds it. Let go of it (`del`) when its layer is done."
        )
    shards = (case.layers + 1) * weight / case.ranks  # one of them is in two versions while it changes
    kept = 8 * (case.layers + 4) * case.samples // case.ranks * case.width  # activations
    what = "Some gathered weights, or whole gradients, are kept longer than their layer."
    if case.ranks == 1:
        what = "Some weights or gradients are kept longer than their layer, or longer than the step before."
    elif sum(each.bytes for each in notes.largest if each.bytes >= weight) <= 2 * weight:
        what = (
            "It is no whole weight that is too many. Parts add up, too: a gradient's rows are done when its shard is."
        )
    # A gradient, and a weight that is gathered: its parts, and the whole
    yield from holds_at_most(notes, shards + kept + 3 * weight, what)


LABS = [
    WriteLab(
        **page(__file__, "write-03-a"),
        source="step03_zero/sketch.py",
        bodies=(1,),
        cases=(
            Case(ranks=1, layers=2, width=12, samples=6),
            Case(ranks=2, layers=3, width=48, samples=8),
            Case(ranks=3, layers=4, width=36, samples=9),
            Case(ranks=4, layers=5, width=64, samples=8),
        ),
        run=run,
        expect=expect,
        judge=judge,
        errors=errors,
    ),
]
