"""The pairs of curves that the diagnosis is judged by: one process, and the same training in a layout, right or wrong.

`python -m tests.diagnosis.pairs judged` trains the pairs of that name, in some minutes, and stores their curves in
judged.json beside this file. It also trains them in float64, which shows whether each of them is what it is taken for.
Three sets: the diagnosis was written with `judged` in sight, and the others were looked at once, when it was finished.
"""

import argparse
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.diagnosis.runs import SMALL, Curve, Training, train_all

STEPS = 32
ADAMW, FAST = "--optimizer adamw --lr 1e-3", "--optimizer adamw --lr 3e-3 --warmup 4"
SGD = "--optimizer sgd --lr 0.2 --clip 0"
F32, BF16 = "float32", "bfloat16"
MOE = "--experts 8 --expert-ffn 24"


@dataclass(frozen=True)
class Pair:
    """`reference` is a run of one process, `other` what is compared with it; `bug` says what is wrong there, if any."""

    dtype: str
    reference: Training
    other: Training
    bug: str = ""

    @property
    def name(self) -> str:
        return f"{self.bug or 'rounding'}, {self.dtype}, {self.other.flags.partition(f'--steps {STEPS} ')[2]}"

    @property
    def layout(self) -> dict[str, int]:
        """The degrees that a run record would hold of the other run."""
        words = self.other.flags.split()
        degrees = {word[2:].replace("-", "_"): int(words[at + 1]) for at, word in enumerate(words) if word in DEGREES}
        return {"global_batch": 8, "dp": 1} | degrees


DEGREES = ("--dp", "--tp", "--pp", "--cp", "--ep", "--micro-batch", "--zero-replicas")


def pairs_of(table: list[tuple], first_seed: int) -> list[Pair]:
    """Rows of (dtype, training, step, ranks, layout[, mutant[, since]]). What follows a | is wrong there.

    Both runs of a pair have the shape of the model that the layout names, and experts if the step is that of experts.
    """
    found = []
    for number, (dtype, training, step, ranks, layout, *rest) in enumerate(table):
        mutant, since = (*rest, *(None, 0)[len(rest) :])
        layout, _, wrong = layout.partition(" | ")
        shape = " ".join(re.findall(r"--(?:layers|kv-heads) \d+", layout))
        experts = MOE if step == 7 and MOE not in training else ""
        flags = " ".join(f"{SMALL} {training} {experts} --dtype {dtype} --seed {first_seed + number}".split())
        flags += f" --steps {STEPS}"
        reference = Training(7 if step == 7 else 1, 1, f"{flags} --micro-batch 8 {shape}".rstrip(), None, since)
        other = Training(step, ranks, f"{flags} {layout} {wrong}".rstrip(), mutant, since)
        found.append(Pair(dtype, reference, other, mutant or wrong))
    return found


