"""Labs of the kinds predict, schedule and design: answers that are none, right and wrong ones, and what is said."""

import itertools
import json
import os
import re

import pytest

from common.errors import UsageError
from common.labs import forks, training
from common.labs.find import ROOT
from common.labs.predict import COMMANDS, command_of, digits, grade
from step01_single_gpu.labs import predict_memory
from step02_data_parallel.labs import predict_bytes
from step03_zero.labs import predict_stages
from step05_pipeline.labs import predict_bubble, schedule_tables, tables
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import simulate
from step06_context_parallel.labs import predict_ring
from step08_5d.labs import design_plan
from tests.harness.ranks import run_ranks

MODULES = predict_memory, predict_bytes, predict_stages, predict_bubble, predict_ring
PREDICT = {lab.id: lab for module in MODULES for lab in module.LABS}
ALWAYS = "predict-02-a"  # the others with TEST_ALL
measured = [
    pytest.param(
        id, marks=() if id == ALWAYS else pytest.mark.skipif(not os.environ.get("TEST_ALL"), reason="TEST_ALL")
    )
    for id in PREDICT
]


def apart(question) -> float:
    """Beyond this ratio no two numbers are right for the same measured value, nor one for what another one predicts."""
    above = question.tolerance if question.above is None else question.above
    return (1 + above) / (1 - question.tolerance)


@pytest.mark.parametrize("id", measured)
def test_what_is_predicted_is_measured(id, monkeypatch):
    monkeypatch.setattr(
        training, "run_jobs", lambda path, theirs=False: run_ranks(1, forks.main, str(path), timeout=300)
    )
    for student in range(6 if os.environ.get("TEST_ALL") else 1):
        asked = PREDICT[id].experiment(student)
        for question, value in zip(asked.questions, PREDICT[id].measured(asked), strict=True):
            assert grade(question, question.expected, value)[0], (student, question.name, question.expected, value)
            for mistake, wrong in question.mistakes.items():
                right, line = grade(question, wrong, value)
                assert not right and mistake in line, (student, question.name, line)


@pytest.mark.parametrize("id", PREDICT)
def test_predictions(id, tmp_path, monkeypatch):
    lab = PREDICT[id]
    asked = lab.experiment(3)
    right = {question.name: question.expected for question in asked.questions}
    monkeypatch.setattr(type(lab), "measured", lambda self, asked: tuple(right.values()))
    lab.start(tmp_path, 3)
    found = lab.check(tmp_path, 3)
    assert found.score == 0 and "predict at least one number" in found.feedback[0]
    first, *others = asked.questions
    (tmp_path / "answer.toml").write_text(f"{first.name} = {next(iter(first.mistakes.values()))!r}\n")
    found = lab.check(tmp_path, 3)
    assert found.score == 0 and any(f"who {next(iter(first.mistakes))}" in line for line in found.feedback)
    (command,) = (match[1] for line in found.feedback if (match := re.search(r"`(bash .+)` runs what", line)))
    assert command == f"bash {tmp_path}/commands.sh", "it works from where one is: in a notebook, the top"
    commands = (tmp_path / "commands.sh").read_text()
    assert commands.count(f" {asked.trainings[0].script} ") == len(asked.trainings)
    for line in (line for line in commands.splitlines() if " --run-dir " in line):
        flags = re.findall(r"--[a-z]\S*", line)
        assert len(flags) == len(set(flags)), "each flag once"
    assert not os.system(command.replace("bash", "bash -n", 1))
    (tmp_path / "answer.toml").write_text(f"{first.name} = {first.expected!r}\n")
    assert lab.check(tmp_path, 3).score == 1 / len(asked.questions), "what is not answered is not right"
    (tmp_path / "answer.toml").write_text("".join(f"{name} = {value!r}\n" for name, value in right.items()))
    assert lab.check(tmp_path, 3).passed
    stored = [json.loads(line) for line in (tmp_path / "stored.jsonl").read_text().splitlines()]
    assert len(stored) == 3 and stored[2] == right
    said = " ".join(lab.check(tmp_path, 3).feedback)
    assert "The score is of your last answer. Your first prediction is kept, and your teacher sees it: " in said
    assert f"{first.name} = {digits(next(iter(first.mistakes.values())))}" in said
    (tmp_path / "answer.toml").write_text(f"{first.name} = many\n")
    with pytest.raises(UsageError, match="many is not a number"):
        lab.check(tmp_path, 3)
    assert first.how.split()[-1] in lab.solution(3)


def test_what_measures_a_prediction_runs_from_the_top():
    assert command_of(ROOT / "runs/labs/predict-05-a" / COMMANDS) == "bash runs/labs/predict-05-a/commands.sh"
    assert command_of(ROOT.parent / "my labs" / COMMANDS) == f"bash '{ROOT.parent}/my labs/commands.sh'"


@pytest.mark.parametrize("id", PREDICT)
def test_no_answer_is_right_for_another_variant(id):
    """Unless both have the same. What is measured may lie on one side of what is expected, an answer on the other."""
    values = {}
    for student in range(72):
        for question in PREDICT[id].experiment(student).questions:
            far = apart(question)
            values.setdefault(question.name, set()).add((round(question.expected, 9), far))
    for name, found in values.items():
        for (low, _), (high, far) in itertools.pairwise(sorted(found)):
            assert high / low > far, (name, low, high)


