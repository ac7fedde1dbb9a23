"""Predict in step 2: bytes of an all-reduce, seconds of a slow link, and the norm after three changes."""

from common.compare import Record
from common.counts import count_parameters
from common.labs.copies import Edit
from common.labs.predict import Experiment, Predict, Question
from common.labs.training import SMALL, Launch
from common.launching.command_line import parse

TRAIN = "step02_data_parallel/train.py"
FLOAT32 = "--layers 2 --heads 4 --ffn 48 --vocab 256 --seq-len 16 --data synthetic --device cpu --steps 2 --seed 1"

SHARED = (4, 3), (5, 2), (4, 5), (5, 3)  # ranks and micro-batches of each
SHALLOW = "--hidden 64 --layers 1"  # few tensors, so that their latencies fit into a short check
# Latency in us: answers are so far apart that none is right for another variant
LATENCIES = 30_000, 60_000, 38_000, 76_000, 48_000, 96_000
TRAVEL = 5  # rounds that the bytes of all gradients take: then neither is what a formula may forget


def sent(record: Record, group: str) -> float:
    """Bytes that rank 0 sent in the last step, in one group."""
    return record.records[max(record.records)]["comm_bytes"][group]


def parameters(flags: str) -> tuple[int, int]:
    """How many parameters the model of these flags has, and in how many tensors."""
    model = parse(1, flags.split()).model_config
    return count_parameters(model).total, 9 * model.layers + (2 if model.tie_embeddings else 3)


