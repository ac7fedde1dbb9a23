"""Is it rounding, or a bug? The diagnosis judges pairs of stored curves, and reads other programs' logs."""

import functools
import json
import math
from pathlib import Path

import pytest

from common.errors import UsageError
from common.explaining.band import bands
from common.explaining.factors import factor_of, numbers_of
from common.explaining.logs import Log
from common.explaining.verdict import BUG, ROUNDING, UNKNOWN, explain
from tests.diagnosis import foreign
from tests.diagnosis.pairs import SETS, as_stored, pairs, stored
from tests.diagnosis.runs import train_all
from tests.harness.ranks import ROOT
from tests.parity.cases import ALL

LOSSES = [5.0 - 0.1 * step + 0.03 * math.sin(9 * step) for step in range(24)]
NORMS = [0.6 + 0.05 * math.cos(5 * step) for step in range(24)]


def log_of(losses, norms=None, config=None, name="run", **more) -> Log:
    columns = {"loss": losses, "grad_norm": norms or []} | more
    return Log(
        Path(name), config or {"dtype": "float32"}, {key: dict(enumerate(each)) for key, each in columns.items()}
    )


def judged(pair: dict):
    """The verdict on a stored pair: from the curves and the layout, without a look at other flags."""
    a, b = (log_of(*curve) for curve in pair["curves"])
    return explain(a, Log(b.path, {"dtype": pair["dtype"]} | pair["layout"], b.values))


def of_others(curve) -> Log:
    """A curve as a log of another program: nothing says what it computes."""
    return Log(Path("x"), {}, log_of(*curve).values)


@functools.cache
def verdicts(name: str) -> list[tuple[dict, object]]:
    """The pairs of a set, each with what the diagnosis says of it."""
    if name == "foreign":
        return [(pair, explain(*map(of_others, pair["curves"]), pair["dtype"])) for pair in stored(name)]
    return [(pair, judged(pair)) for pair in stored(name)]


def test_of_forty_pairs_at_most_two_are_judged_wrong_and_no_bug_is_called_rounding():
    found = verdicts("judged")
    assert [bool(pair["bug"]) for pair, _ in found].count(True) == len(found) / 2 == 20
    assert not [pair["name"] for pair, result in found if pair["bug"] and result.verdict == ROUNDING]
    wrong = [f"{pair['name']}\n{it}" for pair, it in found if it.verdict != (BUG if pair["bug"] else ROUNDING)]
    assert len(wrong) <= 2, "\n".join(wrong)


@pytest.mark.parametrize("name", [*SETS, "foreign"])
def test_the_page_says_how_often_verdicts_are_right(name):
    page = (ROOT / "common" / "rounding_or_a_bug.md").read_text()
    for kind, bug in ("rounding", False), ("a bug", True):
        found = [result.verdict for pair, result in verdicts(name) if bool(pair["bug"]) == bug]
        counts = (len(found), *(found.count(each) for each in (ROUNDING, BUG, UNKNOWN)))
        assert f"| `{name}`, {kind} | {' | '.join(map(str, counts))} |" in page, counts


def test_of_another_program_no_verdict_is_wrong():
    found = verdicts("foreign")
    wrong = [f"{pair['name']}\n{it}" for pair, it in found if it.verdict == (ROUNDING if pair["bug"] else BUG)]
    assert not wrong, "\n".join(wrong)
    page, most = (ROOT / "common" / "rounding_or_a_bug.md").read_text(), {True: 0.0, False: 0.0}
    for pair, it in found:
        if not pair["bug"]:
            trained = foreign.TRAINED in pair["name"]
            most[trained] = max(most[trained], *(max(each.excess) for each in it.differences))
    assert f"up to {most[False]:.0f} times as much, and\n  up to {most[True]:.0f} times if" in page


def test_the_other_program_is_that_of_its_curves():
    reference = next(pair["curves"][0] for pair in stored("foreign") if pair["dtype"] == "float32")
    for column, kept in zip(foreign.train("float32", "", None, steps=3)[0], reference):
        assert column == pytest.approx(kept[:3], rel=1e-4)


@pytest.mark.skipif(not ALL, reason="trains in float64: TEST_ALL=1")
@pytest.mark.parametrize("change", [*foreign.ROUNDING, *foreign.BUGS])
def test_the_other_program_has_its_bugs_in_float64(change):
    reference, found = (foreign.train("float64", each, None)[0] for each in ("", change))
    largest = max(abs(y / x - 1) for columns in zip(reference, found) for x, y in zip(*columns))
    assert largest > 1e-7 if change in foreign.BUGS else largest < 3e-9, "9 digits are kept"


