"""What the first difference looks like: a missing sum, a wrong share, a stale or a shifted value."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from common.errors import UsageError
from common.lockstep.compare import Difference, Finding, by_key, first_difference
from common.lockstep.context import Context, axis_name, listed, ranges
from common.lockstep.moved import of_another_name, shifted, stale, turned
from common.lockstep.notes import WORDS, Seen, Whole
from common.lockstep.sums import counted_wrongly, missing_sum, wrong_decay, wrong_share, wrong_sum


def not_finite(finding: Finding, context: Context) -> str:
    bad = ~np.isfinite(finding.value)
    return f"not a number in {bad.sum()} of {bad.size} elements" if bad.any() else ""


EXPLANATIONS: tuple[Callable[[Finding, Context], str], ...] = (  # the first that fits is given
    *(not_finite, missing_sum, wrong_decay, wrong_share, counted_wrongly, stale, shifted, turned, of_another_name),
    wrong_sum,
)


def dimension(context: Context) -> str:
    """The ranks that are wrong, and what in the mesh tells them from those that are right."""
    difference = context.difference
    wrong = set(difference.ranks)
    holders = wrong | {rank for each in difference.right for rank in each.ranks}
    words = f"rank{'s' * (len(wrong) > 1)} {', '.join(_rank(context.seen[rank]) for rank in sorted(wrong))}"
    if wrong == holders:
        return words + (": all that hold it" if len(wrong) > 1 else "")
    for name in context.seen[min(wrong)].coordinates:
        at = {context.seen[rank].coordinates.get(name) for rank in wrong}
        if {rank for rank in holders if context.seen[rank].coordinates.get(name) in at} == wrong:
            return f"{words}: only where {name} is {listed(sorted(at))}"
    return f"{words}, and not on {listed(sorted(holders - wrong))}"


class Verdict(NamedTuple):
    """Whether no tensor differs, and what there is to say."""

    equal: bool
    text: str


def explain(reference: Seen, ranks: Sequence[Seen]) -> Verdict:
    """Compare what ranks have seen with what one process has. Raises UsageError if they have no tensor in common."""
    whole = Whole(reference.notes)
    difference, equal = first_difference(whole, ranks)
    if difference:
        alike = "1 tensor is" if len(equal) == 1 else f"{len(equal)} tensors are"
        lines = [f"{alike} equal, in the order of computation. The first that is not:"]
        lines += [f"  {topic:<12}{text}" for topic, text in describe(difference, whole, ranks).items() if text]
        return Verdict(False, "\n".join(lines))
    if not equal:
        names = [next((each.name for each in seen.notes if each.name), "none") for seen in (reference, *ranks[:1])]
        raise UsageError(
            "no tensor of the reference is one of the candidate's: are these two layouts of one model? The first names "
            f"are {' and '.join(names)}"
        )
    missing = {name: None for _, _, name in whole.order if not any(name == key[2] for key in equal)}
    text = f"no difference: {len(equal)} tensors are equal, on {len(ranks)} rank{'s' * (len(ranks) > 1)}"
    return Verdict(True, f"{text}; not found on them: {', '.join(missing)}" if missing else text)


def describe(difference: Difference, whole: Whole, ranks: Sequence[Seen]) -> dict[str, str]:
    """What there is to say of the first difference, by topic."""
    context = Context(difference, whole, {seen.rank: seen for seen in ranks}, by_key(ranks))
    step, phase, name = difference.key
    finding = max(difference.wrong, key=lambda each: each.wrong.sum())
    fitting = (text for attempt in EXPLANATIONS if (text := attempt(finding, context)))
    return {
        "what": f"step {step}, {WORDS[phase].format(name)}",
        "on": dimension(context),
        "where": _where(finding, context),
        "looks like": next(fitting, "other values, which no explanation fits"),
    }


def _rank(seen: Seen) -> str:
    """A rank and its place: 3 (dp 1, tp 1)"""
    place = ", ".join(f"{name} {index}" for name, index in seen.coordinates.items())
    return f"{seen.rank} ({place})" if place else str(seen.rank)


def _where(finding: Finding, context: Context) -> str:
    if not finding.place:
        return f"{finding.value:.12g} instead of {finding.expected:.12g}"
    parts = []
    for axis, indices in enumerate(finding.place):
        if finding.wrong.shape != tuple(map(len, finding.place)):
            break
        bad = finding.wrong.any(tuple(other for other in range(finding.wrong.ndim) if other != axis))
        if not bad.all():
            parts.append(f"{axis_name(context, axis)}s {ranges(indices[bad])} of {ranges(indices)}")
    error = float(np.abs(finding.value - finding.expected).max()) / context.difference.scale
    parts += [f"{finding.wrong.sum():,} of {finding.wrong.size:,} elements", f"by up to {error:.1e} of the largest"]
    return "; ".join(parts)
