"""The lab of step 4 in which the student writes a loss over a divided vocabulary."""

import torch
import torch.distributed as dist

from common.group import Group
from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import holds_at_most, sends_at_most
from common.labs.seen import keep
from common.labs.write import Expected, WriteLab, page

NOTHING_BUT_PADDING = (
    "a rank may have nothing but padding, so that all of its logits are -inf. -inf times 0 is nan, and so is -inf "
    "minus -inf: put 0 in the place of what does not count (masked_fill, where)."
)


class Narrow(Case):
    """A case whose logits are in bfloat16. They are small, so that the loss is about a number per token."""

    def __str__(self) -> str:
        return f"{super().__str__()}, in bfloat16"


def _logits(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Large ones, and of each token others: exp(1000) is infinite, and exp(-1000) is 0. Columns beyond the vocabulary,
    which pad it, have the largest.

    The first and the last column of each rank are targets, whatever else is drawn.
    """
    random, width = torch.Generator().manual_seed(case.seed), -(-case.vocab // case.ranks)
    logits = 300 * torch.randn(2, case.tokens, width * case.ranks, generator=random, dtype=torch.float64)
    if isinstance(case, Narrow):
        logits = (logits / 100).bfloat16().double()
    else:
        logits += torch.linspace(-3000, 3000, 2 * case.tokens, dtype=torch.float64).view(2, -1, 1)
    logits[..., case.vocab :] = 9000.0
    targets = torch.randint(case.vocab, (2, case.tokens), generator=random)
    firsts = range(0, case.vocab, width)
    borders = [each for first in firsts for each in (first, min(first + width, case.vocab) - 1)]
    targets.view(-1)[: len(borders)] = torch.tensor(borders)
    return logits, targets


def _shares(case: Case) -> torch.Tensor:
    """By what each token's loss is multiplied."""
    return torch.linspace(0.25, 0.75, 2 * case.tokens, dtype=torch.float64)


def lose(student, case: Case, rank: int) -> dict[str, torch.Tensor]:
    logits, targets = _logits(case)
    narrow = isinstance(case, Narrow)
    mine = logits.chunk(case.ranks, dim=-1)[rank].clone().to(torch.bfloat16 if narrow else torch.float64)
    mine.requires_grad_()
    keep(logits=mine, targets=targets)
    group = Group("tp", tuple(range(case.ranks)), rank, dist.group.WORLD, "gloo")
    losses = student.vocab_parallel_cross_entropy(mine, targets, case.vocab, group)
    (losses * _shares(case).to(losses.dtype)).sum().backward()
    values = {"bits of the loss": torch.tensor(torch.finfo(losses.dtype).bits)} if narrow else {}
    return values | {"loss": losses.detach().sum().double(), "gradient of the logits": mine.grad}


def expect_loss(case: Case) -> list[Expected]:
    logits, targets = _logits(case)
    shares = _shares(case).view(2, -1)

    def of(columns: slice | torch.Tensor, vocab: int, rank: int | slice) -> dict[str, torch.Tensor]:
        """The loss with the exponentials of some columns alone, and its gradient in a rank's, or in all."""
        part = logits.clone().requires_grad_()
        scores = part[..., :vocab]
        chosen = scores.gather(-1, targets[..., None])[..., 0]
        losses = scores[..., columns].logsumexp(-1) - chosen
        (gradient,) = torch.autograd.grad((losses * shares).sum(), part)
        if isinstance(rank, int):
            gradient = gradient.chunk(case.ranks, dim=-1)[rank]
        return {"loss": losses.detach().sum(), "gradient of the logits": gradient}

    found, width = [], -(-case.vocab // case.ranks)

    def counted(columns: list[torch.Tensor], here: list[torch.Tensor], rank: int) -> list[dict[str, torch.Tensor]]:
        """The loss, that of logits minus the largest, and the gradient if ranks count targets in these columns.

        Args:
            columns: by rank, which of its columns it takes for that of each token's target.
            here: by rank, of which tokens it counts a target.
        """
        parts = logits.chunk(case.ranks, dim=-1)
        total, largest = (reduce(logits[..., : case.vocab], -1) for reduce in (torch.logsumexp, torch.amax))
        chosen = [part.gather(-1, column[..., None])[..., 0] for part, column in zip(parts, columns)]
        target = sum(each * found for each, found in zip(chosen, here))
        less = sum((each - largest) * found for each, found in zip(chosen, here))
        gradient = (parts[rank] - total[..., None]).exp()
        gradient = gradient - torch.nn.functional.one_hot(columns[rank], width) * here[rank][..., None]
        gradient = shares[..., None] * gradient.where(torch.arange(width) + rank * width < case.vocab, 0)
        losses = (total - target).sum(), (total - largest - less).sum()
        return [{"loss": loss, "gradient of the logits": gradient} for loss in losses]

    scores = logits[..., : case.vocab]
    chosen = scores.gather(-1, targets[..., None])[..., 0]
    infinite = (
        "exp of a large logit is infinite, and of a small one 0: before exponentials, subtract each token's largest "
        "logit. The loss stays the same."
    )
    parts = scores.split(width, -1)
    largest = torch.stack([part.amax(-1) for part in parts])  # on each rank, of its own columns
    sums = sum((part - most[..., None]).exp().sum(-1) for part, most in zip(parts, largest))
    unequal = (sums.log() - chosen + largest.gather(0, targets[None] // width)[0]).sum()

    local = [targets - rank * width for rank in range(case.ranks)]
    near = [each.clamp(0, width - 1) for each in local]
    ways = [[each.where((each >= 0) & (each < width), 0) for each in local], near]
    everywhere = [torch.ones_like(targets)] * case.ranks
    twice, never = (
        [[(low <= each) & (each < high) for each in local] for low, high in borders]
        for borders in (((0, width + 1), (-1, width)), ((1, width), (0, width - 1)))
    )
    columns = torch.arange(logits.shape[-1])
    beyond = columns // width * width - case.vocab  # `first - vocab`: so many at the end of a rank are no part of late
    late = columns[(columns < case.vocab) | (beyond > 0) & (columns % width < width - beyond)]
    narrow, whole = isinstance(case, Narrow), of(slice(None), case.vocab, slice(None))
    softmax = logits.where(torch.arange(logits.shape[-1]) < case.vocab, -torch.inf).softmax(-1)
    for rank in range(case.ranks):
        mine = slice(rank * width, (rank + 1) * width)
        unscaled = (whole["gradient of the logits"] / shares[..., None]).chunk(case.ranks, dim=-1)[rank]
        mistakes = {
            "sums of many numbers need more digits than bfloat16 has: convert to `at_least_float32` first.": {
                "bits of the loss": torch.tensor(16)
            },
            "float64 takes twice the memory: convert to `at_least_float32`, which leaves what is wide as it is.": {
                "bits of the loss": torch.tensor(64)
            },
            "the loss is minus the logarithm of a probability, and the minus is missing.": {"loss": -whole["loss"]},
            "the gradient that arrives is a factor of each token's gradient.": {"gradient of the logits": unscaled},
            "each token has a gradient of its own that arrives: not one for all of them, such as their mean.": [
                {"gradient of the logits": unscaled * share} for share in (shares.mean(), shares[0, 0])
            ],
            "this is the gradient of the sum of exponentials. The target's logit has one, too: subtract 1 there.": {
                "gradient of the logits": (shares[..., None] * softmax).chunk(case.ranks, dim=-1)[rank]
            },
            "columns that pad the vocabulary count, but no token has them.": of(slice(None), logits.shape[-1], rank),
            "this is the softmax over the rank's own columns: sums of exponentials must be added up over the ranks.": (
                of(mine, case.vocab, rank)
            ),
        }
        mistakes |= {
            "every rank subtracted the largest of its own logits. Exponentials can be added up only if all ranks "
            "subtract the same number: the largest of all columns.": {"loss": unequal},
        }
        wrong = [each for way in ways for each in counted(way, everywhere, rank)]
        mistakes |= {
            "every rank adds a logit for the target, but only one of them has the target's column.": (
                [{"loss": each["loss"]} for each in wrong]
            ),
            "every rank subtracts 1 at the target, but only one of them has the target's column.": (
                [{"gradient of the logits": each["gradient of the logits"]} for each in wrong[::2]]
            ),
            "a target at the border counts on two ranks: of a rank's n columns, the first is 0 and the last n - 1, and "
            "n is the next rank's first.": [each for here in twice for each in counted(near, here, rank)],
            "a target at the border counts on no rank: a rank's first column, 0, is its own, and so is its last.": (
                [each for here in never for each in counted(near, here, rank)]
            ),
            "a rank that has nothing but padding counts some of it: there, `vocab - first` is negative, and a slice "
            "that begins with a negative number begins so far from the end.": of(late, logits.shape[-1], rank),
        }
        right = {"bits of the loss": torch.tensor(32)} if narrow else {}
        right |= of(slice(None), case.vocab, rank)
        rough = {"loss": 1e-5, "gradient of the logits": 0.005} if narrow else {}
        found.append(Expected.of(right, mistakes, rough, NOTHING_BUT_PADDING if beyond.max() >= 0 else infinite))
    return found


def errors_of_loss(case: Case) -> dict[str, str]:
    """What torch says of a target that is looked up on a rank that does not have it."""
    text = "a rank has columns 0 to n - 1, counted from its `first`, and n is the next rank's: where a target is none "
    return {"out of bounds": f"{text}of them, look up any column, and count 0."}


def judge_loss(case: Case, rank: int, notes: Notes):
    token = (4 if isinstance(case, Narrow) else 8) * 2 * case.tokens
    reduced = notes.of("all_reduce", least=token // 2)
    if case.ranks > 1 and len(reduced) > 2:
        yield (
            f"{len(reduced)} all-reduces are sent, and two are enough: two sums over the same ranks can travel in one "
            f"tensor. The third is in line {reduced[2].line}."
        )
    text = "three numbers per token are all that ranks must tell each other: no logits."
    why = dict.fromkeys(("all_gather", "all_reduce", "send", "broadcast"), text)
    yield from sends_at_most(notes, 2 * 3 * token * (1 - 1 / case.ranks), why)
    columns = 2 * case.tokens * 8 * -(-case.vocab // case.ranks)
    yield from holds_at_most(notes, 3.2 * columns + 12 * token, "No rank may hold other ranks' logits.")


LABS = [
    WriteLab(
        **page(__file__, "write-04-b"),
        source="step04_tensor_parallel/vocab_parallel.py",
        bodies=(1, 2),
        only=("_VocabParallelCrossEntropy", "vocab_parallel_cross_entropy_sum", "vocab_parallel_cross_entropy"),
        cases=(
            Case(ranks=1, tokens=5, vocab=7),
            Case(ranks=2, tokens=4, vocab=13),
            Narrow(ranks=2, tokens=40, vocab=250),
            Case(ranks=3, tokens=16, vocab=250),
            Case(ranks=4, tokens=6, vocab=5),  # the last rank has padding alone
        ),
        run=lose,
        expect=expect_loss,
        judge=judge_loss,
        errors=errors_of_loss,
    ),
]
