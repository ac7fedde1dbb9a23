"""Predict in step 5: how long a step of a pipeline takes, with its bubble."""

from common.compare import Record
from common.labs.predict import Experiment, Predict, Question
from common.labs.training import Launch

TRAIN = "step05_pipeline/train.py"
BASE = "--hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 16 --data synthetic --device cpu --seed 1"
BASE += " --steps 4 --micro-batch 1"
# In ms, by ranks: answers are so far apart that none is right for another variant
DELAYS = {2: (40, 50, 100), 3: (39, 48, 80)}


def experiment(student: int) -> Experiment:
    ranks = 2 + student % 2
    delay = DELAYS[ranks][student // 2 % 3]
    layers, batches = 2 * ranks, ranks
    unit = layers / ranks * 3 * delay * 1e-3  # F and B of one micro-batch on one rank
    plain, interleaved = (batches + ranks - 1) * unit, (batches + (ranks - 1) / 2) * unit
    mistakes = {
        "forgets the bubble": batches * unit,
        "lets every rank wait for all others, although the first starts at once": (batches + ranks) * unit,
        "lets one rank do all layers": (batches + ranks - 1) * unit * ranks,
        "lets a backward take as long as a forward": plain * 2 / 3,
        "counts the forward alone": plain / 3,
        "takes a layer for a stage: a rank has several": plain * ranks / layers,
        "counts a bubble for the forwards and one for the backwards, each of F + B": (batches + 2 * (ranks - 1)) * unit,
    }
    questions = (
        Question(
            "one_stage",
            "How many seconds does a step take with --schedule 1f1b?",
            0.1,
            plain,
            "m + p - 1 times F + B: the last rank works without a pause, but begins p - 1 forwards late and is "
            "followed by\n"
            "p - 1 backwards.",
            mistakes,
        ),
        Question(
            "two_stages",
            "And with --schedule interleaved, two stages on each rank?",
            0.1,
            interleaved,
            "The bubble consists of stages, and these are half as long: m + (p - 1)/2 times F + B.",
            {
                "has the bubble of one stage per rank": plain,
                "halves all of the time, and only the bubble becomes shorter": plain / 2,
            }
            | mistakes,
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
    return Experiment(given, questions, trainings, measure)


LABS = [
    Predict(
        id="predict-05-a",
        title="How long is the bubble?",
        minutes=15,
        task="""\
How long does a step of a pipeline take, the bubble included? `answer.toml` has the setting and the questions. Write
your numbers behind the `=`, then `check`: it stores them first, then runs the commands and compares. (Ranks sleep as
long as a layer is said to take, so this works on two cores; close what else you run all the same.)

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