def bytes_of(student: int) -> Experiment:
    # With 2 or 3 ranks, or with as many micro-batches, formulas that forget a factor would give the same as others
    ranks, batches = SHARED[student % len(SHARED)]
    hidden = (32, 48, 72)[student // len(SHARED) % 3]
    flags = f"--hidden {hidden} --global-batch {ranks * batches} --micro-batch 1"
    size, _ = parameters(f"{FLOAT32} {flags}")
    right = 2 * (ranks - 1) / ranks * 4 * size
    mistakes = {
        "sums in every micro-batch (all but the last one only add up)": right * batches,
        "counts a reduce-scatter or an all-gather, and an all-reduce is both; or 2 bytes per gradient, although sums "
        "have at least float32": right / 2,
        "counts all N parts of the buffer, although a rank's own needs no trip": 8 * size,
        "counts numbers, and each has 4 bytes": right / 4,
        "counts what all ranks send together; each sends 1/N of it": right * ranks,
        "sends each gradient once: a reduce-scatter sends (N-1)/N of them, and so does an all-gather": 4 * size,
        "sends all gradients to each other rank: a ring passes on 1/N of them at a time": 4 * size * (ranks - 1),
        "lets each rank send as much as all micro-batches of all ranks need": right * ranks * batches,
    }
    how = f"2(N-1)/N times 4 bytes times {size:,} gradients: once per step, whatever the number of micro-batches."
    ask = "How many bytes of gradients does each rank send in a step?"
    question = Question("bytes", ask, 0.01, right, how, mistakes)
    given = f"{ranks} ranks train {size:,} parameters in float32, each {batches} micro-batches per step."
    where = 'bytes: comm_bytes of step 1 in runs/0/metrics.jsonl, for the group "dp_cp"'
    trainings = (Launch(TRAIN, flags, ranks),)
    return Experiment(given, (question,), trainings, lambda found: (sent(found[0], "dp_cp"),), where=where)


def link_of(student: int) -> Experiment:
    alpha = LATENCIES[student % len(LATENCIES)]
    size, tensors = parameters(f"{FLOAT32} {SHALLOW}")
    bandwidth = round(4 * size / (TRAVEL * 2 * alpha * 1e-6) / 1e9, 5)  # GB/s
    travel = 4 * size / (1e9 * bandwidth)  # 2(N-1)/N of it, with two ranks
    rounds = 2 * alpha * 1e-6  # latencies of one all-reduce
    each, once = ((number * rounds + travel) for number in (tensors + 2, 3))
    without = "forgets that every message also takes the latency"
    half = "lets an all-reduce take one latency, although it has 2(N-1) rounds"
    numbers = "forgets the loss and the norm, two all-reduces of one number each"
    bytes = {
        "counts the latencies, and forgets that the bytes take time as well": -travel,
        "lets half of the bytes travel: a reduce-scatter sends (N-1)/N of them, and so does an all-gather": -travel / 2,
        "lets twice the bytes travel: a rank sends 1/N of them in each round": travel,
    }
    naive = Question(
        "naive",
        "Each gradient has its own all-reduce (--dp-mode naive). How many seconds does the link keep the step waiting?",
        0.05,
        each,
        f"{tensors} + 2 all-reduces of 2(N-1) latencies each, and 2(N-1)/N times the bytes / bandwidth.",
        {
            without: travel,
            half: (each + travel) / 2,
            numbers: each - 2 * rounds,
            "lets an all-reduce of two ranks take one latency, although it has two rounds, and forgets the loss and "
            "the norm": tensors * rounds / 2 + travel,
            "counts one all-reduce for all gradients": once,
            "lets the bytes of all gradients travel with each of them": tensors * (rounds + travel) + 2 * rounds,
        }
        | {said: each + more for said, more in bytes.items()},
    )
    bucket = Question(
        "bucket",
        "All gradients are one bucket (--dp-mode bucket), and nothing hides it. How many seconds now?",
        0.09,
        once,
        "The same bytes, but the latencies of three all-reduces: that is what buckets are for.",
        {
            without: travel,
            half: (once + travel) / 2,
            numbers: once - 2 * rounds,
            "counts an all-reduce for each gradient": each,
            "lets all bytes travel three times: the loss and the norm are a number each": once + 2 * travel,
        }
        | {said: once + more for said, more in bytes.items()},
    )
    flags = f"{SHALLOW} --global-batch 2 --micro-batch 1"
    link = f"--link {alpha},{bandwidth:g}"
    # The shorter a step, the more a busy machine disturbs it, and the more of them it takes until one is undisturbed
    steps = 8 if alpha < 50_000 else 5
    modes = ("naive", "--steps 8"), ("naive", f"--steps 3 {link}")
    modes += ("bucket", "--steps 8"), ("bucket", f"--steps {steps} {link}")
    trainings = tuple(Launch(TRAIN, f"{flags} --dp-mode {mode} {more}", 2) for mode, more in modes)

    def measure(found: list[Record]) -> tuple[float, ...]:
        times = [min(run.value(step, "step_time_s") for step in run.records if step) for run in found]
        return times[1] - times[0], times[3] - times[2]

    given = f"Two ranks train {size:,} parameters ({tensors} tensors) in float32, with one micro-batch per step. A\n"
    given += f"simulated link takes {alpha / 1000:g} ms per round of messages, and carries {bandwidth * 1000:g} MB/s.\n"
    given += "Besides the gradients, the loss and the gradient norm are all-reduced once: a number each."
    where = (
        "naive: the least step_time_s after step 0 in runs/1/metrics.jsonl, less that in runs/0; bucket: runs/3, runs/2"
    )
    return Experiment(given, (naive, bucket), trainings, measure, where=where)


CHANGES = (
    Edit(
        "step02_data_parallel/data_parallel.py",
        "            bucket.start_over()\n        self.next_bucket = 0",
        "            bucket.flat.div_(self.group.size)\n            bucket.start_over()\n        self.next_bucket = 0",
    ),
    Edit(TRAIN, "/ batches.target_tokens", "/ (batches.target_tokens / config.accumulation_steps)"),
    Edit("step02_data_parallel/data_parallel.py", "parameter.spec.owner &= group.rank == 0", "pass"),
    Edit(
        "step02_data_parallel/data_parallel.py",
        "            bucket.start_over()\n        self.next_bucket = 0",
        "            collectives.all_reduce(bucket.flat, self.group)\n            bucket.start_over()\n"
        "        self.next_bucket = 0",
    ),
)


def norms_of(student: int) -> Experiment:
    # M differs from N, from the sequences of a rank and from their roots, so that a mistake's number is its own
    ranks, size, batches = ((3, 1, 4), (3, 2, 5), (5, 1, 3))[student % 3]
    sequences = ranks * size * batches
    asked = [index for index in range(len(CHANGES)) if index != (3, 0, 1, 2)[student // 3 % 4]]
    cancels = "lets it cancel: it would, in the updates of Adam, but the norm is taken before"
    turned = "turns it round: that is the right norm over the changed one"
    questions = (
        Question(
            "divided",
            "After the sum over ranks, every gradient is divided by their number. By which factor does the gradient "
            "norm of step 0 change?",
            0.01,
            1 / ranks,
            "Each loss is a share of the mean over the whole batch already, so the sum needs no division.",
            {
                f"takes the loss of a rank for its own mean, whose sum has to be divided, or {cancels}": 1.0,
                "takes the square root, as if ranks were independent: a factor of all gradients is one of the norm": (
                    ranks**-0.5
                ),
                "divides squares, and so twice: the root comes after": ranks**-2.0,
                turned: float(ranks),
                "divides by the number of micro-batches": 1 / batches,
            },
        ),
        Question(
            "own_mean",
            "The losses of each micro-batch are summed, and divided by 1/M of the batch's tokens instead of all of "
            "them; M is the number of a rank's micro-batches. By which factor does the norm change?",
            0.01,
            batches,
            "Every gradient is M times as large, so the norm is. Adam would hide it; clipping would not.",
            {
                turned: 1 / batches,
                "takes the square root, as if they were independent": batches**0.5,
                "counts the micro-batches of all ranks, where M are those of one": float(ranks * batches),
                "counts ranks": float(ranks),
                "multiplies squares, and so twice: the root comes after": float(batches**2),
                cancels: 1.0,
            }
            | ({"counts sequences, of which a micro-batch has several": float(size * batches)} if size > 1 else {}),
        ),
        Question(
            "owners",
            "All ranks count all gradients in the norm, and none is left out as a copy. By which factor does the norm "
            "change?",
            0.01,
            ranks**0.5,
            "Squares are added up: N times their sum, so the square root of N in the norm.",
            {
                "forgets that squares are added up, and then the root is taken": float(ranks),
                f"lets copies count for nothing, because they are equal, or {cancels}": 1.0,
                turned: ranks**-0.5,
                "takes the mean over copies": 1 / ranks,
                "takes the root of the number of micro-batches": batches**0.5,
            },
        ),
        Question(
            "twice",
            "What was summed over ranks is all-reduced once more. By which factor does the norm of step 0 change?",
            0.01,
            ranks,
            "After the first all-reduce, all ranks have the same sum, and the second adds up N copies of it.",
            {
                "takes the second all-reduce for a mean, or who turns it round": 1 / ranks,
                "counts the first all-reduce as well: it is in the norm of the right code, too": float(ranks**2),
                "takes the square root, as if the copies were independent": ranks**0.5,
                "takes an all-reduce of equal numbers for one that changes nothing": 1.0,
                "adds the sum up twice: each of the ranks has it": 2.0,
            },
        ),
    )
    trainings = (Launch(TRAIN, f"--global-batch {sequences} --micro-batch {size}", ranks),) * 4

    def measure(found: list[Record]) -> tuple[float, ...]:
        right, *changed = (run.value(0, "grad_norm") for run in found)
        return tuple(norm / right for norm in changed)

    given = (
        f"{ranks} ranks share {sequences} sequences, {size} per micro-batch. Somebody changes a line; each change "
        "is made alone."
    )
    questions = tuple(questions[index] for index in asked)
    names = "right", *(question.name for question in questions)
    changes = (), *((CHANGES[index],) for index in asked)
    where = "Each answer is grad_norm of step 0 in its own runs/*/metrics.jsonl, over that in runs/right"
    return Experiment(given, questions, trainings, measure, names, changes, where)


TASK = """\
{what}
`answer.toml` has the setting and the questions. Write your numbers behind the `=`, then `check`: it stores them first,
then runs the commands and compares. Your last answer makes the score; your teacher sees the first one, too.

*Before:* lesson 2, {section}.
"""
ROUNDS = '"The idea" (an all-reduce takes 2(N-1) rounds, each with its latency) and "What it costs"'
LABS = [
    Predict(
        id="predict-02-a",
        title="What an all-reduce sends",
        minutes=10,
        task=TASK.format(what="How many bytes does data parallelism send?", section='"What it costs"'),
        hints=(
            "An all-reduce is a reduce-scatter and an all-gather. How much of its buffer does a rank send in each?",
            "When is a gradient summed over ranks, if a step has several micro-batches? In which type?",
            "The lesson's formula has three factors: one for the two halves, one for the N ranks, one for the bytes.",
        ),
        experiment=bytes_of,
        base=FLOAT32,
    ),
    Predict(
        id="predict-02-b",
        title="What the gradient norm tells",
        minutes=15,
        task=TASK.format(what="Three changes, each of one line: what does the norm say?", section='"What goes wrong"'),
        hints=(
            "Write the gradient of the right code as a sum over ranks and micro-batches, and what each change does "
            "to it.",
            "A factor of all gradients is a factor of the norm. And if the squares are counted several times?",
            "N ranks, M micro-batches: the answers are made of one of these numbers each.",
        ),
        experiment=norms_of,
        base=SMALL,
    ),
    Predict(
        id="predict-02-c",
        title="Why buckets",
        minutes=15,
        task=TASK.format(what="How long does a slow link keep a step waiting?", section=ROUNDS),
        hints=(
            "A message takes the latency and then its bytes over the bandwidth. How many messages does one "
            "all-reduce send?",
            "A ring of N ranks takes N-1 rounds to reduce-scatter and N-1 to gather, each with 1/N of the bytes.",
            "Which part of the time depends on how many all-reduces carry the gradients, and which does not?",
        ),
        experiment=link_of,
        base=FLOAT32,
    ),
]
