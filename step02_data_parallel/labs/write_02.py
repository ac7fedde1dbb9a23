"""Labs of step 2 in which the student writes buckets that travel during the backward, and an all-reduce."""

import torch

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import hides, multiplies_at_most, sends_at_most, works_at_least, works_at_most
from common.labs.seen import keep
from common.labs.write import Expected, WriteLab, page

# ---- write-02-a: buckets ---------------------------------------------------------------------------------------------


def _drawn(case: Case) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(case.seed)
    weights = torch.randn(case.layers, case.width, case.width, generator=random, dtype=torch.float64)
    return weights * (2 / case.width) ** 0.5, *torch.randn(
        2, case.samples, case.width, generator=random, dtype=torch.float64
    )


def send_buckets(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    weights, x, target = _drawn(case)
    student.LAYERS, student.WIDTH, student.BUCKET = case.layers, case.width, case.bucket
    activations = student.forward(weights, x.chunk(case.ranks)[rank])
    dy = 2 * (activations[-1] - target.chunk(case.ranks)[rank]) / target.numel()
    keep(weights=weights, x=activations[0], dy=dy)
    gradients = student.backward(weights, activations, dy)
    return {f"gradient of layer {layer}": gradients[layer] for layer in reversed(range(case.layers))}


def expect_buckets(case: Case) -> list[Expected]:
    weights, x, target = _drawn(case)
    weights.requires_grad_()
    own = []  # every rank's gradients of its own samples
    for mine, wanted in zip(x.chunk(case.ranks), target.chunk(case.ranks)):
        y = mine
        for weight in weights:
            y = torch.relu(y @ weight)
        (gradient,) = torch.autograd.grad((y - wanted).square().sum() / target.numel(), weights)
        own.append({f"gradient of layer {layer}": gradient[layer] for layer in reversed(range(case.layers))})
    total = {name: sum(each[name] for each in own) for name in own[0]}
    mean = {name: value / case.ranks for name, value in total.items()}
    local = "this is the gradient of the rank's own samples. Was the bucket sent when it was full, and waited "
    local += "for? And is it a part of `gradients`, and no copy?"
    mean_text = "gradients were averaged, but each rank's loss is a share of the global mean already: a sum is right."
    known = {
        mean_text: mean,
        "the relu's derivative is missing: where a layer's output is 0, its gradient is 0, too.": _chain(case),
        "a layer's y is x @ weight, so the gradient of x is dy times the transposed weight: the .T is missing.": _chain(
            case, behind=1, way=lambda weight: weight
        ),
        "the gradient was set to 0 where the layer's input is 0: look at its output.": _chain(case, behind=0),
    }
    return [Expected.of(total, {local: mine} | known) for mine in own]


def _chain(case: Case, behind: int | None = None, way=lambda weight: weight.T) -> dict[str, torch.Tensor]:
    """Gradients by the chain rule, where dy becomes 0 if activation `layer + behind` is, or nowhere.

    Args:
        way: of a weight, by which dy goes through its layer.
    """
    weights, x, target = _drawn(case)
    activations, found = [x], {}
    for weight in weights:
        activations.append(torch.relu(activations[-1] @ weight))
    dy = 2 * (activations[-1] - target) / target.numel()
    for layer in reversed(range(case.layers)):
        if behind is not None:
            dy = dy * (activations[layer + behind] > 0)
        found[f"gradient of layer {layer}"] = activations[layer].T @ dy
        dy = dy @ way(weights[layer])
    return found


WHY_BUCKETS = {
    "all_gather": "a sum is all that is needed.",
    "all_reduce": "every gradient is summed once.",
}


def judge_buckets(case: Case, rank: int, notes: Notes):
    if case.ranks == 1:
        return
    layer, buckets = 8 * case.width**2, -(-case.layers // case.bucket)
    yield from sends_at_most(notes, 2 * case.layers * layer * (1 - 1 / case.ranks), WHY_BUCKETS)
    sums = [call for call in notes.calls if call.op in ("all_reduce", "reduce_scatter")]
    if len(sums) > buckets:
        yield f"{len(sums)} sums are sent; BUCKET layers travel together, so {buckets} are enough."
    elif not sums:
        yield "nothing is summed over the ranks."
    elif sum(call.bytes for call in sums) < case.layers * layer:
        some = sum(call.bytes for call in sums) // layer
        if len(sums) == buckets and 2 * sum(call.bytes for call in sums) == case.layers * layer:
            yield "the sums have half the bytes of the gradients: stay with the type that you are given."
        else:
            yield f"{some} of {case.layers} layers are summed: those that fill no bucket at the end are sent, too."
    elif len(sums) < buckets:
        yield f"sums are sent {len(sums)} instead of {buckets} times: a bucket that is full need not wait for others."
    if len(notes.waits) < len(sums):
        yield (
            f"{len(sums)} sums are begun, and {len(notes.waits)} waited for: that one is through says nothing of the "
            "others."
        )
    full = 0  # layers of the buckets so far: the last one may have fewer than BUCKET, or the first
    for call in sums:
        full += call.bytes // layer
        # Products that must precede: the forward's, and two per layer except for the last one's `dy`
        if len(sums) == buckets and call.products < case.layers + 2 * full - 1:
            yield (
                f"line {call.line} sends a bucket before all of its gradients have been computed: those that are "
                "written into it afterwards are not in the sum."
            )
            break
    if not sums:
        return
    yield from multiplies_at_most(notes, 3 * case.layers)
    product = case.width**2 * case.samples // case.ranks
    yield from works_at_least(notes, (3 * case.layers - 1) * product)
    yield from works_at_most(notes, 3 * case.layers * product, "Larger ones hide nothing more.")
    # The last layer's `dy` is not needed; but who computes it first has no other product for a last bucket of one layer
    needed = 3 * case.layers - (sums[-1].bytes > layer)
    if any(call.products >= min(needed, notes.products) for call in sums[:-1]):
        yield "sums begin only after the last product of the backward, so there is nothing left to hide them behind."
    else:
        yield from hides(notes, "all_reduce")


# ---- write-02-b: the ring --------------------------------------------------------------------------------------------


def _tensors(case: Case) -> torch.Tensor:
    random = torch.Generator().manual_seed(case.seed)
    return torch.randn(case.ranks, case.ranks * case.rows, 3, generator=random, dtype=torch.float64)


def reduce(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    mine = _tensors(case)[rank].clone()
    student.ring_all_reduce(mine)
    return {f"part {part} of the tensor": each.clone() for part, each in enumerate(mine.chunk(case.ranks))}


def expect_sums(case: Case) -> list[Expected]:
    tensors, ranks = _tensors(case), case.ranks

    def parts(of: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"part {part} of the tensor": each for part, each in enumerate(of.chunk(ranks))}

    first = tensors.unflatten(1, (ranks, -1)).clone()  # after the first phase: rank, part, rows, columns
    for rank in range(ranks):
        for part in range(ranks):
            came = range((rank - part) % ranks + 1)  # over so many ranks
            first[rank, part] = sum(tensors[(rank - hop) % ranks].chunk(ranks)[part] for hop in came)

    def second(sends: int, writes: int, adds: bool = False) -> torch.Tensor:
        """After a second phase in which rank r sends part r + sends - hop, and writes (or adds) to r + writes - hop."""
        now = first.clone()
        for hop in range(ranks - 1):
            before = now.clone()
            for rank in range(ranks):
                to, came = (rank + writes - hop) % ranks, before[rank - 1, (rank - 1 + sends - hop) % ranks]
                now[rank, to] = adds * before[rank, to] + came
        return now.flatten(1, 2)

    def gone(first: int, second: int, step: int = -1) -> torch.Tensor:
        """After so many hops of each phase, in which numbers of parts change by `step` from hop to hop."""
        now = tensors.unflatten(1, (ranks, -1)).clone()
        for hops, adds in ((first, True), (second, False)):
            sends, writes = (0, step) if adds else (1, 0)
            for hop in range(hops):
                before = now.clone()
                for rank in range(ranks):
                    to, came = (rank + writes + step * hop) % ranks, (rank - 1 + sends + step * hop) % ranks
                    now[rank, to] = adds * before[rank, to] + before[rank - 1, came]
        return now.flatten(1, 2)

    early = (
        "what goes around in the second phase is no complete part. Does the first phase add what arrives? And which "
        "part does a rank have whole by then?"
    )
    wrong = {
        "this is what the rank had at first: is the sum written to `tensor` itself?": tensors,
        "parts are as the first phase leaves them: one of them is complete, and complete parts must go around.": (
            first.flatten(1, 2)
        ),
        early: second(0, -1),
        f"{early} And it is written where another part belongs.": second(0, 0),
        "complete parts go around, but are added to what is there: in the second phase, what arrives takes the "
        "place of a rank's own part (copy_).": second(1, 0, adds=True),
        "complete parts go around, but are written where other parts belong.": second(1, 1),
        "the first phase ends a hop too early, so no part has the numbers of all ranks: it takes N-1 hops.": (
            gone(ranks - 2, ranks - 1)
        ),
        "the second phase ends a hop too early, so complete parts do not reach every rank: it takes N-1 hops.": (
            gone(ranks - 1, ranks - 2)
        ),
        "the numbers of parts go around in the wrong direction. Messages go to the next rank, so a rank passes on what "
        "has just come from the one before: from hop to hop, numbers become smaller by 1.": (
            gone(ranks - 1, ranks - 1, step=1)
        ),
    }
    total = parts(tensors.sum(0))
    return [Expected.of(total, {text: parts(each[r]) for text, each in wrong.items()}) for r in range(ranks)]


def judge_ring(case: Case, rank: int, notes: Notes):
    others = sorted({call.op for call in notes.calls} - {"send", "receive"})
    if others:
        yield f"line {notes.of(*others)[0].line} calls {others[0]}; here everything is made of messages."
    for call in notes.of("send"):
        if call.peer != (rank + 1) % case.ranks:
            yield f"line {call.line} sends to rank {call.peer}, which is not the next one on the ring."
            return
    whole = 8 * 3 * case.rows * case.ranks
    why = {"send": "if each message is a part of 1/N of the tensor, 2 (N-1) messages do."}
    yield from sends_at_most(notes, 2 * whole * (1 - 1 / case.ranks), why)


LABS = [
    WriteLab(
        **page(__file__, "write-02-a"),
        source="step02_data_parallel/sketch.py",
        bodies=(1,),
        cases=(
            Case(ranks=1, layers=2, width=8, samples=4, bucket=1),
            Case(ranks=2, layers=6, width=16, samples=8, bucket=3),
            Case(ranks=3, layers=7, width=10, samples=6, bucket=3),
            Case(ranks=4, layers=8, width=12, samples=8, bucket=2),
        ),
        run=send_buckets,
        expect=expect_buckets,
        judge=judge_buckets,
    ),
    WriteLab(
        **page(__file__, "write-02-b"),
        source="step02_data_parallel/labs/ring.py",
        bodies=(1,),
        cases=(Case(ranks=2, rows=3), Case(ranks=3, rows=16), Case(ranks=5, rows=1), Case(ranks=4, rows=40)),
        run=reduce,
        expect=expect_sums,
        judge=judge_ring,
    ),
]
