"""Predict in step 6: what travels round the ring."""

from common.compare import Record
from common.labs.predict import Experiment, Predict, Question
from common.labs.training import Launch

TRAIN = "step06_context_parallel/train.py"
BASE = "--heads 4 --ffn 64 --vocab 256 --data synthetic --device cpu --steps 2 --seed 1 --global-batch 2 "
BASE += "--micro-batch 1"


def experiment(student: int) -> Experiment:
    ranks, kv_heads, seq = 2 + student % 3, (1, 2)[student // 3 % 2], (48, 96)[student % 2]
    hidden, layers, batches = 64, (2, 3)[student // 2 % 2], 2
    block = (
        2 * seq // ranks * hidden // 4 * kv_heads * 4 * layers * batches
    )  # K and V of a rank, in all layers, per step
    forward, sums = (ranks - 1) * block, ranks * block
    ring, gather = 2 * forward + sums, 3 * forward
    mistakes = {
        "counts the forward alone": forward,
        "forgets the way home of the gradients": 3 * forward,
        "forgets the gradients of keys and values": 2 * forward,
        "sends keys and values of all query heads": ring * 4 / kv_heads,
        "counts keys or values alone": ring / 2,
        "counts one layer": ring / layers,
        "counts one micro-batch": ring / batches,
    }
    questions = (
        Question(
            "ring",
            "How many bytes of keys, values and their gradients does each rank send in a step with --cp-mode ring?\n"
            "(Gradients of weights are not counted.)",
            0.01,
            ring,
            "K and V travel N-1 hops in the forward and again in the backward, where the sums of their gradients "
            "follow, and\n"
            "take one hop more: home. That is 3N-2 times the K and V of a rank, in every layer and micro-batch.",
            mistakes,
        ),
        Question(
            "allgather",
            "And with --cp-mode allgather?",
            0.01,
            gather,
            "Two all-gathers and a reduce-scatter, each N-1 times a rank's K and V: the ring's way home is not needed.",
            {
                "takes the ring's bytes": ring,
                "gathers once, and keeps all keys until the backward": 2 * forward,
                "counts the forward alone": forward,
                "all-reduces the gradients: of their sum a rank needs what belongs to its own keys": 4 * forward,
                "gathers keys and values for all query heads": gather * 4 / kv_heads,
                "counts keys or values alone": gather / 2,
                "counts one layer": gather / layers,
                "counts one micro-batch": gather / batches,
                "counts a rank's own part as well, which need not travel": gather * ranks / (ranks - 1),
            },
        ),
    )
    flags = f"--cp {ranks} --hidden {hidden} --kv-heads {kv_heads} --layers {layers} --seq-len {seq}"
    trainings = tuple(Launch(TRAIN, f"{flags} --cp-mode {mode}", ranks) for mode in ("ring", "allgather"))

    def measure(found: list[Record]) -> tuple[float, ...]:
        return tuple(record.records[1]["comm_bytes"]["cp"] for record in found)

    given = (
        f"{ranks} ranks share sequences of {seq} tokens: {layers} layers of width {hidden}, 4 heads of queries and\n"
    )
    given += f"{kv_heads} of keys and values, float32, {batches} micro-batches of one sequence per step."
    return Experiment(given, questions, trainings, measure)


LABS = [
    Predict(
        id="predict-06-a",
        title="Round the ring and home",
        minutes=15,
        task="""\
What does a rank of the ring send in a step? `answer.toml` has the setting and the questions. Write your numbers behind
the `=`, then `check`: it stores them first, then runs the commands and compares.

*Before:* lesson 6, "What it costs".
""",
        hints=(
            "How many numbers are the keys and values of a rank? (Heads of queries do not travel.)",
            "How many hops do they take in the forward? What travels in the backward, and how far?",
            "Multiply by layers and micro-batches at the end.",
        ),
        experiment=experiment,
        base=BASE,
    )
]