@pytest.mark.skipif(not ALL, reason="trains a hundred pairs: TEST_ALL=1")
@pytest.mark.parametrize("name", SETS)
def test_pairs_that_are_trained_anew_are_like_those_that_are_stored(name):
    """Up to rounding, of which another machine, or version of torch, has its own; some bugs depend on time as well."""
    every = pairs(name)
    curves = train_all(run for pair in every for run in (pair.reference, pair.other))
    for pair, (kept, before) in zip(every, verdicts(name), strict=True):
        assert (pair.name, pair.layout, pair.bug) == (kept["name"], kept["layout"], kept["bug"])
        made = [as_stored(curves[run]) for run in (pair.reference, pair.other)]
        for curve, old in list(zip(made, kept["curves"], strict=True))[: 1 if pair.bug else 2]:
            assert curve[0] == pytest.approx(old[0], rel=0.02), pair.name
            assert curve[1][0] == pytest.approx(old[1][0], rel=0.02), pair.name
        verdict = judged(kept | {"curves": made}).verdict
        assert UNKNOWN in (verdict, before.verdict) or verdict == before.verdict, pair.name


# ---- reasons ---------------------------------------------------------------------------------------------------------


def reasons(losses, norms, config=None, reference=(LOSSES, NORMS), **more) -> str:
    layout = {"dtype": "float32", "global_batch": 8, "micro_batch": 2, "dp": 1} | (config or {})
    return str(explain(log_of(*reference), log_of(losses, norms, layout, **more)))


def scaled(values, factor, since=0):
    return [value * factor if step >= since else value for step, value in enumerate(values)]


def test_reasons_name_the_stage_that_is_wrong():
    told = reasons(LOSSES, scaled(NORMS, 4.0))
    assert "4 (micro-batches)" in told and "mean of its own tokens" in told and "stay together all the same" in told
    assert "√2 (dp)" in reasons(LOSSES, scaled(NORMS, 2**0.5), {"dp": 2, "micro_batch": 1})
    assert "no factor of the layout: a part of the gradient is missing" in reasons(LOSSES, scaled(NORMS, 0.93))
    assert "written after clipping?" in reasons(LOSSES, [min(norm, 0.58) for norm in NORMS])
    assert "Which number of your layout is it?" in reasons(LOSSES, scaled(NORMS, 7.0), {"global_batch": None})
    assert "1/2 (tp) times the first" in reasons(scaled(LOSSES, 0.5), NORMS, {"tp": 2, "micro_batch": 8})
    assert "only what is written down as its loss is wrong" in reasons(scaled(LOSSES, 0.0), NORMS)
    assert "log(2)" in reasons([loss + math.log(2) for loss in LOSSES], scaled(NORMS, 0.9), {"tp": 2})
    faster = [LOSSES[0] + 1.1 * (loss - LOSSES[0]) for loss in LOSSES]
    assert "step 1 does not" in (told := reasons(faster, NORMS)) and "faster nearly all the time, by about 1" in told
    other = [loss - 0.06 * math.sin(9 * step) for step, loss in enumerate(LOSSES)]
    assert "the runs see different data" in reasons([5.01, *other[1:]], scaled(NORMS, 1.02))


def test_reasons_find_where_it_begins():
    told = reasons(scaled(LOSSES, 1.01, 17), NORMS)
    assert "up to step 16" in told and "at step 17 suddenly" in told and "lost moments" in told
    once = [norm * (2 if step == 9 else 1) for step, norm in enumerate(NORMS)]
    assert "the loss of step 9 agrees" in reasons(LOSSES, once) and "is 2 times the other" in reasons(LOSSES, once)
    overflow = [math.inf if step == 9 else norm for step, norm in enumerate(NORMS)]
    assert "not finite" in reasons(LOSSES, overflow)
    scales = {"loss_scale": [65536.0] * 9 + [32768.0] * 15}
    reference = log_of(LOSSES, NORMS, loss_scale=[65536.0] * 24)
    told = str(explain(reference, log_of(LOSSES, once, **scales)))
    assert "the loss scale that is written differs from step 9 on: 32768 instead of 65536" in told
    slowly = [loss * (1 + 4e-7 * step) for step, loss in enumerate(LOSSES)]
    assert "come apart slowly" in reasons(slowly, NORMS)


def test_what_is_written_is_said():
    a = log_of(LOSSES, NORMS, {"dtype": "float32", "lr": 1e-3}, lr=[1e-3] * 24)
    b = {"dtype": "float32", "lr": 2e-3, "resume": "auto"}
    told = str(explain(a, log_of(scaled(LOSSES, 1.01, 5), NORMS, b, lr=[1e-3] * 5 + [2e-3] * 19)))
    assert "lr 0.002 instead of 0.001. So this is not the same training" in told
    assert "learning rate that is written differs from step 5 on" in told and "it was resumed" in told
    narrow = {"dtype": "bfloat16", "fp8": "tile"}
    assert explain(a, log_of(scaled(LOSSES, 1.01), NORMS, narrow)).verdict == UNKNOWN
    assert "rounding in FP8 (tile) and float32 was not measured" in str(
        explain(a, log_of(LOSSES, scaled(NORMS, 2), narrow))
    )


