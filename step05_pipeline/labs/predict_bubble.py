"""Predict in step 5: how long a step of a pipeline takes, with its bubble."""

from common.compare import Record
from common.labs.predict import Experiment, Predict, Question
from common.labs.training import Launch

TRAIN = "step05_pipeline/train.py"
BASE = "--hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 16 --data synthetic --device cpu --seed 1"
BASE += " --steps 4 --micro-batch 1"
STAGE = 2  # layers of a rank, and so the most stages that it may have
# Relative: ranks sleep, so a busy machine measures more than is right, and hardly ever less. Whoever lets every rank
# wait for all others, 1/7 more with 4 ranks, is told all the same; so is who halves a bubble twice, 1/8 less with 3
LATE, EARLY = 0.11, 0.01
# Ranks, and ms of a layer: answers are so far apart that none is right for another variant, and so long that what a
# busy machine adds to a step, some 0.2 s where ten processes share two cores, makes none of them wrong
DELAYS = (3, 70), (4, 60), (3, 100), (4, 85)


def experiment(student: int) -> Experiment:
    ranks, delay = DELAYS[student % len(DELAYS)]
    layers, batches = STAGE * ranks, ranks
    unit = layers / ranks * 3 * delay * 1e-3  # F and B of one micro-batch on one rank
    plain, interleaved = (batches + ranks - 1) * unit, (batches + (ranks - 1) / 2) * unit

    def usual(right: float) -> dict[str, float]:
        return {
            "forgets the bubble": batches * unit,
            "lets one rank do all layers": right * ranks,
            "lets a backward take as long as a forward": right * 2 / 3,
            "counts the forward alone": right / 3,
            "takes a layer for all that a rank has": right / STAGE,
            "lets the micro-batches go through the ranks one after the other": batches * ranks * unit,
        }

    questions = (
        Question(
            "one_stage",
            "How many seconds does a step take with --schedule 1f1b?",
            LATE,
            plain,
            "m + p - 1 times F + B: the last rank works without a pause, but begins p - 1 forwards late, and p - 1 "
            "backwards follow.",
            {
                "lets every rank wait for all others, although the first starts at once": (batches + ranks) * unit,
                "counts a bubble for the forwards and one for the backwards, each of F + B": (
                    (batches + 2 * (ranks - 1)) * unit
                ),
                "has a bubble of p - 1 forwards: as many backwards follow at the end": (
                    (batches + (ranks - 1) / 3) * unit
                ),
                "takes the bubble of two stages on each rank: with one, it is twice as long": interleaved,
            }
            | usual(plain),
            EARLY,
        ),
        Question(
            "two_stages",
            "And with --schedule interleaved, two stages on each rank?",
            LATE,
            interleaved,
            "The bubble consists of stages, and these are half as long: m + (p - 1)/2 times F + B.",
            {
                "has the bubble of one stage per rank": plain,
                "halves the bubble twice: it has p - 1 stages, as before, and only each of them is half as long": (
                    (batches + (ranks - 1) / 4) * unit
                ),
                "has a bubble of p - 1 forwards of a stage: as many backwards follow at the end": (
                    (batches + (ranks - 1) / 6) * unit
                ),
                "halves all of the time, and only the bubble becomes shorter": plain / 2,
                "doubles the bubble: stages are twice as many, and half as long": (batches + 2 * (ranks - 1)) * unit,
            }
            | usual(interleaved),
            EARLY,
        ),
    )
    flags = f"--pp {ranks} --layers {layers} --global-batch {batches} --layer-delay {delay}"
    trainings = tuple(Launch(TRAIN, f"{flags} --schedule {name}", ranks) for name in ("1f1b", "interleaved"))

    def measure(found: list[Record]) -> tuple[float, ...]:
        return tuple(min(record.value(step, "step_time_s") for step in (1, 2, 3)) for record in found)

    given = (
        f"{layers} layers on {ranks} ranks, {batches} micro-batches. --layer-delay {delay} lets each layer's forward\n"
    )
    given += f"take {delay} ms, and its backward twice that; all else takes no time worth counting."
    where = "The least step_time_s from step 1 on in runs/0 and runs/1/metrics.jsonl"
    return Experiment(given, questions, trainings, measure, where=where)


LABS = [
    Predict(
        id="predict-05-a",
        title="How long is the bubble?",
        minutes=15,
        task="""\
How long does a step of a pipeline take, the bubble included? `answer.toml` has the setting and the questions. Write
your numbers behind the `=`, then `check`: it stores them first, then runs the commands and compares. Your last answer
makes the score; your teacher sees the first one, too. (Ranks sleep as long as a layer is said to take, so this works on
two cores; close what else you run all the same.)

*Before:* lesson 5, "What it costs".
""",
        hints=(
            "How long do a forward and a backward of one micro-batch take on one rank, with its share of the layers?",
            "When does the last rank begin, and what is left to do when it has finished?",
            "Draw it: `python -m step05_pipeline.schedules --schedule 1f1b --pp 2 --micro-batches 4`, then "
            "interleaved.",
        ),
        experiment=experiment,
        base=BASE,
    )
]
