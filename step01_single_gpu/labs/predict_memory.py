"""Predict in step 1: what Adam keeps, and what each further sequence costs."""

import torch

from common.compare import Record
from common.counts import count_parameters
from common.labs.predict import Experiment, Predict, Question
from common.labs.training import Launch
from common.launching.command_line import parse
from step01_single_gpu.cost import layer_activations, saved_activations, total_bytes

TRAIN = "step01_single_gpu/train.py"
BASE = "--heads 4 --kv-heads 4 --vocab 256 --data synthetic --device cpu --seed 1 --steps 2 --measure-memory"
MORE = 8  # sequences of the larger micro-batch
# Width, layers and tokens of a sequence: answers are so far apart that none is right for another variant
SIZES = (64, 4, 128), (64, 3, 128), (128, 2, 160), (96, 3, 192), (96, 4, 192), (128, 4, 192)


def experiment(student: int) -> Experiment:
    hidden, layers, seq = SIZES[student % len(SIZES)]
    flags = f"--hidden {hidden} --ffn {2 * hidden} --layers {layers} --seq-len {seq} --global-batch {MORE}"
    model = parse(1, f"{BASE} {flags}".split()).model_config
    count = count_parameters(model).total
    sequence = total_bytes(saved_activations(model, 1, seq, torch.float32))
    layer = total_bytes(layer_activations(model, 1, seq, torch.float32, "fused", "none"))
    head = total_bytes(saved_activations(model, 1, seq, torch.float32), "log-probabilities")
    questions = (
        Question(
            "second_step",
            "The peak of the second step is higher than that of the first. By how many bytes?",
            0.01,
            8 * count,
            "Adam's two moments, in float32, are made in the first update, after the first peak: 8 bytes per "
            "parameter.",
            {
                "counts one moment, and Adam keeps two": 4 * count,
                "counts numbers, of which there are two per parameter, and each has 4 bytes": 2 * count,
                "counts weights or gradients as well, which were there before": 12 * count,
                "counts all of the 16 bytes per parameter, of which 8 were there before": 16 * count,
            },
        ),
        Question(
            "sequence",
            "With micro-batches of more sequences the peak is higher. By how many bytes for each further sequence?",
            0.12,
            sequence,
            "What autograd keeps of a sequence: of each layer, and of the head with the loss. The measured value is a\n"
            "little higher, as the backward needs room to work. `python -m step01_single_gpu.memory_model` lists it.",
            {
                "counts one layer": layer,
                "counts log-probabilities alone": head,
                "lets attention keep its scores, a number for each pair of tokens in each head: fused, it keeps none": (
                    sequence + 4 * layers * model.heads * seq**2
                ),
                "counts 2 bytes per number; this run is in float32": sequence / 2,
                "multiplies by all sequences": sequence * MORE,
            },
        ),
    )
    trainings = (Launch(TRAIN, f"{flags} --micro-batch {MORE}"), Launch(TRAIN, f"{flags} --micro-batch 1"))

    def measure(found: list[Record]) -> tuple[float, ...]:
        first, second = (found[0].value(step, "peak_memory_bytes") for step in (0, 1))
        return second - first, (second - found[1].value(1, "peak_memory_bytes")) / (MORE - 1)

    given = (
        f"One process trains {count:,} parameters in float32 with AdamW: {layers} layers of width {hidden}, 4 heads\n"
    )
    given += f"(as many of keys and values), MLPs of width {2 * hidden}, {model.vocab} tokens, sequences of {seq}."
    return Experiment(given, questions, trainings, measure)


LABS = [
    Predict(
        id="predict-01-a",
        title="What fills the memory",
        minutes=20,
        task="""\
Where does the memory of a training step go? `answer.toml` has the setting and the questions. Write your numbers behind
the `=`, then `check`: it stores them first, then runs the commands and compares.

*Before:* lesson 1, "The problem" and "What it costs".
""",
        hints=(
            "When does Adam make its moments: before the first backward, or in the first update?",
            "List what a layer's backward needs of its forward: inputs of matrices, of norms, of the attention, of "
            "SwiGLU.",
            "For the second question, add up 4 bytes for each number that autograd keeps of one sequence: all "
            "layers, then the head, where the largest tensor has a number for each token and each word of the "
            "vocabulary.",
        ),
        experiment=experiment,
        base=BASE,
    )
]
