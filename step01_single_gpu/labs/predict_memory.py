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
LAYERS = 2  # few, so that who forgets the head is told
# Width and tokens of a sequence: answers are so far apart that none is right for another variant, and the room that the
# backward needs to work is as small as it gets
SIZES = (96, 80), (128, 128), (128, 160), (160, 192), (160, 256), (192, 256)


def experiment(student: int) -> Experiment:
    (hidden, seq), layers = SIZES[student % len(SIZES)], LAYERS
    flags = f"--hidden {hidden} --ffn {2 * hidden} --layers {layers} --seq-len {seq} --global-batch {MORE}"
    model = parse(1, f"{BASE} {flags}".split()).model_config
    counted = count_parameters(model)
    count = counted.total
    saved = saved_activations(model, 1, seq, torch.float32)
    sequence = total_bytes(saved)
    layer = total_bytes(layer_activations(model, 1, seq, torch.float32, "fused", "none"))
    questions = (
        Question(
            "second_step",
            "The peak of the second step is higher than that of the first. By how many bytes?",
            0.01,
            8 * count,
            "Adam's two moments, in float32, are made in the first update, after the first peak: 8 bytes per "
            "parameter.",
            {
                "counts one moment, or two of 2 bytes each: Adam keeps two, in float32": 4 * count,
                "counts numbers, of which there are two per parameter, and each has 4 bytes": 2 * count,
                "counts weights or gradients as well, which were there before": 12 * count,
                "counts all of the 16 bytes per parameter, of which 8 were there before": 16 * count,
                "counts the layers alone, and Adam updates embedding and head as well": (
                    8 * (count - counted.embedding - counted.head)
                ),
            },
        ),
        Question(
            "sequence",
            "With micro-batches of more sequences the peak is higher. By how many bytes for each further sequence?",
            0.06,
            sequence,
            "What autograd keeps of a sequence: of each layer, and of the head with the loss. The measured value "
            "differs a little, as the backward frees what it has used and needs room to work. "
            "`python -m step01_single_gpu.memory_model` lists it.",
            {
                "counts one layer": layer,
                "counts the head with its loss alone": total_bytes(saved, "head", "log-probabilities"),
                "counts the layers alone, and the head with its loss keeps something, too": layers * layer,
                "forgets what the MLPs keep": sequence - total_bytes(saved, "mlp"),
                "forgets what attention keeps": sequence - total_bytes(saved, "attention"),
                "forgets what the norms keep, their inputs, and these normalised": (
                    sequence - total_bytes(saved, "norms")
                ),
                "keeps the input of each layer alone, as full recomputation does": 4 * layers * seq * hidden,
                "counts numbers, and each has 4 bytes": sequence / 4,
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
    where = "second_step: peak_memory_bytes of step 1 less that of step 0, in runs/0/metrics.jsonl; sequence: that of "
    where += f"step 1 less that of step 1 in runs/1, over {MORE - 1}"
    return Experiment(given, questions, trainings, measure, where=where)


LABS = [
    Predict(
        id="predict-01-a",
        title="What fills the memory",
        minutes=20,
        task="""\
Where does the memory of a training step go? `answer.toml` has the setting and the questions. Write your numbers behind
the `=`, then `check`: it stores them first, then runs the commands and compares. Your last answer makes the score;
your teacher sees the first one, too.

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