JUDGED = [
    # ---- rounding
    (F32, ADAMW, 2, 2, "--dp 2 --micro-batch 1"),
    (F32, FAST, 3, 4, "--dp 4 --micro-batch 2 --zero 2"),
    (F32, SGD, 4, 2, "--tp 2 --micro-batch 4"),
    (F32, FAST, 4, 2, "--tp 2 --micro-batch 8 --tp-mode chunked"),
    (F32, ADAMW, 5, 2, "--pp 2 --micro-batch 1 --schedule 1f1b"),
    (F32, SGD, 5, 2, "--pp 2 --micro-batch 2 --schedule zb-h1"),
    (F32, ADAMW, 6, 2, "--cp 2 --micro-batch 2"),
    (F32, FAST, 6, 2, "--cp 2 --micro-batch 4 --cp-mode ulysses --cp-split contiguous"),
    (F32, ADAMW, 5, 4, "--pp 2 --tp 2 --micro-batch 2 --recompute full"),
    (F32, f"{ADAMW} {MOE}", 7, 2, "--dp 2 --ep 2 --micro-batch 2"),
    (BF16, FAST, 2, 2, "--dp 2 --micro-batch 4"),
    (BF16, ADAMW, 3, 2, "--dp 2 --micro-batch 1 --zero 3"),
    (BF16, ADAMW, 4, 2, "--tp 2 --micro-batch 2"),
    (BF16, SGD, 4, 2, "--tp 2 --micro-batch 4 --no-sequence-parallel"),
    (BF16, FAST, 5, 2, "--pp 2 --micro-batch 2 --schedule 1f1b"),
    (BF16, ADAMW, 5, 2, "--pp 2 --micro-batch 1 --schedule dualpipev --layers 4"),
    (BF16, SGD, 6, 2, "--cp 2 --micro-batch 1"),
    (BF16, ADAMW, 6, 2, "--cp 2 --micro-batch 2 --cp-mode allgather"),
    (BF16, FAST, 6, 4, "--cp 2 --tp 2 --micro-batch 4"),
    (BF16, f"{ADAMW} {MOE}", 7, 2, "--tp 2 --ep 2 --micro-batch 4"),
    # ---- bugs
    (F32, ADAMW, 5, 2, "--pp 2 --micro-batch 2", "missing share of micro-batches"),
    (F32, FAST, 2, 2, "--dp 2 --micro-batch 2", "missing share of the global mean"),
    (F32, SGD, 4, 2, "--tp 2 --micro-batch 8", "norm gradients not summed"),
    (F32, ADAMW, 4, 2, "--tp 2 --micro-batch 8", "parallel loss of gathered logits"),
    (F32, ADAMW, 6, 2, "--cp 2 --micro-batch 4", "positions from zero"),
    (F32, FAST, 3, 2, "--dp 2 --micro-batch 2 --zero 1", "weights of the step before"),
    (F32, ADAMW, 7, 2, "--dp 2 --ep 2 --micro-batch 2", "experts' gradients doubled"),
    (F32, ADAMW, 1, 1, "--micro-batch 4 | --lr 1.1e-3"),
    (F32, FAST, 1, 1, "--micro-batch 2", "moments lost", 16),
    (F32, ADAMW, 1, 1, "--micro-batch 2", "an update skipped"),
    (BF16, FAST, 4, 2, "--tp 2 --micro-batch 4", "loss averaged over tp"),
    (BF16, ADAMW, 4, 2, "--tp 2 --micro-batch 4", "same weights on all ranks"),
    (BF16, SGD, 6, 2, "--cp 2 --micro-batch 8", "gradients not reduced over cp"),
    (BF16, ADAMW, 2, 2, "--dp 2 --micro-batch 2", "same samples everywhere"),
    (BF16, ADAMW, 3, 4, "--dp 4 --micro-batch 2 --zero 3 --zero-replicas 2", "norm counts replicas"),
    (BF16, FAST, 5, 2, "--pp 2 --micro-batch 2", "loss of one rank"),
    (BF16, ADAMW, 7, 2, "--dp 2 --ep 2 --micro-batch 1", "auxiliary loss of each micro-batch"),
    (BF16, FAST, 1, 1, "--micro-batch 4 | --lr 2e-3"),
    (BF16, ADAMW, 1, 1, "--micro-batch 4", "data from the beginning again", 16),
    (BF16, FAST, 1, 1, "--micro-batch 4", "data in another order"),
]
FRESH = [
    # ---- rounding
    (F32, FAST, 2, 4, "--dp 4 --micro-batch 1 --dp-mode overlap"),
    (F32, SGD, 3, 2, "--dp 2 --micro-batch 4 --zero 3"),
    (F32, ADAMW, 4, 4, "--tp 4 --micro-batch 2"),
    (F32, SGD, 4, 2, "--tp 2 --micro-batch 1 --no-sequence-parallel --tp-mode plain"),
    (F32, FAST, 5, 2, "--pp 2 --micro-batch 2 --schedule afab"),
    (F32, ADAMW, 5, 4, "--pp 2 --dp 2 --micro-batch 1 --schedule zbv --layers 4"),
    (F32, SGD, 6, 2, "--cp 2 --micro-batch 8 --cp-mode allgather"),
    (F32, FAST, 6, 4, "--cp 4 --micro-batch 2 --cp-split striped"),
    (F32, ADAMW, 1, 1, "--micro-batch 1 --attention naive --recompute selective"),
    (F32, f"{FAST} {MOE}", 7, 2, "--cp 2 --ep 2 --micro-batch 4"),
    (BF16, ADAMW, 2, 2, "--dp 2 --micro-batch 2 --recompute full"),
    (BF16, SGD, 3, 4, "--dp 4 --micro-batch 1 --zero 1"),
    (BF16, FAST, 4, 2, "--tp 2 --micro-batch 8 --tp-mode chunked"),
    (BF16, ADAMW, 4, 4, "--tp 4 --micro-batch 4"),
    (BF16, SGD, 5, 2, "--pp 2 --micro-batch 4 --schedule zb-h2"),
    (BF16, FAST, 5, 4, "--pp 4 --micro-batch 2 --layers 4"),
    (BF16, ADAMW, 6, 2, "--cp 2 --micro-batch 4 --cp-split contiguous"),
    (BF16, FAST, 6, 2, "--cp 2 --micro-batch 2 --cp-mode ulysses"),
    (BF16, SGD, 1, 1, "--micro-batch 1 --attention naive"),
    (BF16, f"{FAST} {MOE}", 7, 2, "--dp 2 --ep 2 --micro-batch 4"),
    # ---- bugs
    (F32, SGD, 4, 2, "--tp 2 --micro-batch 2", "norms counted on every rank"),
    (F32, FAST, 4, 2, "--tp 2 --micro-batch 8", "a divided weight counted on one rank"),
    (F32, ADAMW, 4, 2, "--tp 2 --micro-batch 4 --no-sequence-parallel --kv-heads 1", "K/V replicas drift"),
    (F32, ADAMW, 3, 4, "--dp 4 --micro-batch 1 --zero 2 --zero-replicas 2", "divided by shards and not by replicas"),
    (F32, FAST, 5, 2, "--pp 2 --micro-batch 1 --schedule zb-h1", "norms forgotten by split backwards"),
    (F32, ADAMW, 6, 2, "--cp 2 --micro-batch 4", "boundary labels lost"),
    (F32, FAST, 6, 2, "--cp 2 --micro-batch 2", "dK/dV one hop short"),
    (F32, FAST, 1, 1, "--micro-batch 4", "warm-up again", 12),
    (F32, ADAMW, 1, 1, "--micro-batch 2", "count of updates lost", 20),
    (F32, ADAMW, 1, 1, "--micro-batch 2", "ten times the epsilon"),
    (BF16, ADAMW, 2, 2, "--dp 2 --micro-batch 1", "averaged over ranks"),
    (BF16, FAST, 3, 2, "--dp 2 --micro-batch 1 --zero 2", "only the last micro-batch in the shard"),
    (BF16, SGD, 4, 2, "--tp 2 --micro-batch 8 --tp-mode plain", "g takes its slice in the backward"),
    (BF16, ADAMW, 6, 2, "--cp 2 --micro-batch 4", "loss averaged over a rank's tokens"),
    (BF16, FAST, 7, 2, "--dp 2 --ep 2 --micro-batch 2", "combined without gates"),
    (BF16, SGD, 5, 2, "--pp 2 --micro-batch 2", "targets of another micro-batch"),
    (BF16, FAST, 1, 1, "--micro-batch 2", "gradients doubled once"),
    (BF16, ADAMW, 1, 1, "--micro-batch 4 --attention naive", "one token ahead"),
    (BF16, SGD, 1, 1, "--micro-batch 4 | --lr 0.1"),
    (BF16, FAST, 1, 1, "--micro-batch 4", "another second beta"),
]


