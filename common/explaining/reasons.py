"""What a difference between two curves can come from: sentences for what `verdict` has found."""

import math
import statistics

from common.explaining.band import INSIDE
from common.explaining.differences import Differences, common_wiggle
from common.explaining.factors import Factor, factor_of

SAME_DATA, OTHER_DATA = 0.97, 0.6  # the correlation of wiggles above which, and below which, batches are the same ones
REMAINING = (
    "what remains: initial weights (equal seeds on all tensor ranks? layers counted from zero on each stage?), "
    "positions and masks, labels at the borders of a sequence's parts"
)


def percent(value: float) -> str:
    """A relative difference as a person reads it: 12 %, or 3e-06."""
    return f"{100 * abs(value):.3g} %" if abs(value) >= 1e-4 else f"{abs(value):.1g}"


def data(loss: Differences) -> str | None:
    """Whether the two see the same batches, if that can be said."""
    likeness = common_wiggle(loss.a, loss.b)
    if likeness is None:
        return None
    if likeness > SAME_DATA:
        return f"both losses go up and down together (correlation {likeness:.2f}): the runs see the same data"
    if likeness > OTHER_DATA:
        return (
            f"the losses go up and down together, but not quite (correlation {likeness:.2f}): a part of the data may "
            "differ (does every rank read its own samples?), or the models are not the same"
        )
    return (
        f"the losses do not go up and down together (correlation {likeness:.2f}): the runs see different data. Compare "
        "seeds, the order of the samples, and which rank reads which of them"
    )


def forward(loss: Differences, norm: Differences | None, numbers: dict[str, int]) -> list[str]:
    """Why the very first loss differs."""
    step, culprits = loss.steps[0], "the initial weights, the data or the forward that differ"
    if not math.isfinite(loss.relative[0]):
        return [f"the loss of the first step (step {step}) is {loss.a[0]:g} in one run and {loss.b[0]:g} in the other"]
    found = [
        f"the losses of the first step (step {step}) differ by {percent(loss.relative[0])}, where rounding makes up to "
        f"{percent(loss.limits[0])}. "
        + (
            f"No weight has been updated by then, so it is {culprits}"
            if step <= 1
            else f"If both runs begin there, it is {culprits}. If not, it may be any update before it"
        )
    ]
    if factor := factor_of(loss.ratio(0), max(1e-3, 10 * loss.limits[0]), numbers):
        found.append(
            f"the second loss is {factor.spelled}{_named(factor)} times the first: a sum where there should be a mean, "
            "or the loss of one rank instead of that of all"
        )
    if norm and norm.excess[0] <= 1:
        found.append(
            "the gradient norms agree, so the training is right and only what is written down as its loss is wrong, "
            "such as that of a rank which does not know it, or knows a part"
        )
        return found
    for n in sorted({2, *numbers.values()}):
        if abs(abs(loss.b[0] - loss.a[0]) / math.log(n) - 1) < 2e-3:
            found.append(
                f"the difference is log({n}): the exponentials of the vocabulary are added up {n} times, as by a "
                "vocabulary-parallel loss that is given the logits of all ranks"
            )
    if told := data(loss):
        found += [told] if "different" in told else [told, REMAINING]
    return found


def backward(loss: Differences, norm: Differences, numbers: dict[str, int]) -> list[str]:
    """Why the first loss agrees and its gradient norm does not."""
    ratio = norm.ratio(0)
    found = [
        f"the losses of the first step agree, but its gradient norms differ by {percent(norm.relative[0])}, where "
        f"rounding makes up to {percent(norm.limits[0])}: the forward is right, and the backward or the norm is not"
    ]
    if factor := factor_of(ratio, max(1e-3, 4 * norm.limits[0]), numbers):
        near = sum(abs(norm.ratio(index) / factor.ratio - 1) < 0.2 for index in range(len(norm.steps)))
        found.append(
            f"the second norm is {ratio:.6g} times the first: {factor.spelled}{_named(factor)}, and so it is, to "
            f"within a fifth, in {near} of {len(norm.steps)} steps"
        )
        found += [f"known to do this: {mistake}" for mistake in factor.mistakes()]
    elif ratio > 1:
        found.append(
            f"the ratio, {ratio:.6g}, is no factor of the layout: a part of the gradient is too large, such as experts "
            "that are summed over ranks once more, or copies (norms, tied embeddings) that are counted twice"
        )
    else:
        found.append(
            f"the ratio, {ratio:.6g}, is no factor of the layout: a part of the gradient is missing, such as the sum "
            "over tp of norms under sequence parallelism, over copies of K/V heads, over stages that share the "
            "embedding, or over ranks that saw other tokens"
        )
    if clipped(norm.b) != clipped(norm.a):
        which = "second" if clipped(norm.b) else "first"
        found.append(f"the {which} run's norm is often the same, and never above that: is it written after clipping?")
    if len(loss.steps) > 1 and max(loss.excess[1:]) <= 1:
        found.append(
            "the losses stay together all the same. Either the updates are right and only the norm is counted wrongly, "
            "or AdamW divides a constant factor away; with SGD or with clipping it would show"
        )
    return found


