"""Is it rounding, or a bug? What two curves tell, and what they do not.

Two runs that should be the same training begin with the same weights and read the same batch. So the first step is the
best witness: its loss tests the forward, and its gradient norm the backward, before any update has mixed things up. The
second step tests the update. Later, differences that are nothing but rounding grow slowly, and never at once.
"""

from dataclasses import dataclass, field

from common.errors import UsageError
from common.explaining import reasons
from common.explaining.band import INSIDE, OUTSIDE, Band, bands, largest_jump
from common.explaining.differences import Differences, differences, drift, shift_of, updates_before
from common.explaining.factors import numbers_of
from common.explaining.logs import Log
from common.explaining.written import written_reasons

ROUNDING, BUG, UNKNOWN = "rounding", "a bug", "cannot tell"
SUDDEN = 3.0  # multiples of the largest jump that rounding has made
STEADY = 1.4  # multiples of the largest drift that rounding has had
ONE_SIDED = 0.9  # of the steps
ELSEWHERE = 200.0  # in place of OUTSIDE, for bfloat16 in other programs: see `strange`
ALIKE = 5  # steps that are equal in every digit: two orders of a sum are not, for so long
CONTROL = (
    "let the reference show how far rounding goes: repeat it with another micro-batch size, which changes nothing but "
    "the order of sums, and compare. Or repeat both in float64: rounding shrinks to 1e-15, and a bug stays as it is"
)
FIND_IT = (
    "repeat a few steps of both in float64: what is left there, above 1e-10, is the bug. Then look for the first "
    "tensor that differs, in the order in which they are computed: `python -m common.lockstep` does both"
)


@dataclass
class Explanation:
    """What was found: the verdict, why, and what to do next. `differences` are those of each column."""

    verdict: str
    dtype: str
    reasons: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    differences: list[Differences] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"verdict: {self.verdict}", *(f"  - {each}" for each in self.reasons)]
        return "\n".join([*lines, *["what to do next:"] * bool(self.next), *(f"  - {each}" for each in self.next)])


def explain(a: Log, b: Log, dtype: str | None = None, limit: int | None = None) -> Explanation:
    """Judge how `b` differs from the reference `a`, in steps below `limit`.

    Both computed in `dtype`; by default in what their records say. Raises UsageError if the two have no step in common,
    or for a type whose rounding was not measured.
    """
    if dtype is not None and dtype not in bands():
        raise UsageError(f"--type {dtype}: rounding was measured in {', '.join(bands())}")
    said = {dtype} if dtype else {types_of(run.config) for run in (a, b)} - {""}
    if said and said <= bands().keys():
        widest = max(said, key=list(bands()).index)  # of two types, the one that rounds more
        return _judge(a, b, bands()[widest], limit)
    narrow, wide = (_judge(a, b, bands()[name], limit) for name in ("float32", "bfloat16"))
    if narrow.verdict == wide.verdict == ROUNDING:
        return narrow
    if wide.verdict == BUG and not said:
        return wide
    if said:
        why = f"but rounding in {' and '.join(sorted(said))} was not measured, and is more than that of float32"
    else:
        why = "but no record says in which type the runs compute. For float32 this is too much, for bfloat16 (or TF32, "
        why += "in which GPUs may multiply float32 numbers) it is not"
        wide.next.insert(0, "say --type float32 or --type bfloat16")
    wide.verdict = UNKNOWN
    wide.reasons.append(why)
    return wide


def types_of(config: dict) -> str:
    """The type that a run computes in, as its record says; "" if there is none."""
    fp8 = config.get("fp8", "none")
    return config.get("dtype", "") if fp8 == "none" else f"FP8 ({fp8})"


def _judge(a: Log, b: Log, band: Band, limit: int | None) -> Explanation:
    """The verdict for one type."""
    shift = shift_of(a, b)
    found = differences(a, b, band, shift, limit)
    loss = found[0]
    result = Explanation(ROUNDING, band.dtype, differences=found)
    if shift:
        result.reasons.append(f"the runs count differently: step k of the first is step k {shift:+} of the second")
    result.reasons += written_reasons(a, b, shift)
    outside = ELSEWHERE if strange(a, b, band) else OUTSIDE
    at, jump, doubtful = first(found, outside), first_jump(found, band, outside), first(found, INSIDE)
    if jump is not None and (at is None or jump <= at):
        at = jump
    if at is not None and (at < band.settled or at == jump or one_sided(found)):
        result.verdict, result.next = BUG, [FIND_IT]
        result.reasons += _why(found, at, at == jump, outside, numbers_of(a.config, b.config))
        if at == 0 and loss.steps[0] > 1:
            result.next.insert(0, "write every step down: the very first one tells forward, backward and update apart")
    elif at is not None:
        result.verdict, result.next = UNKNOWN, [CONTROL]
        result.reasons.append(
            f"from step {loss.steps[at]} on the runs are further apart than rounding has driven any of ours, but they "
            "began alike and came apart slowly, now to this side and now to that. Rounding is amplified where training "
            "is close to unstable (spikes of the gradient norm, a high learning rate)"
        )
        if any((run.config | run.config.get("model_config", {})).get("experts") for run in (a, b)):
            result.reasons.append("the model has experts: now and then rounding decides which of them a token chooses")
    elif doubtful is not None:
        worst = max(found, key=lambda column: column.excess[doubtful])
        result.verdict, result.next = UNKNOWN, [CONTROL]
        result.reasons.append(
            f"step {loss.steps[doubtful]}: the {worst.name} differs by {reasons.percent(worst.relative[doubtful])}, "
            f"{worst.excess[doubtful]:.1f} times the most that rounding in {band.dtype} has made in our runs: too much "
            "to be called rounding, and too little to be sure"
        )
        if outside > OUTSIDE and first(found, OUTSIDE) is not None:
            result.reasons.append(
                "other programs round in bfloat16 what ours do not (such as a sum of gradients), and trained weights "
                f"amplify it, so only a difference of {outside:.0f} times the most in our runs is surely a bug"
            )
    else:
        for each in found:
            most = max(map(abs, each.relative))
            result.reasons.append(
                f"the {each.name} differs by {reasons.percent(each.relative[0])} at first and by at most "
                f"{reasons.percent(most)}, as between our runs that nothing but rounding in {band.dtype} drives apart"
            )
        measured = len(band.largest["loss"])
        if loss.steps[-1] - loss.steps[0] >= measured:
            result.reasons.append(
                f"rounding was measured for {measured} steps. It may go on growing in later ones, where only a sudden "
                "change would show"
            )
        if band.dtype == "bfloat16":
            loss_hides, norm_hides = (reasons.percent(INSIDE * band.at(key, measured)) for key in ("loss", "grad_norm"))
            result.next.append(
                f"bfloat16 hides bugs that change the loss by less than {loss_hides} within {measured} steps, and "
                f"the gradient norm by less than {norm_hides}. Repeat some steps in float32 or float64 to exclude them"
            )
        _admit(result, found, band)
    return result