# ---- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lab", schedule_tables.LABS, ids=lambda lab: lab.id)
def test_schedules(lab, tmp_path, monkeypatch):
    for student in range(len(lab.cases)):
        if student:  # pictures take most of the time
            monkeypatch.setattr(tables, "draw", lambda panels, path, unit: path)
        lab.start(tmp_path, student)
        found = lab.check(tmp_path, student)
        assert found.score == 0 and "still to be filled in" in found.feedback[0]
        lab.write_best(tmp_path, student)
        assert lab.check(tmp_path, student).passed and (tmp_path / "schedule.png").exists()


@pytest.mark.parametrize("lab", schedule_tables.LABS, ids=lambda lab: lab.id)
def test_the_best_table_is_that_of_all_schedules(lab):
    """Of those with one stage on each rank; with whole backwards unless the lab lets them be split."""
    names = ["naive", "afab", "1f1b", *(["zb-h1", "zb-h2"] if lab.split else [])]
    for case in lab.cases:
        played = [simulate(build_schedule(name, case.pp, case.micro_batches), case.costs) for name in names]
        fitting = [each.makespan for each in played if max(each.unfinished) <= case.unfinished]
        best = lab.best(case)[1]
        assert max(best.unfinished) <= case.unfinished
        assert best.makespan == min(fitting) or (case.unfinished < case.pp and best.makespan < min(fitting)), case


def test_what_is_asked_depends_on_the_number():
    """Not only sizes: which limit binds, and which changes of a line are asked for."""
    whole, split = schedule_tables.LABS
    assert {case.unfinished < case.pp for case in whole.cases} == {True, False}
    assert {case.unfinished > case.pp for case in split.cases} == {True, False}
    norms = next(lab for lab in predict_bytes.LABS if lab.id == "predict-02-b")
    asked = [tuple(question.name for question in norms.experiment(student).questions) for student in range(16)]
    assert len(set(asked)) == 4 and all(len(each) == 3 for each in asked)


def rows(pattern: str, micro_batches: int = 6) -> str:
    return ",".join(f"{kind}{number}" for kind in pattern for number in range(micro_batches))


@pytest.mark.parametrize(
    ("table", "score", "message"),
    [
        (
            [rows("FB")] * 3,
            0.6,
            "rank 1 holds 6, rank 2 holds 6 unfinished micro-batches, and each may hold",
        ),
        ([",".join(f"F{i},B{i}" for i in range(6))] * 3, 0.2, "not yet"),
        ([rows("FB").replace(",", ";")] * 3, 0, "cells are separated by commas"),
        ([rows("FB")] * 2 + [rows("FB").replace("F0,", "B0,F0,").replace(",B0", "")], 0, "run: rank 2 does B0 before"),
        ([rows("FB")] * 2, 0, "has 2 lines, and there are 3 ranks"),
        ([rows("FB", 5)] * 3, 0, "every rank lacks F5 and B5"),
        (["F0,"] * 3, 0, "The table is still to be filled in"),
        (["F0,B0"] * 3, 0, "run: every rank lacks F1 to F5 and B1 to B5"),
        ([rows("FB"), "F0,F3,B0,I1,W2", rows("FB")], 0, "run: rank 1 lacks F1, F2, F4, F5, B3 to B5, I2 and W1"),
        ([rows("FB"), *["F0,F5,B0"] * 2], 0, "run: ranks 1 and 2 lack F1 to F4 and B1 to B5"),
        ([rows("FB"), "F0.1", rows("FB")], 0, "run: F0.1 is of another stage"),
        ([rows("FB"), "G0", rows("FB")], 0, "run: schedule.csv, line 2: 'G0' is no action"),
        ([rows("FB", 7)] * 3, 0, "rank 0 does F6, and F5 is the last"),
        ([rows("FB"), rows("FB"), rows("FB").replace("B5", "B4")], 0, "rank 2 lacks B5"),
        ([rows("FB"), rows("FB"), rows("FB") + ",B4"], 0, "B4 twice"),
        ([rows("FB"), rows("FB"), rows("FIW").replace("I0", "W0", 1)], 0, "It cannot run"),
        ([rows("FIW")] * 3, 0, "backwards are to be whole here: write B0 in the place of I0 and W0"),
        ([rows("FB"), rows("FB"), rows("F")], 0, "run: rank 2 lacks B0 to B5"),
        (["F0,B0," + rows("FB")[3:].replace(",B0", ""), "F1,F0," + rows("FB")[6:], rows("FB")], 0, "which comes after"),
    ],
)
def test_tables_that_are_no_solution(table, score, message, tmp_path):
    lab = schedule_tables.LABS[0]
    (tmp_path / "schedule.csv").write_text("\n".join(table) + "\n")
    found = lab.check(tmp_path, 0)
    assert found.score == pytest.approx(score, abs=0.05) and message in "\n".join(found.feedback)
    if "comes after" in message:
        assert found.feedback[0].startswith("Deadlock") and "rank 0 waits at B0" in "\n".join(found.feedback)