def clipped(norms: list[float]) -> bool:
    """Whether most of these norms are the largest one, as those are that were written after clipping."""
    top = max(norms)
    return len(norms) > 4 and sum(abs(norm - top) <= 1e-3 * top for norm in norms) > len(norms) / 2


def update(loss: Differences, norm: Differences | None, index: int) -> list[str]:
    """Why curves come apart after the first update, of which loss and gradient were right."""
    step, differs = loss.steps[index], "the update differs"
    agrees = (
        f"the first step agrees in loss and gradient norm, and step {step} does not. Forward and backward are right"
    )
    doubt = max((each for each in (loss, norm) if each), key=lambda each: each.excess[0])
    if doubt.excess[0] > INSIDE:
        agrees = (
            f"step {step} differs by more than rounding. In the first step the {doubt.name} already differs by "
            f"{percent(doubt.relative[0])}, which is {doubt.excess[0]:.1f} times the most that rounding makes and too "
            "little to be sure"
        )
        differs = "the forward or the backward is a little different, or the update is"
    elif norm is None:
        agrees = f"the first losses agree, and step {step}'s do not. The forward is right"
        differs = "the backward differs (no gradient norm tells) or the update"
    found = [
        f"{agrees}, so {differs}: learning rate, decay, clipping, the optimizer's settings, or weights that were not "
        "handed on (gathered before the update, or not copied from the master weights)"
    ]
    return found + learning_rate(loss)


def learning_rate(loss: Differences) -> list[str]:
    """Whether one run learns faster by a share that stays the same, as with another learning rate."""
    if not all(map(math.isfinite, [*loss.a, *loss.b])):
        return []
    start, shares = statistics.fmean(loss.a[: max(1, len(loss.a) // 10)]), []
    for x, y in list(zip(loss.a, loss.b))[len(loss.a) // 3 :]:
        progress = start - x
        if progress > 0.02 * abs(start):
            shares.append((x - y) / progress)
    if len(shares) < 8:
        return []
    middle, positive = statistics.median(shares), sum(each > 0 for each in shares) / len(shares)
    if abs(middle) < 0.005 or 0.15 < positive < 0.85:
        return []
    return [
        f"the second run learns {'faster' if middle > 0 else 'slower'} nearly all the time, by about {percent(middle)} "
        "of what the first has learned: so does a run with another learning rate or warm-up"
    ]


def sudden(loss: Differences, norm: Differences | None, index: int) -> list[str]:
    """Why curves that have been together for a while come apart at once."""
    step = loss.steps[index]
    found = [f"up to step {loss.steps[index - 1]} the runs differ as by rounding, and at step {step} suddenly by more"]
    columns = [column for column in (loss, norm) if column]
    if not all(math.isfinite(each) for column in columns for each in (column.a[index], column.b[index])):
        found.append("there, a number is not finite in one of the runs: an overflow, or too large a loss scale")
    if norm and loss.excess[index] <= 1:
        return [
            *found,
            f"the loss of step {step} agrees, so weights and data are still the same: the gradient of this step is "
            f"wrong (its norm is {norm.ratio(index):.6g} times the other), as after an overflow or a change of the "
            "loss scale that was not undone",
        ]
    before, after = (common_wiggle(loss.a[part], loss.b[part]) for part in (slice(index), slice(index, None)))
    if after is not None and after < OTHER_DATA and (before is None or before > SAME_DATA):
        return [
            *found,
            f"from there on the losses do not go up and down together (correlation {after:.2f}): other data, as when a "
            "resumed run reads the text from its beginning again",
        ]
    return [
        *found,
        f"the update before step {step} is the first that differs. Was a run resumed there, or a step before? Then "
        "look for lost moments, a lost count of updates (bias correction), a learning rate that warms up again, or "
        "stale weights. If not, for an update that one run has skipped, or a step of the learning rate",
    ]


def gradual(loss: Differences, index: int) -> list[str]:
    """Why curves come apart slowly, and yet faster than by rounding."""
    return [
        f"the runs come apart slowly, but from step {loss.steps[index]} on they are further apart than rounding has "
        "driven any: every update differs by a little. Compare learning rates, decay, clipping, the optimizer's "
        "settings and the types of its states",
        *learning_rate(loss),
    ]


def _named(factor: Factor) -> str:
    return f" ({', '.join(factor.names) or 'a whole number'})"
