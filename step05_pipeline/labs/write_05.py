"""Labs of step 5 in which the student writes what a rank of a pipeline does, and in which order."""

import torch

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.seen import keep
from common.labs.write import Expected, WriteLab, page
from step05_pipeline.labs.rows import Row, Turned, drawn, look_at_messages, newest_taken, row
from step05_pipeline.schedules.actions import Schedule, looped
from step05_pipeline.schedules.simulator import Costs, simulate
from step05_pipeline.schedules.validator import check_schedule

EMPTY = "`x.grad` is empty: what was received must require a gradient before the forward, and no layer cuts the graph."

# ---- write-05-a: run a schedule --------------------------------------------------------------------------------------


def run_row(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    weights, samples, targets = drawn(case)
    student.MICRO_BATCHES = case.micro_batches
    mine = [weight.clone().requires_grad_() for weight in weights.chunk(case.ranks)[rank]]
    look_at_messages(case, rank)
    keep(samples=samples, targets=targets)
    for layer, weight in enumerate(mine):
        keep(**{f"weights[{layer}]": weight})
    loss, most = student.run(" ".join(row(case, rank)), mine, samples, targets)
    gradients = {f"gradient of my layer {layer}": mine[layer].grad for layer in reversed(range(case.layers))}
    return {"loss": loss, **gradients, "most micro-batches kept": torch.tensor(float(most))}


def expect_row(case: Case) -> list[Expected]:
    weights, samples, targets = drawn(case)
    weights.requires_grad_()

    def losses(relu=torch.relu, last=None, order=lambda y: y) -> list[torch.Tensor]:
        """Of each micro-batch; `last`: what the last layer has for a relu; `order`: in which outputs are compared."""
        y = samples
        for number, weight in enumerate(weights, 1):
            y = (last if last and number == len(weights) else relu)(y @ weight)
        return [part.square().sum() / targets.numel() for part in (order(y) - targets).chunk(case.micro_batches)]

    def exchanged(y: torch.Tensor) -> torch.Tensor:
        """The second micro-batch, then the first, then the others."""
        first, second, *others = y.chunk(case.micro_batches)
        return torch.cat((second, first, *others))

    each = losses()
    digit = [each[int(str(number)[0])] for number in range(case.micro_batches)]  # of a micro-batch's number
    last = torch.autograd.grad(each[-1], weights, retain_graph=True)[0]
    (gradients,) = torch.autograd.grad(sum(each), weights, retain_graph=True)
    linear, unmasked = sum(losses(lambda y: y)), sum(losses(lambda y: y + (y.relu() - y).detach()))
    (of_digit,) = torch.autograd.grad(sum(digit), weights, retain_graph=True)
    open_end = sum(losses(last=lambda y: y))
    no_relu, no_mask, no_last = (torch.autograd.grad(loss, weights)[0] for loss in (linear, unmasked, open_end))
    y, forward = samples, []  # what goes forward, sent home in the place of its gradient
    for each_rank in weights.chunk(case.ranks):
        for weight in each_rank:
            y = torch.relu(y @ weight)
        forward.append(y.square().sum() / 2)  # whose gradient by y is y
    sent_back = [torch.autograd.grad(each, weights, retain_graph=True)[0] for each in forward]
    newest = newest_taken(case)
    found = []
    for rank in range(case.ranks):

        def named(gradient: torch.Tensor, loss: torch.Tensor, rank=rank) -> dict[str, torch.Tensor]:
            mine = gradient.chunk(case.ranks)[rank]
            layers = {f"gradient of my layer {layer}": mine[layer] for layer in reversed(range(case.layers))}
            return {"loss": loss.detach() if rank == case.ranks - 1 else torch.zeros_like(loss)} | layers

        mistakes = {
            "only the last micro-batch has arrived: what each of them gives must be added up.": named(last, each[-1]),
            "each micro-batch's loss is a mean over itself; it is a share of the mean over the whole batch.": (
                named(case.micro_batches * gradients, case.micro_batches * sum(each))
            ),
            "numbers of micro-batches may have two digits: F10 is not F1.": named(of_digit, sum(digit)),
            "the square's derivative is 2 times the error; is the loss the mean of squares?": (
                named(gradients / 2, sum(each) / 2)
            ),
            "what came from the rank behind is no gradient, but what it received in the forward: send the gradient of "
            "x home (x.grad), and not x.": named(sent_back[rank], sum(each)) if rank < case.ranks - 1 else {},
            "a backward takes what was kept of its own micro-batch, and here it took the newest.": (
                named(torch.cat(newest), sum(each)) if newest else {}
            ),
            "this is the loss of the last micro-batch alone: add up their shares.": {
                "loss": named(last, each[-1])["loss"]
            },
            "nothing is ever taken away: after its backward, a micro-batch need not be kept.": {
                "most micro-batches kept": torch.tensor(float(case.micro_batches))
            },
            "a layer is relu(x @ weight), and here its relu is missing.": named(no_relu, linear),
            "the last layer has a relu, too: the loss compares relu(x @ weight) with the targets.": (
                named(no_last, open_end)
            ),
            "the first two micro-batches have changed places: messages arrive in the order in which they are sent.": {
                "loss": named(gradients, sum(losses(order=exchanged)))["loss"]
            }
            if case.micro_batches > 1
            else {},
            "the graph is cut between two layers: only what is sent to another rank is without one (detach).": {
                f"gradient of my layer {layer}": None for layer in range(case.layers - 1)
            },
            "the relu's derivative is missing in the backward: where a layer's output is 0, so is its gradient.": (
                named(no_mask, unmasked)
            ),
        }
        most = min(case.micro_batches - case.late, case.ranks - rank + case.ahead)
        most = case.micro_batches if isinstance(case, Turned) else most
        kept = {"most micro-batches kept": torch.tensor(float(most))}
        mistakes["the micro-batch of this F is kept, too: count it."] = {
            "most micro-batches kept": torch.tensor(float(most - 1))
        }
        found.append(Expected.of(named(gradients, sum(each)) | kept, mistakes))
    return found


def errors_of_row(case: Case) -> dict[str, str]:
    """What torch says of a graph that begins or ends in the wrong place."""
    return {
        "and the message of B": "what goes home is the gradient of what came (`x.grad`), of the same micro-batch.",
        "and the message of F": "what goes on is the output of my layers for this very micro-batch; numbers of "
        "micro-batches may have two digits.",
        "object has no attribute 'dtype'": "the first rank's x is a sample: nobody waits for its gradient.",
        "Expected parameter `tensor`": EMPTY,
        "waits in send": "a send that is waited for at once ends when the other rank receives, and that one may be "
        "sending to this one: begin it (isend), go on, and wait for all sends behind the loop.",
        "KeyError": "a micro-batch is kept from its F to its B, by its whole number: numbers of micro-batches may have "
        "two digits, and F10 is not F1.",
        "does not require grad": "a graph begins where something requires a gradient: what is kept must be the output "
        "with its graph, and only what is sent is without one (detach).",
        "NoneType": EMPTY,
        "can be implicitly created only for scalar": "a backward that begins in the middle needs the gradient of what "
        "was sent: receive it from the rank behind.",
    }


def judge_row(case: Case, rank: int, notes: Notes):
    others = sorted({call.op for call in notes.calls} - {"send", "receive"})
    if others:
        line = notes.of(*others)[0].line
        yield f"line {line} calls {others[0]}, which all ranks wait for: neighbors need nothing but messages."
    actions = row(case, rank)
    if rank == 0:
        actions = [each for each in actions if each[0] == "F"]
    if rank == case.ranks - 1:
        actions = [each for each in actions if each[0] == "B"]
    wanted = [rank + 1 if each[0] == "F" else rank - 1 for each in actions] if case.ranks > 1 else []
    sends = notes.of("send")
    for number, (call, peer, action) in enumerate(zip(sends, wanted, actions)):
        if call.peer != peer:
            yield (
                f"message {number} of this rank goes to rank {call.peer} (line {call.line}), but in the order of "
                f"`actions` it is that of {action}, to rank {peer}. Do the actions in the order of the list."
            )
            return
    if len(sends) != len(wanted):
        yield f"{len(sends)} messages are sent instead of {len(wanted)}."


# ---- write-05-b: make schedules --------------------------------------------------------------------------------------


class Plan(Case):
    """A case whose ranks are those of a schedule; one process checks it."""

    def __str__(self) -> str:
        return f"p {self.p}, m {self.m}"


def plan(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    values = {}
    for name in ("all_forward_all_backward", "one_forward_one_backward"):
        rows = tuple(tuple(actions) for actions in getattr(student, name)(case.p, case.m, 1))
        schedule = Schedule(name, looped(case.p, 1), case.m, rows)
        check_schedule(schedule)
        values |= _kept(name, [_most(actions) for actions in rows])
        values[f"{name}: time"] = torch.tensor(float(simulate(schedule, Costs(F=1.0, I=1.0, W=1.0)).makespan))
    return values


def _kept(name: str, numbers: list[int]) -> dict[str, torch.Tensor]:
    """The most unfinished micro-batches, by row of the schedule."""
    return {f"{name}, row {row}: micro-batches kept": torch.tensor(number) for row, number in enumerate(numbers)}


def _most(actions) -> int:
    kept, most = 0, 0
    for action in actions:
        kept += 1 if action.kind == "F" else -1
        most = max(most, kept)
    return most


def expect_plan(case: Case) -> list[Expected]:
    first, last = "all_forward_all_backward", "one_forward_one_backward"
    time = torch.tensor(3.0 * (case.m + case.p - 1))
    values = _kept(first, [case.m] * case.p) | {f"{first}: time": time}
    values |= _kept(last, [min(case.m, case.p - row) for row in range(case.p)]) | {f"{last}: time": time}
    mistakes = {
        "each forward waits for the backward before it: AFAB does all forwards first.": _kept(first, [1] * case.p),
        "this is the order of 1F1B: AFAB does all forwards before its first backward.": _kept(
            first, [min(case.m, case.p - row) for row in range(case.p)]
        ),
        "this is the order of AFAB: a backward can begin as soon as the first gradient arrives.": _kept(
            last, [case.m] * case.p
        ),
        "one micro-batch passes through all ranks before the next one begins.": {
            **_kept(last, [1] * case.p),
            f"{last}: time": torch.tensor(3.0 * case.m * case.p),
        },
        "every rank does as many forwards ahead as the first; later ranks get their first gradient sooner.": _kept(
            last, [min(case.m, case.p)] * case.p
        ),
        "too few forwards ahead: a rank could do one more while its first micro-batch is on its way to the last rank "
        "and back.": _kept(last, [max(1, min(case.m, case.p - row - 1)) for row in range(case.p)]),
        "count again: after `ahead` forwards comes one more before the first backward.": _kept(
            last, [min(case.m, case.p - row + 1) for row in range(case.p)]
        ),
    }
    return [Expected.of(values, mistakes)]


def errors_of_plan(case: Case) -> dict[str, str]:
    """What the validator says, and what it comes from."""
    return {
        "never does B": "after the pairs come the backwards of the micro-batches whose forwards went ahead.",
        "never does F": "each rank does the forward of every micro-batch.",
        "deadlock": "two ranks wait for each other: how many forwards must a rank have done when the next one does B0?",
        "placement": "a list of actions is asked for of each of the p ranks.",
        "twice": "each micro-batch has one forward and one backward on a rank.",
        "'Action' object is not iterable": "one list of actions is asked for, for each of the p ranks.",
        "'str' object has no attribute": 'an action is no text: write Action("F", 0) for the first forward.',
        "before": "a backward needs the forward of the same micro-batch.",
    }


LABS = [
    WriteLab(
        **page(__file__, "write-05-a"),
        source="step05_pipeline/sketch.py",
        bodies=(1,),
        cases=(
            Row(ranks=1, layers=3, width=6, micro_batches=2, ahead=0, late=0, ragged=0),
            Row(ranks=2, layers=2, width=8, micro_batches=5, ahead=0, late=0, ragged=0),
            Row(ranks=3, layers=1, width=5, micro_batches=12, ahead=0, late=0, ragged=1),
            Row(ranks=4, layers=1, width=12, micro_batches=6, ahead=1, late=1, ragged=0),
            Turned(ranks=2, layers=1, width=6, micro_batches=3, ahead=0, late=0, ragged=1),
        ),
        run=run_row,
        expect=expect_row,
        judge=judge_row,
        errors=errors_of_row,
    ),
    WriteLab(
        **page(__file__, "write-05-b"),
        source="step05_pipeline/schedules/whole_backward.py",
        bodies=(1, 2),
        only=("all_forward_all_backward", "one_forward_one_backward"),
        cases=(Plan(ranks=1, p=3, m=5), Plan(ranks=1, p=4, m=8), Plan(ranks=1, p=6, m=2)),
        run=plan,
        expect=expect_plan,
        judge=lambda case, rank, notes: (),
        errors=errors_of_plan,
    ),
]
