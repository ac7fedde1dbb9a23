"""What the first difference looks like: a missing sum, a wrong share, a stale or a shifted value.

Each function below tries one explanation on a wrong tensor. It returns what it has found, in words, or "" if the
numbers do not fit: nothing is said that they do not show.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from common.lockstep.compare import Difference, Finding, by_key, differs, first_difference, same_place
from common.lockstep.records import WORDS, Record, Seen, Whole

GROUPS = (
    "tp",
    "cp",
    "dp",
    "dp_cp",
    "ep",
    "edp",
    "pp_forward",
    "shard",
    "replica",
    "kv_replica",
    "embed",
    "mirror",
)  # names to prefer, where groups have the same ranks
MOST = 2e7  # comparisons of numbers, in the search for what has moved
AXES = {2: ("sample", "position"), 3: ("sample", "position", "feature"), 4: ("sample", "head", "position", "feature")}


@dataclass(frozen=True)
class Context:
    """What explanations look at."""

    difference: Difference
    whole: Whole
    seen: dict[int, Seen]
    records: dict[tuple, list[tuple[int, Record]]]

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """A rank's groups of several ranks, each set of ranks once, under its best known name."""
        mine = self.seen[rank].groups
        names = sorted(mine, key=lambda name: (GROUPS.index(name) if name in GROUPS else len(GROUPS), name))
        found: dict[tuple[int, ...], str] = {}
        for name in names:
            found.setdefault(tuple(sorted(mine[name])), name)
        return {name: ranks for ranks, name in found.items()}


# ---- explanations ----------------------------------------------------------------------------------------------------


def not_finite(finding: Finding, context: Context) -> str:
    bad = ~np.isfinite(finding.value)
    return f"not a number in {bad.sum()} of {bad.size} elements" if bad.any() else ""


def missing_sum(finding: Finding, context: Context) -> str:
    """Ranks hold the same elements, and only their sum is right; or a sum lacks what some ranks have computed."""
    difference = context.difference
    if difference.key[1] in ("gradient", "update", "own"):
        return _sum_of_own(finding, context) if difference.key[1] == "gradient" else ""
    place, (rank, *_) = same_place(finding.place), finding.ranks
    held = {each: record for each, record in context.records[difference.key] if same_place(record.place) == place}
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
    own = {}
    for each, record in context.records.get((step, "own", name), []):
        if (part := _part(record, finding)) is not None:
            own[each] = own.get(each, 0) + part
    every = tuple(sorted(own))
    for group, ranks in {"": (rank,), **context.groups_of(rank)}.items():
        some = tuple(each for each in ranks if each in own)
        if some and some != every and difference.close(sum(own[each] for each in some), finding.value):
            of = f"the sum over {group} (ranks {listed(some)})" if group else f"what rank {rank} has computed alone"
            return f"a missing sum over {_across(ranks, every, context)}: it is {of}"
    for each in every:
        if difference.close(finding.expected - own[each], finding.value):
            return f"a missing sum: what rank {each} has computed is not in it"
        if difference.close(finding.expected + own[each], finding.value):
            return f"a sum too much: what rank {each} has computed is in it twice"
    return ""


def _across(ranks: Sequence[int], every: Sequence[int], context: Context) -> str:
    """The largest group that joins one of these ranks with others of those that have a summand."""
    groups = context.groups_of(ranks[0])
    names = [name for name, some in groups.items() if set(some) <= set(every) and not set(some) & set(ranks[1:])]
    return max(names, key=lambda name: len(groups[name]), default="other ranks")


def wrong_sum(finding: Finding, context: Context) -> str:
    """What ranks have contributed is right, and the sum of it is not."""
    step, phase, name = context.difference.key
    parts = [_part(record, finding) for _, record in context.records.get((step, "own", name), [])]
    parts = [part for part in parts if part is not None]
    if phase == "gradient" and parts and context.difference.close(sum(parts), finding.expected):
        return "a wrong sum: what the ranks have computed adds up to the right one"
    return ""


