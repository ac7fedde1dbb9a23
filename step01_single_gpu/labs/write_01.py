"""Labs of step 1 in which the student writes a training step, and recomputation."""

from functools import partial

import torch

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import holds_at_most, works_at_most
from common.labs.seen import count, keep, unseen
from common.labs.write import Expected, WriteLab, page
from step01_single_gpu.labs.regions import ODD, oddities

# ---- write-01-a: micro-batches and recomputation by hand -------------------------------------------------------------


def _batch(case: Case) -> tuple[list[list[torch.Tensor]], torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(case.seed)
    while True:
        ups, downs = torch.randn(2, case.layers, case.width, case.hidden, generator=random, dtype=torch.float64) * 0.1
        layers = [[up.clone(), down.T.contiguous()] for up, down in zip(ups, downs)]
        x, target = torch.randn(2, case.samples, case.width, generator=random, dtype=torch.float64)
        if not isinstance(case, Narrow) or _same_signs(layers, x):
            return layers, x, target


def _same_signs(layers: list[list[torch.Tensor]], x: torch.Tensor) -> bool:
    """Whether bfloat16 has the same numbers behind relu as float64: a sign that flips changes a gradient by a lot."""
    y = x.bfloat16()
    for up, down in layers:
        before, narrow = x @ up, y @ up.bfloat16()
        near = 0.003 * before.std()  # another order of additions may flip these
        if (before.sign() != narrow.sign()).any() or torch.minimum(before.abs(), narrow.abs()).min() < near:
            return False
        x, y = x + before.relu() @ down, y + narrow.relu() @ down.bfloat16()
    return True


class Narrow(Case):
    """A case whose forward and backward are in bfloat16."""

    def __str__(self) -> str:
        return f"{super().__str__()}, in bfloat16"


class _Rate(float):
    """A learning rate that looks at the sums of gradients which it multiplies."""

    narrow = True  # whether all of them are numbers of bfloat16

    def __mul__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.narrow = self.narrow and gradient.equal(gradient.bfloat16().to(gradient.dtype))
        return float(self) * gradient


def _named(loss: torch.Tensor, layers: list, before: list) -> dict[str, torch.Tensor]:
    """The loss, and by how much each weight has changed."""
    names = {"loss": loss.detach()}
    for number, (now, old) in reversed(list(enumerate(zip(layers, before)))):
        changes = [(was - weight.detach().double()) for was, weight in zip(old, now)]
        names |= {f"update of down of layer {number}": changes[1], f"update of up of layer {number}": changes[0]}
    return names


def take_step(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    masters, samples, targets = _batch(case)
    before, dtype = [[weight.clone() for weight in layer] for layer in masters], torch.float64
    if isinstance(case, Narrow):
        masters, dtype = [[weight.float() for weight in layer] for layer in masters], torch.bfloat16
        samples, targets = samples.float(), targets.float()
    student.LEARNING_RATE = _Rate(0.2)
    keep(samples=samples, targets=targets)  # masters are what a step changes
    loss, most = student.train_step(masters, samples, targets, case.micro_batches, case.recompute, dtype)
    bits = torch.finfo(loss.dtype).bits if isinstance(loss, torch.Tensor) else 64
    loss = loss.double() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float64)
    values = {"bits of the loss": torch.tensor(min(bits, 32))} | _named(loss, masters, before)
    if isinstance(case, Narrow):
        values["bits of the sums"] = torch.tensor(16 if student.LEARNING_RATE.narrow else 32)
    return values | {"most activations": torch.tensor(float(most))}


def _rows(case: Case) -> int:
    """Samples of the largest micro-batch."""
    return -(-case.samples // case.micro_batches)


def _kept(case: Case) -> int:
    """The most numbers in inputs and hidden tensors of layers that are kept at once."""
    return _rows(case) * (case.layers * case.width + case.hidden * (1 if case.recompute else case.layers))


def expect_step(case: Case) -> list[Expected]:
    layers, x, target = _batch(case)
    chunks = list(zip(x.chunk(case.micro_batches), target.chunk(case.micro_batches)))

    def updated(
        skip: bool = False, masked: bool = True, share=lambda y: 1.0, parts=chunks, positive: bool = False
    ) -> dict[str, torch.Tensor]:
        """What a step changes, with the losses of these micro-batches times their `share`.

        Args:
            positive: behind the relu, what is negative of a gradient is set to 0.
        """
        now, total = [[weight.clone() for weight in layer] for layer in layers], 0.0
        flat = [weight.requires_grad_() for layer in now for weight in layer]
        for y, wanted in parts:
            for up, down in now:
                hidden = y @ up
                hidden = hidden.relu() if masked else hidden + (hidden.relu() - hidden).detach()
                if positive:
                    hidden.register_hook(torch.relu)
                y = (y.detach() if skip else y) + hidden @ down
            total = total + share(y) * (y - wanted).square().sum() / target.numel()
        gradients = torch.autograd.grad(total, flat)
        changed = [
            [weight.detach() - 0.2 * next(each) for weight in layer] for each in [iter(gradients)] for layer in now
        ]
        return _named(total.detach(), changed, layers)

    right = {"bits of the loss": torch.tensor(32)} | updated()
    right |= {"bits of the sums": torch.tensor(32)} if isinstance(case, Narrow) else {}
    right |= {"most activations": torch.tensor(float(_kept(case)))}
    weights = {name: value for name, value in right.items() if name.startswith("update")}
    own, last = updated(share=lambda y: target.numel() / y.numel()), updated(parts=chunks[-1:])
    equal = updated(share=lambda y: target.numel() / y.numel() / len(chunks))
    without_loss = {name: value for name, value in last.items() if name != "loss"}
    hidden = case.hidden * case.layers
    mistakes = {
        "every micro-batch's loss is a mean over its own samples; its share of the whole batch's mean is smaller.": own,
        "each micro-batch counts the same, but the last one is smaller, so its numbers count more than others': divide "
        "by the numbers of the whole batch.": [equal, {"loss": equal["loss"]}],
        "the error and the loss are as wide as the targets: squares and sums need more digits than `dtype` has.": {
            "bits of the loss": torch.tensor(16)
        },
        "gradients were added up in `dtype`, which loses what is small beside the sum: `sums` are wide, add to them.": {
            "bits of the sums": torch.tensor(16)
        },
        "only the last micro-batch has reached the weights: gradients are sums, so add to what is there.": (
            [last, without_loss]
        ),
        "only the last micro-batch's loss is there: its share must be added to those before.": {"loss": last["loss"]},
        "a layer's input reaches its output in two ways, and only one of them has brought a gradient back.": (
            updated(skip=True)
        ),
        "the relu's derivative is missing: where hidden is 0, its gradient is 0, too.": updated(masked=False),
        "the gradient was set to 0 where it is negative itself. The relu asks for the sign of its input: gradients of "
        "either sign pass where hidden is larger than 0, and none where it is 0.": [
            updated(masked=False, positive=True),
            updated(positive=True),
        ],
        "the square's derivative is 2 times the error, and the 2 is missing.": (
            {name: value / 2 for name, value in weights.items()}
        ),
        "nothing has reached the weights: is the gradient added to `sum_up` and `sum_down` themselves (+=)?": (
            {name: torch.zeros_like(value) for name, value in weights.items()}
        ),
        "all layers' hidden tensors are counted, although with `recompute` one at a time is there.": (
            {"most activations": torch.tensor(float(_rows(case) * (case.layers * case.width + hidden)))}
        ),
        "hidden tensors are computed again, although `recompute` is not set: then they are kept.": (
            {"most activations": torch.tensor(float(_rows(case) * (case.layers * case.width + case.hidden)))}
        ),
        "the hidden tensor that is computed again counts as well, while its layer needs it.": (
            {"most activations": torch.tensor(float(_rows(case) * case.layers * case.width))}
        ),
        "this counts the layers of all micro-batches: when one's backward is through, nothing of it is kept.": (
            {"most activations": torch.tensor(float(_kept(case) * case.samples / _rows(case)))}
        ),
    }
    rough = {name: 0.05 for name, value in right.items() if value.is_floating_point()}
    return [Expected.of(right, mistakes, rough if isinstance(case, Narrow) else {})]


def errors_of_types(case: Case) -> dict[str, str]:
    """What torch says where numbers of different types meet."""
    text = "forward and backward are as narrow as `dtype`: convert samples and the first gradient, too."
    return dict.fromkeys(("same dtype", "dtype mismatch"), text)


def judge_step(case: Case, rank: int, notes: Notes):
    product = case.samples * case.width * case.hidden * case.layers  # two in the forward, four in the backward
    what = "Where `recompute` is set, each layer's forward runs once more; otherwise `hidden` is kept, and none does."
    yield from works_at_most(notes, (8 if case.recompute else 6) * product, what)
    if isinstance(case, Narrow):
        return
    weights = 3 * 2 * case.layers * case.width * case.hidden  # copies, sums of gradients, and gradients in the making
    work = _rows(case) * (2.5 * case.hidden + 4 * case.width)
    what = "Keep what one micro-batch's backward needs, and of it no hidden tensors where `recompute` is set."
    yield from holds_at_most(notes, 8 * (weights + _kept(case) + work), what)


# ---- write-01-b: recomputation as an autograd function ---------------------------------------------------------------


def _layers(case: Case) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(case.seed)
    x, dy = torch.randn(2, case.samples, case.width, generator=random, dtype=torch.float64)
    gates = torch.randn(case.layers, case.width, generator=random, dtype=torch.float64)
    ups = torch.randn(case.layers, case.width, case.hidden, generator=random, dtype=torch.float64) * 0.2
    downs = torch.randn(case.layers, case.hidden, case.width, generator=random, dtype=torch.float64) * 0.2
    return x.requires_grad_(), dy, gates.requires_grad_(), ups.requires_grad_(), downs.requires_grad_()


def _pass(case: Case, around, beginning=lambda dy: dy) -> dict[str, torch.Tensor]:
    """Forward and backward of layers, each within `around`. A layer takes a number, hidden states, places and gates."""
    x, dy, gates, ups, downs = _layers(case)
    y, places = x, torch.arange(case.samples).flip(0)
    keep(inputs=x, gates=gates, places=places)
    for number in range(case.layers):

        def layer(scale, y, places, gate, number=number):
            count("forwards")
            return y + scale * gate * (torch.tanh(y[places] @ ups[number]).square() @ downs[number])

        y = around(layer)(0.5, y, places, gates[number])
    y.backward(beginning(dy))
    found = {"y": y.detach(), "dx": x.grad, "gradient of ups": ups.grad, "gradient of downs": downs.grad}
    return found | {"gradient of gates": gates.grad}


def recompute(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    found = _pass(case, lambda layer: partial(student.recompute, layer))
    if case.layers == 1:
        with unseen():
            odd = oddities(student.recompute)
        for each in odd:
            count(each)
    return found


def expect_recompute(case: Case) -> list[Expected]:
    right = _pass(case, lambda layer: layer)
    mistakes = {
        "weights that the function uses besides its inputs got nothing: `torch.autograd.grad` forgets what it is not "
        "asked for, and `torch.autograd.backward` does not.": {"gradient of ups": None, "gradient of downs": None},
        "the backward returns no gradient for the tensors among its inputs.": {"dx": None},
        "the inputs were not cut off from the graph that they came from, so the region's backward went on beyond it, "
        "and autograd once more: detach them.": {"dx": 2 * right["dx"]},
        "several tensors may be among the inputs, and each that requires a gradient gets its own.": {
            "gradient of gates": None
        },
        "the backward begins with the gradient that arrives, and not with ones.": (
            _pass(case, lambda layer: layer, torch.ones_like)
        ),
        "only the way around the layer has brought a gradient back, and none through it.": {"dx": _layers(case)[1]},
    }
    return [Expected.of(right, mistakes)]


def errors_of_recompute(case: Case) -> dict[str, str]:
    return {
        "only Tensors of floating point": "a tensor of whole numbers can require no gradient: ask `needs_input_grad`.",
        "does not require grad": "what the backward begins with has no graph: call the function, and all that you do "
        "with its output, within `torch.enable_grad()`.",
        "can only save variables": "some inputs are no tensors: `save_for_backward` takes tensors only.",
        "has no attribute 'detach'": "some inputs are no tensors: hand them to the function as they are.",
        "tensors used as indices": "the function got its arguments in another order than the forward: tensors and "
        "others may take turns, so keep what is no tensor with its place.",
        "gradient different than None": "gradients are in the order of the forward's arguments: the first one is "
        "`function`, and the first gradient None. So is that of each argument that is no tensor.",
        "incorrect number of gradients": "the backward returns a gradient for each argument of the forward, `function` "
        "included, and None for what is no tensor.",
        "backward through the graph a second time": "the graph of the second forward begins at inputs that are cut off "
        "from the first one: detach them. Go through it once, for all inputs together.",
    }


def judge_recompute(case: Case, rank: int, notes: Notes):
    kept = 8 * case.samples * (case.layers * 1.2 * case.width + 6 * case.hidden + 4 * case.width)
    what = "A region keeps its inputs, and nothing of what it computes from them, until its backward."
    yield from holds_at_most(notes, kept + 4 * 8 * case.layers * case.width * case.hidden, what)
    forwards = notes.counts["forwards"]
    if forwards < 2 * case.layers:
        yield "there is no second forward: where do the numbers between the weights come from in the backward?"
    elif forwards > 2 * case.layers:
        yield f"each region's forward runs {forwards / case.layers:g} times, and twice is enough."
    yield from (text for what, text in ODD.items() if notes.counts[what])


LABS = [
    WriteLab(
        **page(__file__, "write-01-a"),
        source="step01_single_gpu/sketch.py",
        bodies=(1, 2),
        cases=(
            Case(ranks=1, layers=2, width=8, hidden=24, samples=6, micro_batches=1, recompute=False),
            Case(ranks=1, layers=3, width=16, hidden=32, samples=13, micro_batches=3, recompute=False),
            Narrow(ranks=1, layers=2, width=16, hidden=32, samples=12, micro_batches=2, recompute=True),
            Case(ranks=1, layers=6, width=8, hidden=64, samples=512, micro_batches=2, recompute=True),
        ),
        run=take_step,
        expect=expect_step,
        judge=judge_step,
        errors=errors_of_types,
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
        errors=errors_of_recompute,
    ),
]
