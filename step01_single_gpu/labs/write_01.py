"""Labs of step 1 in which the student writes a training step, and recomputation."""

from functools import partial

import torch

from common.labs.ranks import Case
from common.labs.rules import holds_at_most
from common.labs.seen import Notes
from common.labs.write import Expected, WriteLab, page

# ---- write-01-a: micro-batches and recomputation by hand -------------------------------------------------------------


def _batch(case: Case) -> tuple[list[list[torch.Tensor]], torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(case.seed)
    ups, downs = torch.randn(2, case.layers, case.width, case.hidden, generator=random, dtype=torch.float64) * 0.1
    layers = [[up.clone(), down.T.contiguous()] for up, down in zip(ups, downs)]
    return layers, *torch.randn(2, case.samples, case.width, generator=random, dtype=torch.float64)


def _named(loss: torch.Tensor, layers: list) -> dict[str, torch.Tensor]:
    names = {"loss": loss.detach()}
    for number, (up, down) in reversed(list(enumerate(layers))):
        names |= {f"down of layer {number}": down.detach(), f"up of layer {number}": up.detach()}
    return names


def take_step(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    masters, samples, targets = _batch(case)
    student.LEARNING_RATE = 0.2
    loss, most = student.train_step(masters, samples, targets, case.micro_batches, case.recompute, torch.float64)
    return _named(loss, masters) | {"most activations": torch.tensor(float(most))}


def _kept(case: Case) -> int:
    """The most numbers in inputs and hidden tensors of layers that are kept at once."""
    rows = case.samples // case.micro_batches
    return rows * (case.layers * case.width + case.hidden * (1 if case.recompute else case.layers))


def expect_step(case: Case) -> list[Expected]:
    def updated(times: float = 1.0, last_only: bool = False, skip: bool = False) -> dict[str, torch.Tensor]:
        layers, x, target = _batch(case)
        flat = [weight.requires_grad_() for layer in layers for weight in layer]
        rows = slice(-case.samples // case.micro_batches, None) if last_only else slice(None)
        y = x[rows]
        for up, down in layers:
            y = (y.detach() if skip else y) + torch.relu(y @ up) @ down
        loss = (y - target[rows]).square().sum() / target.numel()
        for weight, gradient in zip(flat, torch.autograd.grad(loss, flat)):
            weight.data -= 0.2 * times * gradient
        return _named(loss * times, layers)

    right = updated() | {"most activations": torch.tensor(float(_kept(case)))}
    mistakes = {
        "every micro-batch's loss is a mean over its own samples; its share of the whole batch's mean is smaller.": (
            updated(case.micro_batches)
        ),
        "only the last micro-batch has reached the weights: gradients are sums, so add to what is there.": (
            updated(last_only=True)
        ),
        "a layer's input reaches its output in two ways, and only one of them has brought a gradient back.": (
            updated(skip=True)
        ),
    }
    return [Expected.of(right, mistakes)]


def judge_step(case: Case, rank: int, notes: Notes):
    weights = 3 * 2 * case.layers * case.width * case.hidden  # copies, sums of gradients, and gradients in the making
    rows = case.samples // case.micro_batches
    what = "Keep what one micro-batch's backward needs, and of it no hidden tensors where `recompute` is set."
    yield from holds_at_most(notes, 8 * (weights + _kept(case) + rows * (4 * case.hidden + 6 * case.width)), what)


# ---- write-01-b: recomputation as an autograd function ---------------------------------------------------------------


def _layers(case: Case) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(case.seed)
    x, dy = torch.randn(2, case.samples, case.width, generator=random, dtype=torch.float64)
    ups = torch.randn(case.layers, case.width, case.hidden, generator=random, dtype=torch.float64) * 0.2
    downs = torch.randn(case.layers, case.hidden, case.width, generator=random, dtype=torch.float64) * 0.2
    return x.requires_grad_(), dy, ups.requires_grad_(), downs.requires_grad_()


def _pass(case: Case, around) -> dict[str, torch.Tensor]:
    """Forward and backward of layers, each within `around`."""
    x, dy, ups, downs = _layers(case)
    y = x
    for number in range(case.layers):

        def layer(scale, y, number=number):
            return y + scale * (torch.tanh(y @ ups[number]).square() @ downs[number])

        y = around(layer)(0.5, y)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "gradient of ups": ups.grad, "gradient of downs": downs.grad}


def recompute(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    return _pass(case, lambda layer: partial(student.recompute, layer))


def expect_recompute(case: Case) -> list[Expected]:
    return [Expected(_pass(case, lambda layer: layer))]


def judge_recompute(case: Case, rank: int, notes: Notes):
    kept = 8 * case.samples * (case.layers * 2 * case.width + 8 * case.hidden)
    what = "A region keeps its inputs, and nothing of what it computes from them, until its backward."
    yield from holds_at_most(notes, kept + 4 * 8 * case.layers * case.width * case.hidden, what)
    if notes.products < 8 * case.layers:
        yield "there is no second forward: where do the numbers between the weights come from in the backward?"


LABS = [
    WriteLab(
        **page(__file__, "write-01-a"),
        source="step01_single_gpu/sketch.py",
        bodies=(1, 2),
        cases=(
            Case(ranks=1, layers=2, width=8, hidden=24, samples=6, micro_batches=1, recompute=False),
            Case(ranks=1, layers=3, width=16, hidden=32, samples=12, micro_batches=3, recompute=False),
            Case(ranks=1, layers=6, width=8, hidden=64, samples=512, micro_batches=2, recompute=True),
        ),
        run=take_step,
        expect=expect_step,
        judge=judge_step,
    ),
    WriteLab(
        **page(__file__, "write-01-b"),
        source="step01_single_gpu/recompute.py",
        bodies=(1, 2),
        only=("_Recompute", "recompute"),
        cases=(
            Case(ranks=1, layers=1, width=8, hidden=24, samples=6),
            Case(ranks=1, layers=3, width=12, hidden=32, samples=10),
            Case(ranks=1, layers=8, width=8, hidden=64, samples=512),
        ),
        run=recompute,
        expect=expect_recompute,
        judge=judge_recompute,
    ),
]
