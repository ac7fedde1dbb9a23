"""Predictions and changes that real runs or sketches show: what ranks send or drop, and which norms they report."""

import re
import tempfile

import pytest

from common.config import TrainConfig
from common.model import Decoder
from common.start import environment
from step02_data_parallel import cost as data
from step02_data_parallel.data_parallel import fill_buckets
from step07_expert_parallel import sketch as sketch_7
from step08_5d import sketch as sketch_8
from tests.harness.observing import configure, place
from tests.harness.ranks import run_ranks, steps_of
from tests.house import test_answers
from tests.house.answers.exercises import QUICK, check, check_trained, exercise, lesson, numbers, same_text
from tests.parity.runs import train_here


def test_step_2_exercise_2():
    """The command of *Does it hide?* with the buckets of the exercise."""
    (command,) = re.findall(r"step02_data_parallel/train.py ((?:.*\\\n)*.*--trace .*)", lesson(2))
    flags = re.sub(r"\\\n|--run-dir \S+|--trace \S+", "", command)
    count = {}
    for megabytes in (2.5, 25):
        config = configure(2, re.sub(r"--bucket-mb \S+", f"--bucket-mb {megabytes}", flags), 2)
        parameters = list(Decoder(config.model_config).parameters())
        count[megabytes] = len(fill_buckets(parameters, config.dp_mode, config.bucket_mb))
    of, size = exercise(2, 2, "prediction"), 4 * sum(parameter.numel() for parameter in parameters)
    assert f"--bucket-mb {TrainConfig.bucket_mb:g}" in of.question and count == {2.5: 11, 25: 1}
    check(of, sum(m.count for m in data.messages(size / 4, 2, buckets=count[25])), size / 1e6)


def sent_to_shards() -> list[int]:
    """Bytes that a rank of two sends in each stage of ZeRO: their number does not depend on the tokens."""
    found, flags = [], f"--micro-batch 1 --steps 1 --seq-len 8 --device cpu {QUICK}"
    for stage in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            train_here(3, f"{flags} --zero {stage} --run-dir {folder}")
            found += [line["comm_bytes"]["shard"] for line in steps_of(folder)] if not environment().rank else []
    return found


def norms_of_step_8(*changes: tuple[str, str], degrees: tuple[int, ...] | None = None) -> float:
    """What clipping has computed in the sketch's first step on this rank, with changes of the answer's code."""
    norms = []
    watched = [("norm = squares.sqrt()", "norm = squares.sqrt(); NORMS.append(norm.item())"), *changes]
    module = test_answers.solved(8, watched, NORMS=norms)
    if degrees:
        module.DEGREES = module.DEGREES | {environment().world_size: degrees}
    module.train(*place())
    return norms[0]


ALL_COUNT = "if tp.rank() == 0:", "if True:"
SUMMED_TOO_OFTEN = (
    "dist.all_reduce(squares, group=pp)",
    "[dist.all_reduce(squares, group=each) for each in (dp_cp, pp)]",
)


def of_two_ranks() -> tuple[list, list]:
    norms = norms_of_step_8(), norms_of_step_8(ALL_COUNT), norms_of_step_8(SUMMED_TOO_OFTEN, degrees=(2, 1, 1, 1, 2))
    return sent_to_shards(), norms


@pytest.fixture(scope="module")
def two():
    return run_ranks(2, of_two_ranks)[0]


def test_step_3_exercise_2(two):
    sent, micro_batches = two[0], 4
    formulas = (micro_batches + 1) / 2, 3 * micro_batches / 2
    found = *(each / 1e6 for each in sent), sent[1] / sent[0], sent[2] / sent[0]
    check(exercise(3, 2, "prediction"), *formulas, *found)


def test_step_7_exercise_2():
    of, dropped = exercise(7, 2, "prediction"), []
    loads = [
        int(each) for each in numbers(of.question) if f" {each} " in of.question.split("```")[1].replace("\n", " ")
    ]
    (command,) = re.findall(r"train\.py ((?:.*\\\n)*.*--run-dir)", of.question)
    share = sum(loads) / 8
    for factor in (1, 1.5, 2):
        with tempfile.TemporaryDirectory() as folder:
            flags = command.replace("\\\n", " ").replace("--capacity-factor 1", f"--capacity-factor {factor}")
            train_here(7, f"{flags} {folder} {QUICK} --device cpu")
            dropped += [line["dropped"] for line in steps_of(folder)]
        if same_text():
            assert dropped[-1] == sum(max(0, load - factor * share) for load in loads)
    over = [load - share for load in loads if load > share]
    check_trained(of, share, 1.5 * share, 2 * share, *over, *dropped, 100 * dropped[0] / sum(loads))


def router_norms(module) -> list[float]:
    """Norms of `drouter` in the steps of step 7's sketch."""
    found, backward = [], module.backward

    def watched(*arguments):
        gradients = backward(*arguments)
        found.append(gradients[1].norm().item())
        return gradients

    module.backward = watched
    module.train(*place())
    return found


def of_one_rank() -> tuple[float, float, float]:
    """Of step 7's router with one choice per token the largest norm, and its first with the answer's code; the norm of
    step 8's exercise.
    """
    answer = router_norms(test_answers.solved(7))[0]
    sketch_7.CHOICES = 1
    return max(router_norms(sketch_7)), answer, norms_of_step_8()


@pytest.fixture(scope="module")
def one():
    return run_ranks(1, of_one_rank)[0]


def test_step_7_exercise_3(one):
    assert one[0] < 1e-6
    check(exercise(7, 3, "change"), one[1])


def test_step_8_exercise_2(one, two):
    alone, (together, all_count, too_often) = one[2], two[1]
    assert together == pytest.approx(alone, rel=1e-6)
    dp, _, cp, *_ = sketch_8.DEGREES[16]
    assert too_often / alone == pytest.approx(2**0.5, rel=1e-6) and (dp * cp) ** 0.5 == 2  # "twice as large"
    check(exercise(8, 2, "change"), alone, all_count)
