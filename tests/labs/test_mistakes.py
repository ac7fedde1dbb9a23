"""What labs of the kind predict name, and what they show of what runs.

Each mistake's number is what its formula gives, said again as a ratio.
"""

import itertools
import re
import shutil
import subprocess

import pytest

from common.labs.answers import unknown
from common.labs.copies import edited
from common.labs.find import ROOT
from common.labs.predict import DISTURBED, Question, changed_lines, digits, grade, script
from tests.labs.test_kinds import PREDICT, apart

# Lab, question, how a mistake begins -> what it gives, as a share of the right answer; N ranks
RATIOS = {
    ("predict-01-a", "second_step", "counts numbers"): lambda n: 2 / 8,  # two moments, of 4 bytes each
    ("predict-01-a", "sequence", "counts numbers"): lambda n: 1 / 4,
    ("predict-02-a", "bytes", "counts numbers"): lambda n: 1 / 4,
    ("predict-02-a", "bytes", "counts what all ranks send"): lambda n: n,
    ("predict-02-a", "bytes", "counts all N parts"): lambda n: n / (n - 1),
    ("predict-02-a", "bytes", "sends each gradient once"): lambda n: n / (2 * n - 2),
    ("predict-02-a", "bytes", "sends all gradients to each"): lambda n: n / 2,
    ("predict-02-b", "divided", "takes the square root"): lambda n: n**0.5,
    ("predict-02-b", "divided", "divides squares"): lambda n: 1 / n,
    ("predict-02-b", "divided", "turns it round"): lambda n: n * n,
    ("predict-02-b", "owners", "lets copies count"): lambda n: n**-0.5,
    ("predict-02-b", "owners", "takes the mean"): lambda n: n**-1.5,
    ("predict-02-b", "owners", "turns it round"): lambda n: 1 / n,
    ("predict-02-b", "twice", "counts the first"): lambda n: n,
    ("predict-02-b", "twice", "adds the sum up twice"): lambda n: 2 / n,
    ("predict-03-a", "stage_1", "counts numbers"): lambda n: 1 / 4,
    ("predict-03-a", "stage_1", "all-reduces gradients"): lambda n: 3 / 2,
    ("predict-03-a", "stage_2", "counts all of the buffer"): lambda n: n / (n - 1),
    ("predict-03-a", "stage_3", "counts 1/N of the buffer"): lambda n: 1 / (n - 1),
    ("predict-05-a", "one_stage", "counts the forward"): lambda n: 1 / 3,
    ("predict-05-a", "one_stage", "takes a layer"): lambda n: 1 / 2,  # a stage is two
    ("predict-05-a", "one_stage", "counts a bubble"): lambda n: (3 * n - 2) / (2 * n - 1),  # of n micro-batches
    ("predict-05-a", "one_stage", "lets every rank wait"): lambda n: 2 * n / (2 * n - 1),
    ("predict-05-a", "one_stage", "takes the bubble of two"): lambda n: (3 * n - 1) / (4 * n - 2),
    ("predict-05-a", "two_stages", "halves the bubble twice"): lambda n: (5 * n - 1) / (6 * n - 2),
    ("predict-05-a", "two_stages", "has a bubble of p - 1 forwards"): lambda n: (7 * n - 1) / (9 * n - 3),
    ("predict-05-a", "two_stages", "halves all"): lambda n: (n - 1 / 2) / (n + (n - 1) / 2),
    ("predict-05-a", "two_stages", "counts the forward"): lambda n: 1 / 3,
    ("predict-06-a", "ring", "forgets the way home"): lambda n: (3 * n - 3) / (3 * n - 2),
    ("predict-06-a", "ring", "forgets that keys"): lambda n: (2 * n - 1) / (3 * n - 2),
    ("predict-06-a", "ring", "lets everything travel N"): lambda n: 3 * n / (3 * n - 2),
    ("predict-06-a", "allgather", "counts the forward"): lambda n: 1 / 3,
    ("predict-06-a", "allgather", "all-reduces"): lambda n: 4 / 3,
    ("predict-06-a", "allgather", "counts keys or"): lambda n: 1 / 2,
    ("predict-06-a", "allgather", "counts one micro-batch"): lambda n: 1 / 5,
    ("predict-06-a", "allgather", "counts a rank's own"): lambda n: n / (n - 1),
}


@pytest.mark.parametrize("which", RATIOS, ids=" ".join)
def test_a_mistake_has_the_number_of_its_formula(which):
    id, name, begins = which
    asked = 0
    for student in range(12):
        experiment = PREDICT[id].experiment(student)
        for question in (each for each in experiment.questions if each.name == name):
            (wrong,) = (number for mistake, number in question.mistakes.items() if mistake.startswith(begins))
            ranks, asked = experiment.trainings[0].ranks, asked + 1
            assert wrong / question.expected == pytest.approx(RATIOS[which](ranks)), (student, question.name)
    assert asked


def test_gathers_and_sums_of_the_stages():
    """In step 3, in pieces: of K bytes, a rank sends (N-1)/N K in each gather, and in each reduce-scatter."""
    for student in range(12):
        one, two, three = PREDICT["predict-03-a"].experiment(student).questions
        piece = one.expected / 2  # all weights gathered, or all gradients reduce-scattered
        batches = two.expected / piece - 1
        said = {text.partition(":")[0]: number / piece for text, number in two.mistakes.items()}
        assert said["all-reduces every micro-batch"] == pytest.approx(2 * batches + 1)
        assert said["forgets to gather the weights"] == pytest.approx(batches)
        said = {text.partition(":")[0]: number / piece for text, number in three.mistakes.items()}
        gathered = three.expected / piece - batches
        assert said["reduces gradients once per step"] == pytest.approx(gathered + 1)
        assert said["forgets the gradients"] == pytest.approx(gathered)


