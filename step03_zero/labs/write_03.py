"""Labs of step 3 in which the student writes ZeRO."""

import torch

from common.labs.ranks import Case
from common.labs.seen import Notes
from common.labs.write import Expected, WriteLab, page

# ---- ZeRO-3: a training step on shards -------------------------------------------------------------------------------


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
    values = {}
    for step in range(2):
        values[f"loss, step {step}"] = student.train_step(shards, x, target, case.ranks)
        for layer in reversed(range(case.layers)):
            values[f"shard of layer {layer}, step {step}"] = shards[layer].clone()
    return values


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


def expect(case: Case) -> list[Expected]:
    right = _descend(case, lambda parts: [sum(parts)] * case.ranks)
    known = {
        "a rank's shard was updated with the gradient of its own samples alone: sum `dweight` over the ranks first.": (
            lambda parts: parts
        ),
        "gradients were averaged, but every rank's loss is a share of the global mean already: a sum is right.": (
            lambda parts: [sum(parts) / case.ranks] * case.ranks
        ),
    }
    wrong = {text: _descend(case, gradients) for text, gradients in known.items()}
    return [Expected.of(right[rank], {text: each[rank] for text, each in wrong.items()}) for rank in range(case.ranks)]


def judge(case: Case, rank: int, notes: Notes):
    if case.ranks == 1:
        return
    weight, steps = 8 * case.width**2, 2
    for call in notes.of("all_reduce", least=weight // case.ranks):
        yield (
            f"line {call.line} all-reduces {call.bytes:,} bytes. Each rank needs no more than its own rows of the sum, "
            "and a reduce-scatter sends half as much."
        )
        return
    for call in notes.of("all_gather", least=weight + 1):
        yield f"line {call.line} gathers {call.bytes:,} bytes at once, more than one layer ({weight:,})."
        return
    if notes.sent("all_gather") > 2 * steps * case.layers * weight * (1 - 1 / case.ranks):
        yield "every weight is gathered more than twice a step: once in the forward, once in the backward is enough."
    kept = 8 * (case.layers + 4) * case.samples // case.ranks * case.width  # activations
    if notes.peak > kept + 3.5 * weight:
        yield (
            f"up to {notes.peak:,} bytes live at once. Activations and one layer at work need {kept + 3 * weight:,}: "
            "some gathered weights, or whole gradients, are kept longer than their layer."
        )


LABS = [
    WriteLab(
        **page(__file__, "write-03-a"),
        source="step03_zero/sketch.py",
        bodies=(1,),
        cases=(
            Case(ranks=1, layers=2, width=12, samples=6),
            Case(ranks=2, layers=3, width=48, samples=8),
            Case(ranks=4, layers=5, width=64, samples=8),
        ),
        run=run,
        expect=expect,
        judge=judge,
    )
]