def test_it_says_when_it_cannot_tell():
    def verdict(a, b, dtype=None):
        return explain(a, b, dtype).verdict

    near = [loss * (1 + 1e-7 * math.sin(7 * step)) for step, loss in enumerate(LOSSES)]
    assert verdict(log_of(LOSSES, NORMS), log_of(near, NORMS)) == ROUNDING
    assert verdict(log_of(LOSSES, NORMS), log_of(LOSSES, NORMS)) == ROUNDING
    assert "no gradient norms" in str(explain(log_of(LOSSES), log_of(near)))
    after_clipping = [min(norm, 0.56) for norm in NORMS]
    assert "after clipping, which hide" in str(explain(log_of(LOSSES, after_clipping), log_of(near, after_clipping)))
    growing = [loss * (1 + 1e-8 * 1.6**step * math.sin(3 * step)) for step, loss in enumerate(LOSSES)]
    experts = {"dtype": "float32", "model_config": {"experts": 8}}
    told = str(explain(log_of(LOSSES, NORMS), log_of(growing, NORMS, experts)))
    assert UNKNOWN in told and "now to this side and now to that" in told and "which of them a token chooses" in told
    coarse = [[round(value, 3) for value in each] for each in (LOSSES, NORMS)]
    assert "so few digits" in str(explain(log_of(*coarse), log_of(*coarse)))
    assert verdict(log_of(LOSSES[:2], NORMS), log_of(near[:2], NORMS)) == UNKNOWN
    one_sided = [norm * (1 + 1.5e-4 + 1e-5 * math.sin(step)) for step, norm in enumerate(NORMS)]
    assert verdict(log_of(LOSSES, NORMS), log_of(LOSSES, one_sided), "bfloat16") == UNKNOWN
    narrow = [norm * (1 + 2e-4 * math.sin(7 * step)) for step, norm in enumerate(NORMS)]
    nameless = [Log(Path("x"), {}, log_of(LOSSES, each).values) for each in (NORMS, narrow)]
    assert verdict(*nameless) == UNKNOWN and "--type bfloat16" in str(explain(*nameless))
    assert (verdict(*nameless, "float32"), verdict(*nameless, "bfloat16")) == (BUG, ROUNDING)
    assert verdict(log_of(LOSSES, NORMS), log_of(scaled(LOSSES, 1 + 8e-7), NORMS)) in (UNKNOWN, BUG)


def test_after_the_measured_steps_only_jumps_count():
    losses = [3.0 + 0.1 * math.sin(step) for step in range(200)]
    drifting = [loss * (1 + 1e-8 * 1.06**step * math.sin(3 * step)) for step, loss in enumerate(losses)]
    norms = [1 + 0.1 * math.cos(step) for step in range(200)]
    assert explain(log_of(losses, norms), log_of(drifting, norms)).verdict == ROUNDING
    jumping = scaled(drifting, 1.02, since=150)
    assert "at step 150 suddenly" in str(explain(log_of(losses, norms), log_of(jumping, norms)))


def test_steps_may_be_counted_from_one_or_written_in_intervals():
    late = log_of(LOSSES, NORMS)
    late = Log(late.path, late.config, {key: {k + 1: v for k, v in each.items()} for key, each in late.values.items()})
    result = explain(log_of(LOSSES, NORMS), late)
    assert result.verdict == ROUNDING and "step k +1 of the second" in str(result)
    every_tenth = []
    for losses in (LOSSES, scaled(LOSSES, 1.01)):
        columns = log_of(losses, NORMS).values.items()
        values = {key: {10 * k + 10: v for k, v in each.items()} for key, each in columns}
        every_tenth.append(Log(Path("x"), {"dtype": "float32"}, values))
    told = str(explain(*every_tenth))
    assert "some updates precede it" in told


def test_a_log_may_begin_late():
    """After a resume, steps may be counted from 0 again, and what begins late has had updates before."""
    again = log_of(LOSSES, NORMS)
    columns = again.values.items()
    late = Log(Path("x"), again.config, {key: {k + 300: v for k, v in each.items()} for key, each in columns})
    assert "step k +300 of the second" in str(explain(again, late))
    wrong = {key: {k: v * 1.01 for k, v in each.items()} for key, each in late.values.items()}
    told = str(explain(late, Log(Path("x"), again.config, wrong)))
    assert "If both runs begin there" in told and "No weight has been updated" not in told
    assert "write every step down" in told
    values = {"loss": {5000 + k: 1.0 + k for k in range(3)}}
    with pytest.raises(UsageError, match="they have 0 to 23 and 5000 to 5002$"):
        explain(again, Log(Path("x"), {}, values))