def strange(a: Log, b: Log, band: Band) -> bool:
    """Whether runs may round more in bfloat16 than those that the band was measured with: they are of another program,
    or did not begin with random weights.
    """
    ours = all(run.config and not run.config.get("init_from") and min(run.values["loss"]) <= 1 for run in (a, b))
    return band.dtype == "bfloat16" and not ours


def _why(found: list[Differences], at: int, jumped: bool, outside: float, numbers: dict[str, int]) -> list[str]:
    """Why curves come apart at the step with this index."""
    loss, norm = found[0], found[1] if len(found) > 1 else None
    if at == 0 and updates_before(loss.steps):
        return [f"the first step that is written, {loss.steps[0]}, differs already, but some updates precede it"]
    if at == 0 and (norm is None or loss.excess[0] > outside):
        return reasons.forward(loss, norm, numbers)
    if at == 0:
        return reasons.backward(loss, norm, numbers)
    if at == 1:
        return reasons.update(loss, norm, at)
    return reasons.sudden(loss, norm, at) if jumped else reasons.gradual(loss, at)


def first(found: list[Differences], times: float) -> int | None:
    """The index of the first step where a difference exceeds so many times its limit."""
    exceeding = (index for each in found for index, excess in enumerate(each.excess) if excess > times)
    return min(exceeding, default=None)


def first_jump(found: list[Differences], band: Band, outside: float) -> int | None:
    """The index of the first step where a difference is far above all that came before it."""
    jumps = (
        index
        for each in found
        for index, jump in enumerate(each.jumps())
        if jump > SUDDEN * largest_jump() and each.excess[index] > (1 if index >= band.settled else outside)
    )
    return min(jumps, default=None)


def one_sided(found: list[Differences]) -> bool:
    """Whether a difference that has grown slowly has had one sign nearly always, as every update adds to it.

    Counted from the step where it leaves the band: rounding that is amplified may keep a sign once it is large, but has
    gone either way before.
    """
    shares = []
    for each in found:
        since = first([each], 1.0)
        signs = [value > 0 for value in each.relative[since:] if value] if since is not None else []
        shares.append(max(signs.count(True), signs.count(False)) / len(signs) if len(signs) >= 6 else 0.0)
    return max(shares) >= ONE_SIDED


def _admit(result: Explanation, found: list[Differences], band: Band) -> None:
    """No bug was seen; but might one have hidden? Then nobody can tell."""
    doubts, steps = [], len(found[0].steps)
    if len(found) == 1:
        doubts.append(
            "but there are no gradient norms: AdamW divides a constant factor of the gradient away, so that a loss "
            "curve alone does not show the most frequent bugs"
        )
        result.next.append("write down the gradient norm, too, as it is before clipping")
    elif reasons.clipped(found[1].a) and reasons.clipped(found[1].b):
        doubts.append("but the gradient norms are those after clipping, which hide a factor as AdamW does")
        result.next.append("write down the gradient norm as it is before clipping")
    coarse = [each for each in found if each.limits[0] > 10 * band.at(each.key, 0)]
    if coarse:
        names, most = " and ".join(each.name for each in coarse), max(each.limits[0] for each in coarse)
        doubts.append(
            f"but {names}: so few digits are written that what is below {reasons.percent(most)} does not show"
        )
        result.next.append("write all digits down (a float's repr instead of %.4f)")
    alike = next((at for at in range(steps) if any(each.relative[at] for each in found)), 0)
    if alike >= ALIKE and not coarse:
        doubts.append(
            f"but up to step {found[0].steps[alike - 1]} the runs are equal in every digit, and from then on they are "
            "not. Another order of sums shows from the first steps on. Was a run resumed there, in another layout or "
            "on another machine? If not, something has happened that is as small as rounding"
        )
        result.next.append(CONTROL)
    if steps < 3:
        doubts.append(f"but {steps} steps in common are few: the first update shows in the second one")
    for each in found:
        turns = drift(each.relative[: len(band.largest[each.key])])
        if abs(turns) > STEADY * band.drift[each.key]:
            doubts.append(
                f"but the second {each.name} is too often the {'larger' if turns > 0 else 'smaller'} one, and rounding "
                f"goes either way (the mean is {abs(turns):.1f} times its standard error, and was at most "
                f"{band.drift[each.key]} times in our runs)"
            )
            result.next.append(CONTROL)
    if doubts:
        result.verdict = UNKNOWN
        result.reasons += doubts
