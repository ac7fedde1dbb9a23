"""Step 8 trains the same in five dimensions as one process: layouts drawn from everything that the steps know."""

import functools
import os
import random

import pytest

from common.command_line import parse
from common.errors import UsageError
from step05_pipeline.schedules.catalogue import SCHEDULES
from step05_pipeline.stages import schedule_of
from step06_context_parallel.context_parallel import check_context_parallel
from step07_expert_parallel.moe import check_experts
from tests.parity.runs import SMALL, Result, assemble, assert_parity, run_cases, train_case, training_of

ALL = bool(os.environ.get("TEST_ALL"))
STEPS = "--steps 10" if ALL else "--steps 2"
COUNTS = {4: 8, 8: 28, 16: 30} if ALL else {4: 2, 8: 6, 16: 2}  # layouts by number of ranks

TRAINING = {  # what is trained; dense or with experts
    "model": ["", "--tie-embeddings", "--experts 8 --expert-ffn 20", "--experts 8 --expert-ffn 20 --top-k 3"],
    "shape": ["", "--kv-heads 1", "--vocab 257"],
    "optimizer": ["--optimizer sgd --lr 1e-2 --clip 0", "--optimizer adamw --lr 1e-3 --clip 0.5"],
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
}


def is_allowed(world: int, flags: str) -> bool:
    """Whether a run with these flags starts."""
    config = parse(8, f"{SMALL} {flags}".split())
    try:
        config.resolve_and_check(world)
        for check in (check_context_parallel, check_experts, schedule_of):
            check(config)
    except UsageError:
        return False
    return True


def draw(world: int, count: int) -> list[str]:
    """Different layouts of this many ranks, each with three dimensions at least."""
    chance, chosen = random.Random(world), []
    while len(chosen) < count:
        degrees = {name: chance.choice([1, 2, 2, 4]) for name in ("dp", "pp", "cp", "tp")}
        parts = [chance.choice(values) for values in (*TRAINING.values(), *LAYOUT.values())]
        dimensions = sum(size > 1 for size in degrees.values())
        if "--experts" in parts[0]:
            parts += [chance.choice(values) for values in EXPERTS.values()]
            degrees["ep"] = chance.choice([1, 2, 4, 8])
            dimensions += degrees["ep"] > 1
        flags = " ".join([*(f"--{name} {size}" for name, size in degrees.items()), *filter(None, parts), "--layers 4"])
        if dimensions >= 3 - (world == 4) and is_allowed(world, flags) and flags not in chosen:
            chosen.append(flags)
    return chosen


@functools.cache
def on_one_process(flags: str) -> Result:
    return assemble([train_case(7, flags)])


@pytest.mark.parametrize("world", COUNTS)
def test_equals_one_process(world):
    cases = [f"{STEPS} {flags}" for flags in draw(world, COUNTS[world])]
    for case, result in zip(cases, run_cases(world, 8, cases), strict=True):
        assert_parity(result, on_one_process(training_of(case)), f"{world} ranks, {case}")
