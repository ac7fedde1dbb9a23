"""What labs of the kind predict name: each mistake's number is what its formula gives, said again as a ratio."""

import pytest

from common.labs.predict import Question, digits, grade
from tests.labs.test_kinds import PREDICT

# Lab, question, how a mistake begins -> what it gives, as a share of the right answer; N ranks
RATIOS = {
    ("predict-01-a", "second_step", "counts numbers"): lambda n: 2 / 8,  # two moments, of 4 bytes each
    ("predict-02-a", "bytes", "counts numbers"): lambda n: 1 / 4,
    ("predict-02-a", "bytes", "counts what all ranks send"): lambda n: n,
    ("predict-02-b", "divided", "takes the square root"): lambda n: n**0.5,
    ("predict-02-b", "divided", "divides squares"): lambda n: 1 / n,
    ("predict-02-b", "owners", "lets copies count"): lambda n: n**-0.5,
    ("predict-02-b", "owners", "takes the mean"): lambda n: 1 / n,
    ("predict-02-b", "twice", "counts the first"): lambda n: n,
    ("predict-03-a", "stage_1", "counts numbers"): lambda n: 1 / 4,
    ("predict-03-a", "stage_1", "all-reduces gradients"): lambda n: 3 / 2,
    ("predict-05-a", "one_stage", "counts the forward"): lambda n: 1 / 3,
    ("predict-05-a", "one_stage", "takes a layer"): lambda n: 1 / 2,  # a stage is two
    ("predict-05-a", "one_stage", "counts a bubble"): lambda n: (3 * n - 2) / (2 * n - 1),  # of n micro-batches
    ("predict-05-a", "two_stages", "halves"): lambda n: (n - 1 / 2) / (n + (n - 1) / 2),
    ("predict-06-a", "allgather", "counts the forward"): lambda n: 1 / 3,
    ("predict-06-a", "allgather", "all-reduces"): lambda n: 4 / 3,
    ("predict-06-a", "allgather", "counts keys or"): lambda n: 1 / 2,
    ("predict-06-a", "allgather", "counts one micro-batch"): lambda n: 1 / 2,
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