def test_who_waits_although_a_backward_is_ready(tmp_path, monkeypatch):
    """The order of 1F1B with 3 micro-batches at once, where that makes ranks wait; times can be counted in the text."""
    monkeypatch.setattr(tables, "draw", lambda panels, path, unit: path)
    lab, table = schedule_tables.LABS[0], []
    for ahead in (3, 3, 2, 1):
        pairs = [f"B{number},F{number + ahead}" for number in range(7 - ahead)]
        table.append(",".join([*(f"F{n}" for n in range(ahead)), *pairs, *(f"B{n}" for n in range(7 - ahead, 7))]))
    (tmp_path / "schedule.csv").write_text("\n".join(table) + "\n")
    found = lab.check(tmp_path, 5)
    assert found.feedback[2] == "waits   rank 1 waits for F3 until 22, and B1 could run from 19 on"
    assert found.feedback[3].startswith("rank 0  F0- F1- F2- " + 11 * 2 * "." + "B0--- ")
    assert "(2 characters are one unit of time)" in found.feedback


def test_what_a_table_is_said_to_be_worth():
    """20 points as it runs; 40 times the square of what it saves; of that, half where memory is over its limit."""
    for fast, saved, kept, quick, score in (
        (True, 1.0, True, 1.0, 1.0),
        (True, 1.1, False, 1.0, 0.6),
        (False, 0.5, True, 0.125, 0.3),
        (False, 0.5, False, 0.125, 0.25),
        (False, -1.0, True, 0.0, 0.2),
    ):
        assert tables.points(fast, saved, kept) == pytest.approx((quick, score))


@pytest.mark.parametrize(
    ("name", "low", "high", "said"),
    [
        ("1f1b", 0.45, 0.55, "rank 0 waits 6 before B0, because rank 1 does all of B0, and others wait only for its I"),
        ("zb-h1, W first", 0.4, 0.6, "because rank 3 does W"),
        (
            "zb-h2",
            0.6,
            0.61,
            "holds 6, rank 3 holds 6 unfinished micro-batches, and each may hold 4",
        ),  # faster, and holds too much
        ("zb-h1", 1, 1, "beside the best known"),
    ],
)
def test_what_a_slow_table_is_worth(name, low, high, said, tmp_path, monkeypatch):
    """At most 0.6, even if little is missing; and the best one is drawn only beside one that has passed."""
    panels = []
    monkeypatch.setattr(tables, "draw", lambda drawn, path, unit: panels.extend(drawn) or path)
    lab, (best, *rest) = schedule_tables.LABS[1], name.split(", ")
    lab.start(tmp_path, 1)
    rows = [[str(action) for action in row] for row in build_schedule(best, 4, 6).actions]
    for row in rows if rest else ():  # each W as soon as it can
        row[:] = [each for name in row if name[0] != "W" for each in (name, *(["W" + name[1:]] * (name[0] == "I")))]
    (tmp_path / "schedule.csv").write_text("\n".join(map(",".join, rows)) + "\n")
    found = lab.check(tmp_path, 1)
    assert low <= found.score <= high and said in "\n".join(found.feedback), found
    form = (
        r"points  20 for running; ([\d.]+) of 80 for time(?: \(.*\))?, and (\d+)% of these for memory: ([\d.]+) of 100"
    )
    time, share, all = re.fullmatch(form, found.feedback[-2]).groups()
    assert 20 + float(time) * int(share) / 100 == pytest.approx(float(all), abs=0.1), "as one calculates"
    assert float(all) == pytest.approx(100 * found.score, abs=0.1) and (share == "50") == ("each may hold" in said)
    assert len(panels) == 1 + found.passed


# ---- designs ---------------------------------------------------------------------------------------------------------


def write(folder, **answers) -> None:
    (folder / "answer.toml").write_text("".join(f"{name} = '{value}'\n" for name, value in answers.items()))


@pytest.mark.parametrize("student", range(4) if os.environ.get("TEST_ALL") else [2])
def test_a_plan(student, tmp_path):
    (lab,) = design_plan.LABS
    folder = tmp_path / lab.id
    folder.mkdir()
    lab.start(folder, student)
    began = lab.check(folder, student)
    assert 0.4 < began.score < 0.7, "it begins with a layout that fits, and has a way to go"
    best = design_plan.best_of(student).layout
    answers = {name: getattr(best, name) for name in lab.fields}
    write(folder, **answers)
    found = lab.check(folder, student)
    assert found.passed and any("1. " in line and f"student {student}" in line for line in found.feedback)
    write(folder, **answers | {"dp": 3})
    assert "GPUs" in lab.check(folder, student).feedback[0]
    write(folder, **answers | {"dp": best.dp * best.tp * best.pp * best.cp, "tp": 1, "pp": 1, "cp": 1, "zero": 0})
    assert "may be filled" in lab.check(folder, student).feedback[0]
    write(folder, **answers | {"micro_batch": 4096})
    assert "cannot be divided" in lab.check(folder, student).feedback[0]
    assert "step08_5d.planning plan" in lab.solution(student)