def _part(record: Record, finding: Finding) -> np.ndarray | None:
    """The elements of a record at the place of a finding, if it has all of them."""
    if len(record.place) != len(finding.place):
        return None
    where = []
    for have, want in zip(record.place, finding.place, strict=True):
        if not np.isin(want, have).all():
            return None
        where.append(np.searchsorted(have, want))
    return record.value[np.ix_(*where)]


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
                return (
                    _known(factor, finding, context, which)
                    or f"a wrong share: {factor:.6g} times the right value{which}"
                )
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
    squares = {
        key[2]: float((value**2).sum()) for key, value in context.whole.values.items() if key[:2] == (step, "gradient")
    }
    sets = {f"the gradient of {each}": square for each, square in squares.items()}
    for each in context.seen[finding.ranks[0]].coordinates:
        sets[f"what ranks of {each} hold copies of"] = sum(
            squares[one] for one in _copies(each, context) & squares.keys()
        )
    sets["all that norms have"] = sum(square for each, square in squares.items() if each.endswith("norm.weight"))
    for which, square in sets.items():
        times = excess / square if square else 0.0
        if abs(times - round(times)) < 1e-7 and round(times):
            return f"a wrong share: {which} is counted {1 + round(times)} times"
    return ""


def _copies(dimension: str, context: Context) -> set[str]:
    """The parameters of which ranks that differ in this dimension alone update the same elements."""
    step, found, owners = context.difference.key[0], set(), {}
    for key, some in context.records.items():
        for rank, record in some if key[:2] == (step, "gradient") else ():
            others = {name: at for name, at in context.seen[rank].coordinates.items() if name != dimension}
            holder = key[2], *others.values(), *same_place(record.place)
            if owners.setdefault(holder, rank) != rank:
                found.add(key[2])
    return found


def stale(finding: Finding, context: Context) -> str:
    """It is what another micro-batch of this rank has, or what it was in the previous step."""
    step, phase, name = context.difference.key
    place, wrong = finding.place, finding.wrong
    before = context.whole.values.get((step - 1, phase, name))
    if before is not None and phase != "number" and _is(finding.value, before[np.ix_(*place)], wrong, context):
        return f"a stale value: that of step {step - 1}{'' if wrong.all() else ' where it is wrong'}"
    if phase not in ("forward", "backward") or name.endswith("weight"):
        return ""
    whole, mine = context.whole.values[context.difference.key], set(finding.place[0].tolist())
    for rank, record in context.records[context.difference.key]:
        rows = record.place[0] if record.place else ()
        if record.total or len(rows) != len(place[0]) or set(rows.tolist()) == mine:
            continue
        if _is(finding.value, whole[np.ix_(rows, *place[1:])], wrong, context):
            whose = "another micro-batch" if rank in finding.ranks else f"a micro-batch of rank {rank}"
            kind = "a stale value" if rank in finding.ranks else "a shifted value"
            return f"{kind}: that of samples {ranges(rows)}, which are {whose}"
    return ""


def _is(value: np.ndarray, other: np.ndarray, wrong: np.ndarray, context: Context) -> bool:
    """Whether wrong elements are those of another tensor."""
    return not differs(value[wrong], other[wrong], context.difference.scale).any()


def shifted(finding: Finding, context: Context) -> str:
    """Its slices along some axis are those of other places."""
    whole, value = context.whole.values[context.difference.key], finding.value
    for axis in range(value.ndim if value.shape == tuple(map(len, finding.place)) else 0):
        others = [each if index != axis else np.arange(whole.shape[axis]) for index, each in enumerate(finding.place)]
        have = np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)
        there = np.moveaxis(whole[np.ix_(*others)], axis, 0).reshape(whole.shape[axis], -1)
        width = have.shape[1]
        if width < 4 or len(have) * len(there) * min(width, 64) > MOST:
            continue
        columns = np.linspace(0, width - 1, min(width, 64)).astype(int)
        same = ~differs(have[:, None, columns], there[None, :, columns], context.difference.scale).any(2)
        at = finding.place[axis]
        wrong = ~same[np.arange(len(at)), at]
        moved = wrong & same.any(1) & differs(have, 0, context.difference.scale).any(1)  # zeros are everywhere
        if 2 * moved.sum() >= wrong.sum() > 0:
            name, of = axis_name(context, axis), same.argmax(1)[moved]
            return f"a shifted value: {name}s {ranges(at[moved])} hold what belongs to {ranges(of)}"
    return _mixed(finding, context)


def _mixed(finding: Finding, context: Context) -> str:
    """Every token of an activation has what belongs to some token of the batch, but not always to this one."""
    value, whole = finding.value, context.whole.values[context.difference.key]
    if context.difference.key[1] not in ("forward", "backward") or value.ndim < 3 or value.shape[-1] < 4:
        return ""
    columns = np.linspace(0, value.shape[-1] - 1, 4).astype(int)
    have, there = value[..., columns].reshape(-1, 4), whole[..., finding.place[-1][columns]].reshape(-1, 4)
    if len(have) * len(there) * 4 > MOST:
        return ""
    same = ~differs(have[:, None], there[None], context.difference.scale).any(2)
    return "a shifted value: tokens hold what belongs to other tokens" if same.any(1).all() else ""


