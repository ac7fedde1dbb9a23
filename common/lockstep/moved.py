"""Is it the value of another time or place? Each function returns what it has found, in words, or ""."""

import numpy as np

from common.lockstep.compare import Finding, differs
from common.lockstep.context import Context, axis_name, ranges

MOST = 2e7  # comparisons of numbers, in the search for what has moved


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
    for rank, note in context.notes[context.difference.key]:
        rows = note.place[0] if note.place else ()
        if note.total or len(rows) != len(place[0]) or set(rows.tolist()) == mine:
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
                return f"a shifted value: it is that of {key[2]}"
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
