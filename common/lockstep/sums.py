"""Is a sum missing, or a share wrong?

Each function that is no helper tries one explanation on a wrong tensor. It returns what it has found, in words, or ""
if the numbers do not fit: nothing is said that they do not show.
"""

from collections.abc import Sequence

import numpy as np

from common.lockstep.compare import Finding, differs, same_place
from common.lockstep.context import Context, listed
from common.lockstep.notes import Note


def missing_sum(finding: Finding, context: Context) -> str:
    """Ranks hold the same elements, and only their sum is right; or a sum lacks what some ranks have computed."""
    difference = context.difference
    if difference.key[1] in ("gradient", "update", "own"):
        return _sum_of_own(finding, context) if difference.key[1] == "gradient" else ""
    place, (rank, *_) = same_place(finding.place), finding.ranks
    held = {each: note for each, note in context.notes[difference.key] if same_place(note.place) == place}
    for name, ranks in context.groups_of(rank).items():
        if all(each in held for each in ranks):
            values = [held[each].value for each in ranks]
            if difference.close(sum(values), finding.expected):
                return f"a missing sum over {name}: the values of ranks {listed(ranks)} add up to the right one"
            if difference.key[2] == "grad_norm" and difference.close(_root(values), finding.expected):
                return f"a missing sum over {name}: the squares of ranks {listed(ranks)} add up to the right one's"
    return ""


