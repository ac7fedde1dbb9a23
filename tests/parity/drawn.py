"""Layouts of step 8, in up to five dimensions, drawn from everything that the steps know."""

import functools
import random

from common.errors import UsageError
from step05_pipeline.schedules.catalogue import SCHEDULES
from tests.harness.observing import configure
from tests.parity.cases import ALL
from tests.parity.runs import ADAMW, SGD, SMALL, TIED

EVERY = {(4, 2): 8, (8, 3): 28, (16, 3): 22, (16, 5): 8}  # (ranks, at least so many dimensions): layouts
SEED = 9  # with it, the layouts cover all that a test below asks for
COUNTS = EVERY if ALL else {(4, 2): 2, (8, 3): 4, (16, 5): 1}

TRAINING = {  # what is trained; dense or with experts
    "model": ["", TIED, "--experts 8 --expert-ffn 20", "--experts 8 --expert-ffn 20 --top-k 3"],
    "shape": ["", "--kv-heads 1", "--vocab 257"],
    "optimizer": [SGD, ADAMW],
    "documents": ["", "", "--mask-documents"],
}
EXPERTS = {
    "gate": ["--gate softmax", "--gate sigmoid --expert-groups 4 --node-limit 2"],
    "balance": ["--aux-coef 0.1 --z-coef 0.01", "--balance bias --bias-rate 0.003"],
    "capacity": ["", "--capacity-factor 0.9"],
    "others": ["", "--shared-experts 1 --dense-layers 1"],
}
LAYOUT = {
    "schedule": [f"--schedule {name}" for name in SCHEDULES],
    "zero": [*(f"--zero {stage}" for stage in range(4)), "--zero 2 --zero-reduce step", "--zero 3 --zero-replicas 2"],
    "recompute": ["", "--recompute selective", "--recompute full"],
    "tp_mode": ["--tp-mode plain", "--tp-mode overlap", "--tp-mode chunked", "--no-sequence-parallel"],
    "cp_mode": ["--cp-mode ring", "--cp-mode allgather", "--cp-mode ulysses"],
    "cp_split": ["--cp-split zigzag", "--cp-split contiguous", "--cp-split striped"],
    "micro_batch": ["--micro-batch 1", "--micro-batch 3"],
    "bucket": ["", "--bucket-mb 0.01"],
    "fused": ["", "--no-fused"],
    "order": ["", "--order dp,pp,cp,tp", "--order pp,tp,dp,cp", "--order cp,dp,tp,pp"],
}


def is_allowed(world: int, flags: str) -> bool:
    try:
        return bool(configure(8, f"{SMALL} {flags}", world))
    except UsageError:
        return False


@functools.cache
def draw(world: int, least: int, count: int) -> list[str]:
    """Different layouts of this many ranks, in which at least so many of the five dimensions are divided."""
    chance, chosen = random.Random(f"{world} {least} {SEED}"), []
    while len(chosen) < count:
        degrees = {name: chance.choice([1, 2, 2, 4]) for name in ("dp", "pp", "cp", "tp")}
        parts = [chance.choice(values) for values in (*TRAINING.values(), *LAYOUT.values())]
        dimensions = sum(size > 1 for size in degrees.values())
        if "--experts" in parts[0]:
            parts += [chance.choice(values) for values in EXPERTS.values()]
            degrees["ep"] = chance.choice([1, 2, 4, 8])
            dimensions += degrees["ep"] > 1
        flags = " ".join([*(f"--{name} {size}" for name, size in degrees.items()), *filter(None, parts), "--layers 4"])
        if dimensions >= least and is_allowed(world, flags) and flags not in chosen:
            chosen.append(flags)
    return chosen
