"""Predict in step 3: what each stage of ZeRO sends."""

from common.compare import Record
from common.counts import count_parameters
from common.labs.predict import Experiment, Predict, Question
from common.labs.training import Launch
from common.launching.command_line import parse

TRAIN = "step03_zero/train.py"
BASE = "--layers 3 --heads 4 --ffn 64 --vocab 256 --seq-len 16 --data synthetic --device cpu --steps 2 --seed 1"
BASE += " --no-tie-embeddings"


def experiment(student: int) -> Experiment:
    # Others would let a formula that forgets a factor give what another one gives
    ranks, batches = ((4, 6), (6, 6), (4, 8), (6, 8))[student % 4]
    hidden = (32, 48, 72)[student // 4 % 3]
    flags = f"--hidden {hidden} --micro-batch 1 --global-batch {ranks * batches}"
    model = parse(3, f"{BASE} {flags}".split()).model_config
    count = count_parameters(model)
    size, ends = count.total, count.embedding + count.head + hidden
    part = 4 * (ranks - 1) / ranks  # bytes that a rank sends for each parameter that is gathered, or scattered
    one, two = part * 2 * size, part * (1 + batches) * size
    three = part * batches * (2 * size + size - ends)

    def usual(right: float) -> dict[str, float]:
        return {
            "counts all of the buffer, although a rank has 1/N of it already": right * ranks / (ranks - 1),
            "counts what all ranks send together": right * ranks,
            "counts 1/N of the buffer, the part that a rank keeps: it sends the N-1 others": right / (ranks - 1),
            "counts numbers, and each has 4 bytes": right / 4,
        }

    questions = (
        Question(
            "stage_1",
            "How many bytes does each rank send in a step with --zero 1?",
            0.01,
            one,
            "Gradients are reduce-scattered and weights gathered, once per step: as much as an all-reduce.",
            {
                "counts either gradients or weights, or 2 bytes per number, and float32 has 4": one / 2,
                "lets every micro-batch reduce its gradients, as stage 2 does": two,
                "all-reduces gradients: a rank that updates its part needs no more than that part": part * 3 * size,
            }
            | usual(one),
        ),
        Question(
            "stage_2",
            "And with --zero 2?",
            0.01,
            two,
            "Stage 2 keeps no whole gradients, so every micro-batch is reduce-scattered; weights are gathered once.",
            {
                "reduces once per step: then whole gradients would have to be kept": one,
                "gathers the weights for each micro-batch as well": part * 2 * batches * size,
                "all-reduces every micro-batch: of its sum a rank keeps a part": part * (1 + 2 * batches) * size,
                "forgets to gather the weights": part * batches * size,
                "counts 2 bytes per number, and float32 has 4": two / 2,
            }
            | usual(two),
        ),
        Question(
            "stage_3",
            "And with --zero 3?",
            0.01,
            three,
            "For every micro-batch: all weights are gathered for the forward and those of the layers again for the "
            "backward\n"
            "(the head's are still there, and the embedding's backward reads none), and all gradients are "
            "reduce-scattered.",
            {
                "gathers everything again for the backward": part * batches * 3 * size,
                "gathers once per micro-batch, as if weights stayed until the backward": part * batches * 2 * size,
                "reduces gradients once per step: then whole ones would have to be kept": (
                    part * (batches * (2 * size - ends) + size)
                ),
                "gathers embedding and head once per step: it is once per micro-batch, as nobody keeps them longer": (
                    part * (batches * (3 * size - 2 * ends) + ends)
                ),
                "forgets the gradients": part * batches * (2 * size - ends),
                "gathers everything again for the backward, and counts one micro-batch": part * 3 * size,
                "counts one micro-batch": three / batches,
                "counts the layers alone": part * batches * 3 * (size - ends),
                "all-reduces gradients: of their sum a rank keeps a part": three + part * batches * size,
                "counts 2 bytes per number, and float32 has 4": three / 2,
            }
            | usual(three),
        ),
    )
    trainings = tuple(Launch(TRAIN, f"{flags} --zero {stage}", ranks) for stage in (1, 2, 3))

    def measure(found: list[Record]) -> tuple[float, ...]:
        return tuple(record.records[1]["comm_bytes"]["shard"] for record in found)

    given = (
        f"{ranks} ranks train {size:,} parameters in float32, each {batches} micro-batches per step. Embedding, head\n"
    )
    given += f"and last norm have {ends:,} of them, the layers the rest."
    where = 'comm_bytes of step 1 in runs/0, runs/1 and runs/2/metrics.jsonl, for the group "shard"'
    return Experiment(given, questions, trainings, measure, where=where)


LABS = [
    Predict(
        id="predict-03-a",
        title="What each stage sends",
        minutes=15,
        task="""\
ZeRO saves memory. What does each stage send for it? `answer.toml` has the setting and the questions. Write your numbers
behind the `=`, then `check`: it stores them first, then runs the commands and compares. Your last answer makes
the score; your teacher sees the first one, too.

*Before:* lesson 3, "What it costs".
""",
        hints=(
            "A reduce-scatter or an all-gather of K bytes sends (N-1)/N K from every rank.",
            "For each stage, write down what is gathered and what is reduced, and whether once per step or per "
            "micro-batch.",
            "In stage 3, whose weights are still there when the backward begins, and whose backward needs no weights?",
        ),
        experiment=experiment,
        base=BASE,
    )
]