def test_bfloat16_of_other_programs_rounds_more():
    slight = [norm * (1 + 0.02 * math.sin(7 * step + 1)) for step, norm in enumerate(NORMS)]
    ours = [log_of(LOSSES, norms, {"dtype": "bfloat16"}) for norms in (NORMS, slight)]
    theirs = [of_others((LOSSES, norms)) for norms in (NORMS, slight)]
    assert (explain(*ours).verdict, explain(*theirs, "bfloat16").verdict) == (BUG, UNKNOWN)
    assert "200 times the most in our runs is surely a bug" in str(explain(*theirs, "bfloat16"))
    tuned = [Log(run.path, run.config | {"init_from": "x"}, run.values) for run in ours]
    assert explain(*tuned).verdict == UNKNOWN and explain(*theirs, "float32").verdict == BUG
    late = [{key: {k + 90: v for k, v in each.items()} for key, each in run.values.items()} for run in ours]
    assert explain(*(Log(run.path, run.config, each) for run, each in zip(ours, late))).verdict == UNKNOWN
    twice = of_others((LOSSES, scaled(NORMS, 2.0)))
    assert explain(theirs[0], twice, "bfloat16").verdict == BUG


def test_what_is_equal_for_long_and_then_not_is_no_other_order_of_sums():
    norms = [norm * (1 + 1e-7 * math.sin(7 * step)) for step, norm in enumerate(NORMS)]
    late = [norm if step < 12 else other for step, (norm, other) in enumerate(zip(NORMS, norms))]
    result = explain(log_of(LOSSES, NORMS), log_of(LOSSES, late))
    assert result.verdict == UNKNOWN and "up to step 11 the runs are equal in every digit" in str(result)
    assert explain(log_of(LOSSES, NORMS), log_of(LOSSES, norms)).verdict == ROUNDING


def test_no_sentence_is_of_what_is_not_there():
    faster = [LOSSES[0] + 1.1 * (loss - LOSSES[0]) for loss in LOSSES]
    told = str(explain(log_of(LOSSES), log_of(faster)))
    assert "no gradient norm tells" in told and "loss and gradient norm" not in told
    slight = [loss * (1 + 5e-7 * (step < 1) + 1e-5 * (step > 0)) for step, loss in enumerate(LOSSES)]
    told = reasons(slight, NORMS)
    assert "too little to be sure, so the forward or the backward" in told and "are right" not in told
    told = reasons([math.nan, *LOSSES[1:]], NORMS)
    assert "the loss of the first step (step 0) is 5 in one run and nan in the other" in told


@pytest.mark.parametrize(
    ("ratio", "numbers", "spelled", "names"),
    [
        (4.0, {"dp": 2, "micro-batches": 4}, "4", ("micro-batches",)),
        (0.25001, {"micro-batches": 4, "tp": 4}, "1/4", ("micro-batches", "tp")),
        (2.0, {"dp": 4}, "2", ()),
        (1.4143, {"cp": 2}, "√2", ("cp",)),
        (0.7071, {"cp": 2}, "1/√2", ("cp",)),
        (16.0, {}, "16", ()),
    ],
)
def test_factors(ratio, numbers, spelled, names):
    found = factor_of(ratio, 1e-3, numbers)
    assert (found.spelled, found.names) == (spelled, names)


def test_what_is_no_factor():
    assert [factor_of(ratio, 1e-3, {"dp": 2}) for ratio in (1.3, 3.0, 0.0, math.nan, math.inf)] == [None] * 5
    assert numbers_of({"dp": 1, "tp": 2}, {"dp": 2, "global_batch": 16, "micro_batch": 2}) == {
        "dp": 2,
        "tp": 2,
        "micro-batches": 4,
    }


# ---- the band --------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_band():
    page = (ROOT / "common" / "rounding_or_a_bug.md").read_text()
    for name, band in bands().items():
        shown = (f"{band.at(key, step):.0e}" for step in (0, 99) for key in ("loss", "grad_norm"))
        assert f"| {' | '.join([name, *shown])} |" in page


def test_the_band_grows_and_is_that_of_its_type():
    for name, band in bands().items():
        for values in band.largest.values():
            assert values == sorted(values) and len(values) == 48, name
    sizes = [band.at("grad_norm", 0) for band in bands().values()]
    assert sizes == sorted(sizes) and json.dumps(list(bands())) == '["float64", "float32", "bfloat16"]'