TIED = "--tie-embeddings"
LAST = [
    # ---- rounding
    (F32, FAST, 2, 2, "--dp 2 --micro-batch 4 --dp-mode naive"),
    (F32, ADAMW, 4, 2, "--tp 2 --micro-batch 2 --tp-mode plain"),
    (F32, SGD, 5, 4, "--pp 4 --micro-batch 1 --layers 4"),
    (F32, FAST, 6, 4, "--cp 2 --dp 2 --micro-batch 2"),
    (F32, f"{FAST} {TIED}", 5, 2, "--pp 2 --micro-batch 4 --schedule zb-h1"),
    (BF16, SGD, 2, 4, "--dp 4 --micro-batch 2"),
    (BF16, FAST, 3, 2, "--dp 2 --micro-batch 2 --zero 2"),
    (BF16, FAST, 4, 2, "--tp 2 --micro-batch 1"),
    (BF16, ADAMW, 5, 2, "--pp 2 --micro-batch 4 --schedule afab"),
    (BF16, SGD, 6, 2, "--cp 2 --micro-batch 4 --cp-split striped"),
    # ---- bugs
    (F32, SGD, 3, 2, "--dp 2 --micro-batch 2 --zero 1", "norm of the local shard"),
    (F32, f"{ADAMW} {TIED}", 5, 2, "--pp 2 --micro-batch 2", "stale tied gradient"),
    (F32, ADAMW, 6, 2, "--cp 2 --micro-batch 2 --cp-mode allgather", "dK/dV of the own queries only"),
    (F32, FAST, 7, 2, "--dp 2 --micro-batch 2", "experts' gradients averaged"),
    (F32, ADAMW, 1, 1, "--micro-batch 2", "hunt of step 1"),
    (BF16, FAST, 2, 2, "--dp 2 --micro-batch 2 --bucket-mb 0.02", "stale bucket"),
    (BF16, f"{FAST} {TIED}", 5, 2, "--pp 2 --micro-batch 2", "tied matrix counted twice"),
    (BF16, SGD, 6, 2, "--cp 2 --micro-batch 4", "merged without rescaling"),
    (BF16, ADAMW, 1, 1, "--micro-batch 4", "moments lost", 16),
    (BF16, SGD, 1, 1, "--micro-batch 4 | --lr 0.22"),
]
SETS = {"judged": (JUDGED, 100), "fresh": (FRESH, 200), "last": (LAST, 300)}