def _root(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.sqrt(sum(np.square(each) for each in values))


def _sum_of_own(finding: Finding, context: Context) -> str:
    """A gradient beside what each rank has contributed to it."""
    difference, (rank, *_) = context.difference, finding.ranks
    step, _, name = difference.key
    own, first, last = (_by_rank((step, phase, name), finding, context) for phase in ("own", "first", "last"))
    every = tuple(sorted(own))
    for group, ranks in {"": (rank,), **context.groups_of(rank)}.items():
        some = tuple(each for each in ranks if each in own)
        if some and some != every and difference.close(sum(own[each] for each in some), finding.value):
            of = f"the sum over {group} (ranks {listed(some)})" if group else f"what rank {rank} has computed alone"
            return f"a missing sum over {_across(ranks, every, context)}: it is {of}"
    for each in every:
        if difference.close(finding.expected - own[each], finding.value):
            return f"a missing sum: what rank {each} has computed is not in it"
        if len(every) > 1 and difference.close(finding.expected + own[each], finding.value):
            return f"a sum too much: what rank {each} has computed is in it twice"
    for which, some in ("first", first), ("last", last):
        if rank in some and difference.close(sum(some.values()), finding.value):
            return f"a missing sum over micro-batches: it has the {which} one of each rank"
        if rank in some and difference.close(own[rank] + sum(some.values()) - some[rank], finding.value):
            return f"a missing sum over micro-batches: of other ranks it has only the {which} one"
    return ""


def _by_rank(key: tuple, finding: Finding, context: Context) -> dict[int, np.ndarray]:
    """The elements of a finding's place in the notes that ranks have under another key, added up on each rank."""
    found: dict[int, np.ndarray] = {}
    for rank, note in context.notes.get(key, []):
        if (part := _part(note, finding)) is not None:
            found[rank] = found.get(rank, 0) + part
    return found


def _across(ranks: Sequence[int], every: Sequence[int], context: Context) -> str:
    """The largest group that joins one of these ranks with others of those that have a summand."""
    groups = context.groups_of(ranks[0])
    names = [name for name, some in groups.items() if set(some) <= set(every) and not set(some) & set(ranks[1:])]
    return max(names, key=lambda name: len(groups[name]), default="other ranks")


def wrong_sum(finding: Finding, context: Context) -> str:
    """What ranks have contributed is right, and the sum of it is not."""
    step, phase, name = context.difference.key
    own = _by_rank((step, "own", name), finding, context)
    if phase == "gradient" and own and context.difference.close(sum(own.values()), finding.expected):
        return "a wrong sum: what the ranks have computed adds up to the right one"
    return ""


def _part(note: Note, finding: Finding) -> np.ndarray | None:
    """The elements of a note at the place of a finding, if it has all of them."""
    if len(note.place) != len(finding.place):
        return None
    where = []
    for have, want in zip(note.place, finding.place, strict=True):
        if not np.isin(want, have).all():
            return None
        where.append(np.searchsorted(have, want))
    return note.value[np.ix_(*where)]


def wrong_decay(finding: Finding, context: Context) -> str:
    """An updated weight that is off by a small part of what it was."""
    step, phase, name = context.difference.key
    before = context.whole.values.get((step, "forward", name))
    if phase != "update" or before is None:
        return ""
    old = before[np.ix_(*finding.place)]
    factor = float(((finding.value - finding.expected) * old).sum() / (old * old).sum())
    off = np.abs(finding.value - finding.expected - factor * old)
    if not off.max(initial=0) <= 1e-3 * abs(factor) * context.difference.scale:
        return ""
    return f"a wrong weight decay: {abs(factor):.3g} of the weight is {'left' if factor > 0 else 'taken away'} too much"


def wrong_share(finding: Finding, context: Context) -> str:
    """All elements, or all of those that are wrong, are the right ones times a constant."""
    value, expected = finding.value, finding.expected
    if context.difference.key[1] == "number":
        return _known(float(value / expected), finding, context) if expected else ""
    for where, which in ((np.ones_like(finding.wrong), ""), (finding.wrong, " where it is wrong")):
        a, b = value[where], expected[where]
        if value.dtype.kind == "f" and (square := float((b * b).sum())) and len(b) > 1:
            factor = float((a * b).sum()) / square
            if not differs(a, factor * b, context.difference.scale).any():
                if abs(factor) < 1e-9:
                    return f"zeros{which}, where it should not be zero"
                known = _known(factor, finding, context, which)
                return known or f"a wrong share: {factor:.6g} times the right value{which}"
    return ""


def _known(factor: float, finding: Finding, context: Context, which: str = "") -> str:
    """The factor, if it is one that is known."""
    seen = context.seen[finding.ranks[0]]
    sizes = {f"ranks in {name}": len(ranks) for name, ranks in context.groups_of(seen.rank).items()} | seen.counts
    for times, words in ((factor, "times the right value"), (1 / factor if factor else 0, "of the right value")):
        names = [name for name, size in sizes.items() if size > 1 and abs(times - size) < 1e-9 * size]
        if names:
            much = f"{times:.6g} {words}" if times is factor else f"1/{times:.6g} {words}"
            return f"a wrong share: {much}{which}, and {round(times)} is the number of {', or of '.join(names)}"
    return ""


def counted_wrongly(finding: Finding, context: Context) -> str:
    """A gradient norm whose square has too much or too little by the square of some gradients."""
    step, phase, name = context.difference.key
    if (phase, name) != ("number", "grad_norm"):
        return ""
    excess = float(finding.value) ** 2 - float(finding.expected) ** 2
    gradients = {key[2]: value for key, value in context.whole.values.items() if key[:2] == (step, "gradient")}
    squares = {each: float((value**2).sum()) for each, value in gradients.items()}
    sets = {f"the gradient of {each}": square for each, square in squares.items()}
    for each in context.seen[finding.ranks[0]].coordinates:
        copies = _copies(each, context) & squares.keys()
        sets[f"what ranks of {each} hold copies of"] = sum(squares[one] for one in copies)
    sets["all that norms have"] = sum(square for each, square in squares.items() if each.endswith("norm.weight"))
    for which, square in sets.items():
        times = excess / square if square else 0.0
        if abs(times - round(times)) < 1e-7 and round(times):
            return f"a wrong share: {which} is counted {1 + round(times)} times"
    return ""


def _copies(dimension: str, context: Context) -> set[str]:
    """The parameters of which ranks that differ in this dimension alone update the same elements."""
    step, found, owners = context.difference.key[0], set(), {}
    for key, some in context.notes.items():
        for rank, note in some if key[:2] == (step, "gradient") else ():
            others = {name: at for name, at in context.seen[rank].coordinates.items() if name != dimension}
            holder = key[2], *others.values(), *same_place(note.place)
            if owners.setdefault(holder, rank) != rank:
                found.add(key[2])
    return found