def of_another_name(finding: Finding, context: Context) -> str:
    """It is the same tensor of another layer, say."""
    step, phase, _ = context.difference.key
    for key, whole in context.whole.values.items():
        if key[:2] == (step, phase) and key != context.difference.key and whole.ndim == len(finding.place) > 1:
            fits = all(len(have) and have.max() < size for have, size in zip(finding.place, whole.shape, strict=True))
            if fits and context.difference.close(whole[np.ix_(*finding.place)], finding.value):
                return f"a shifted value: that of {key[2]}"
    return ""


def turned(finding: Finding, context: Context) -> str:
    """Queries or keys that are rotated as those of other positions.

    Elements 0 and d/2 of a head are a number of the complex plane, and each position turns it by one radian more
    (`common.model.rope_tables`). No two whole numbers of radians are the same angle.
    """
    value, expected, half = finding.value, finding.expected, finding.value.shape[-1] // 2 if finding.value.ndim else 0
    if ".rotate (" not in context.difference.key[2] or context.difference.key[1] != "forward":
        return ""
    with np.errstate(all="ignore"):
        ratio = (value[..., 0] + 1j * value[..., half]) / (expected[..., 0] + 1j * expected[..., half])
    positions, seq_len = finding.place[2], context.whole.values[context.difference.key].shape[2]
    at = []
    for position, angles in zip(positions, np.moveaxis(ratio, 2, 0), strict=True):
        errors = np.abs(np.exp(1j * (np.arange(seq_len) - position))[:, None] - angles.flatten()).max(1)
        if not errors.min() < 1e-7:
            return ""
        at.append(int(errors.argmin()))
    wrong = np.asarray(at) != positions
    return f"a shifted value: positions {ranges(positions[wrong])} are turned as {ranges(np.asarray(at)[wrong])}"


EXPLANATIONS: tuple[Callable[[Finding, Context], str], ...] = (
    *(not_finite, missing_sum, wrong_decay, wrong_share, counted_wrongly, stale, shifted, turned, of_another_name),
    wrong_sum,
)


# ---- in words --------------------------------------------------------------------------------------------------------


def listed(numbers: Sequence[int]) -> str:
    """1, 2 and 5"""
    words = [str(each) for each in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def ranges(numbers: Sequence[int]) -> str:
    """0-3, 8-11: in the order of the numbers, which need not ascend."""
    parts: list[list[int]] = []
    for number in map(int, numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in parts]
    return ", ".join(words if len(words) <= 6 else [*words[:5], "...", words[-1]])


def axis_name(context: Context, axis: int) -> str:
    """What an axis of the tensor is."""
    _, phase, name = context.difference.key
    dims = len(context.difference.wrong[0].place)
    if phase in ("forward", "backward") and not name.endswith("weight") and dims in AXES:
        return AXES[dims][axis]
    return "row" if axis == 0 else "column" if axis == 1 and dims == 2 else f"index {axis}: number"


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


def in_words(reference: Seen, ranks: Sequence[Seen]) -> str:
    """Compare what ranks have seen with what one process has, and say what differs first; "" if nothing does."""
    whole = Whole(reference.records)
    difference, compared = first_difference(whole, ranks)
    if difference is None:
        return ""
    lines = [f"{compared - 1} tensors are equal, in the order of computation. The first that is not:"]
    lines += [f"  {topic:<12}{text}" for topic, text in describe(difference, whole, ranks).items() if text]
    return "\n".join(lines)


def describe(difference: Difference, whole: Whole, ranks: Sequence[Seen]) -> dict[str, str]:
    """What there is to say of the first difference, by topic."""
    context = Context(difference, whole, {seen.rank: seen for seen in ranks}, by_key(ranks))
    step, phase, name = difference.key
    finding = max(difference.wrong, key=lambda each: each.wrong.sum())
    kinds = [text for explain in EXPLANATIONS if (text := explain(finding, context))]
    return {
        "what": f"step {step}, {WORDS[phase].format(name)}",
        "on": dimension(context),
        "where": _where(finding, context),
        "looks like": kinds[0] if kinds else "other values, which no explanation fits",
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
