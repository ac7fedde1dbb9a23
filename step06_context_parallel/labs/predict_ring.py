"""Predict in step 6: what travels round the ring."""

from common.compare import Record
from common.labs.predict import Experiment, Predict, Question
from common.labs.training import Launch

TRAIN = "step06_context_parallel/train.py"
BASE = "--heads 4 --ffn 64 --vocab 256 --data synthetic --device cpu --steps 2 --seed 1 --global-batch 5 "
BASE += "--micro-batch 1"


def experiment(student: int) -> Experiment:
    # Sizes of which no two are alike, nor a half, a third or a quarter: formulas that forget one give different numbers
    ranks, kv_heads, seq = (3, 5)[student % 2], (1, 2)[student // 2 % 2], (60, 120)[student // 4 % 2]
    hidden, layers, batches = 64, (6, 7)[student // 8 % 2], 5
    block = (
        2 * seq // ranks * hidden // 4 * kv_heads * 4 * layers * batches
    )  # K and V of a rank, in all layers, per step
    forward, sums = (ranks - 1) * block, ranks * block
    ring, gather = 2 * forward + sums, 3 * forward

    def usual(right: float) -> dict[str, float]:
        return {
            "sends keys and values of all query heads": right * 4 / kv_heads,
            "counts keys or values alone, or 2 bytes per number, and float32 has 4": right / 2,
            "counts one layer": right / layers,
            "counts one micro-batch": right / batches,
            "counts numbers, and each has 4 bytes": right / 4,
            "counts what all ranks send together, or takes the keys of all tokens for those of a rank": right * ranks,
        }

    questions = (
        Question(
            "ring",
            "How many bytes of keys, values and their gradients does each rank send in a step with --cp-mode ring? "
            "(Gradients of weights are not counted.)",
            0.01,
            ring,
            "K and V travel N-1 hops in the forward and again in the backward, where the sums of their gradients "
            "follow, and take one hop more: home. That is 3N-2 times the K and V of a rank, in every layer and "
            "micro-batch.",
            {
                "counts the forward alone": forward,
                "forgets the way home of the gradients": 3 * forward,
                "forgets the gradients of keys and values": 2 * forward,
                "forgets that keys and values travel again in the backward": forward + sums,
                "lets everything travel N hops: keys and values need not come home": 3 * sums,
                "counts one hop of each": 3 * block,
            }
            | usual(ring),
        ),
        Question(
            "allgather",
            "And with --cp-mode allgather?",
            0.01,
            gather,
            "Two all-gathers and a reduce-scatter, each N-1 times a rank's K and V: the ring's way home is not needed.",
            {
                "takes the ring's bytes": ring,
                "gathers once and keeps all keys until the backward, or forgets the gradients": 2 * forward,
                "counts the forward alone": forward,
                "all-reduces the gradients: of their sum a rank needs what belongs to its own keys": 4 * forward,
                "counts a rank's own part as well, which need not travel": gather * ranks / (ranks - 1),
            }
            | usual(gather),
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
    where = 'comm_bytes of step 1 in runs/0 and runs/1/metrics.jsonl, for the group "cp"'
    return Experiment(given, questions, trainings, measure, where=where)


LABS = [
    Predict(
        id="predict-06-a",
        title="Round the ring and home",
        minutes=15,
        task="""\
What does a rank of the ring send in a step? `answer.toml` has the setting and the questions. Write your numbers behind
the `=`, then `check`: it stores them first, then runs the commands and compares. Your last answer makes the score;
your teacher sees the first one, too.

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