def pairs(name: str) -> list[Pair]:
    table, first_seed = SETS[name]
    return pairs_of(table, first_seed)


def in_float64(run: Training) -> Training:
    return replace(run, flags=run.flags.replace(f"--dtype {F32}", "--dtype float64").replace(BF16, "float64"))


def untrue(pair: Pair, curves: dict[Training, Curve]) -> str | None:
    """Why a pair is not what it is taken for: in float64, rounding leaves 1e-12 between two curves, and a bug more."""
    first, second = (np.array(curves[in_float64(run)]) for run in (pair.reference, pair.other))
    largest = np.max(np.abs(second - first) / np.abs(first))
    return None if (largest > 1e-9 if pair.bug else largest < 1e-12) else f"{pair.name}: {largest:.1e} in float64"


def file_of(name: str) -> Path:
    return Path(__file__).parent / f"{name}.json"


def stored(name: str) -> list[dict]:
    """The pairs that are stored: name, dtype, bug, layout, and two curves, [losses, norms] each."""
    return json.loads(file_of(name).read_text())


def as_stored(curve: Curve) -> list[list[float]]:
    return [[float(f"{value:.9g}") for value in column] for column in zip(*curve)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis.pairs", description=__doc__)
    parser.add_argument("name", choices=SETS)
    chosen = parser.parse_args().name
    runs = [run for pair in pairs(chosen) for run in (pair.reference, pair.other)]
    curves = train_all([*runs, *map(in_float64, runs)])
    if wrong := [why for pair in pairs(chosen) if (why := untrue(pair, curves))]:
        raise SystemExit("\n".join(["not what they are taken for:", *wrong]))
    lines = [
        {"name": pair.name, "dtype": pair.dtype, "bug": pair.bug, "layout": pair.layout}
        | {"curves": [as_stored(curves[run]) for run in (pair.reference, pair.other)]}
        for pair in pairs(chosen)
    ]
    file_of(chosen).write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")
    print(f"{len(lines)} pairs: {file_of(chosen)}")