@pytest.mark.parametrize("student", range(4))
def test_a_busy_machine_makes_no_right_answer_wrong_and_no_wrong_one_right(student):
    """Ranks that sleep are late by up to a tenth of a second and more, and hardly ever early."""
    lab = PREDICT["predict-05-a"]
    for question in lab.experiment(student).questions:
        for late in (-0.009 * question.expected, 0.0, 0.05, 0.1, 0.2):
            measured = question.expected + late
            assert grade(question, question.expected, measured)[0], (question.name, late)
            for mistake, wrong in question.mistakes.items():
                right, line = grade(question, wrong, measured)
                assert not right and mistake in line, (question.name, late, line)
    assert "up to 11% less than what is measured, and 1% more" in lab.experiment(0).questions[0].within


def test_a_machine_that_is_too_busy_is_no_wrong_answer(tmp_path, monkeypatch):
    """It refuses the right number, so it has no say in a grade; and mistakes are told all the same."""
    lab = PREDICT["predict-05-a"]
    one, two = lab.experiment(0).questions
    monkeypatch.setattr(type(lab), "measured", lambda self, asked: (1.2 * one.expected, two.expected))
    for answer, said in ((one.expected, DISTURBED), (one.expected / 3, "who counts the forward alone")):
        (tmp_path / "answer.toml").write_text(f"one_stage = {answer}\ntwo_stages = {two.expected}\n")
        found = lab.check(tmp_path, 0)
        assert found.score == 0.5 and found.unsure == (said == DISTURBED)
        assert any(line.startswith("one_stage: ") and said in line for line in found.feedback)


VARIANTS = range(72)


@pytest.mark.parametrize("id", PREDICT)
def test_a_wrong_formula_neither_passes_nor_gives_what_another_one_gives(id):
    """In no variant: so that whoever is right is right for the right reason, and whoever is wrong is told the reason.

    What is measured may be on one side of what is expected, by as much as is tolerated, and the answer on the other.
    """
    for student in VARIANTS:
        for question in PREDICT[id].experiment(student).questions:
            far = apart(question)
            names = [None, *question.mistakes]
            for (one, low), (two, high) in itertools.combinations(
                zip(names, (question.expected, *question.mistakes.values())), 2
            ):
                ratio = max(low, high) / min(low, high)
                near = (1 + question.same) / (1 - question.same)
                assert ratio > (near if one else far), (student, question.name, one, two)


@pytest.mark.parametrize("id", PREDICT)
def test_usual_slips_are_named(id):
    """A factor that is forgotten or counted twice: of every question about bytes, in every variant."""
    for student in VARIANTS:
        experiment = PREDICT[id].experiment(student)
        for question in (
            each for each in experiment.questions if "How many bytes" in each.ask or "stage_" in each.name
        ):
            ranks = experiment.trainings[0].ranks
            factors = [1 / 4, 1 / 2] + ([ranks, ranks / (ranks - 1)] if question.name != "ring" else [])
            for factor in factors:
                line = grade(question, question.expected * factor, question.expected)[1]
                assert " is what one gets who " in line, (student, question.name, factor)


def test_at_least_three_mistakes_of_every_question():
    for lab in PREDICT.values():
        for question in lab.experiment(0).questions:
            assert len(question.mistakes) >= 3, (lab.id, question.name)


def test_numbers_are_written_whole():
    """And a number that two mistakes give names both."""
    mistakes = {"counts one half": 1_733_632.0, "forgets a factor of 2": 1_733_632.0, "adds": 9.0}
    question = Question("bytes", "?", 0.01, 3_467_264.0, "", mistakes)
    right, line = grade(question, 1_733_632.0, 3_467_264.0)
    assert not right
    assert line == "bytes: 1,733,632 is what one gets who counts one half, or who forgets a factor of 2."
    assert grade(question, 3_467_264.0, 3_467_264.0)[1] == "bytes: right. Measured: 3,467,264."
    assert [digits(value) for value in (0.25, 0.03125, 12.5, 1000.4)] == ["0.25", "0.03125", "12.5", "1,000"]


def test_what_is_misspelt_is_said(tmp_path):
    """Instead of counting as no answer."""
    lab = PREDICT["predict-03-a"]
    (tmp_path / "answer.toml").write_text("stage_l = 3\n")
    assert lab.check(tmp_path, 0).feedback[1] == "answer.toml: `stage_l` is none of stage_1, stage_2 and stage_3."
    assert unknown({"a": "1", "b": "2", "c": "3"}, ["c"]) == "answer.toml: `a`, `b` are not c."
    assert unknown({"c": ""}, iter(["c", "d"])) == ""


def test_changed_lines_are_shown_and_the_commands_change_them(tmp_path):
    """Of predict-02-b, whose trainings differ by these lines alone."""
    lab = PREDICT["predict-02-b"]
    for student in range(12):
        for name, _, edits in lab.experiment(student).runs:
            lines = changed_lines(name, edits)
            assert bool(lines) == (name != "right") and all(len(line) <= 118 for line in lines)
            for edit in edits:
                assert lines[0].startswith(f"  {name}: {edit.file}, line ")
                assert any(line[:6] == "    + " for line in lines)
    text = script(lab.experiment(4), lab.base)
    patches = re.findall(r"<<'END'\n(.*?\n)END\n", text, re.DOTALL)
    for patch, (_, _, edits) in zip(patches, lab.experiment(4).runs[1:], strict=True):
        copy = tmp_path / "copy"
        for file, *_ in edits:
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, copy / file)
        subprocess.run(["patch", "-s", "-p1"], cwd=copy, input=patch, text=True, check=True)
        for file, changed in edited(edits).items():
            assert (copy / file).read_text() == changed
