"""Every parallel mechanism equals one process under NCCL's semantics too, in an order that cannot hang."""

import contextlib
import os
from typing import NamedTuple
from unittest import mock

import pytest

from step01_single_gpu.running.run import Run
from tests.harness.asynchrony import Seen, asynchrony
from tests.harness.communicators import play_strictly
from tests.harness.ranks import run_ranks
from tests.mutants.patches import assert_applies  # loads every step once in the fork server
from tests.mutants.patches.hidden import ASYNCHRONY
from tests.parity.runs import TOLERANCE, Result, assemble, differences, reference, train_case, training_of

BASE = "--hidden 16 --heads 4 --kv-heads 2 --ffn 24 --seq-len 8 --global-batch 4 --micro-batch 1 --steps 2"
BASE += " --optimizer adamw --lr 1e-3 --clip 0.5 --bucket-mb 0.01"
HYBRID = "--global-batch 8 --zero-replicas 2"  # two micro-batches on each of 4 ranks
EP = "--experts 8 --expert-ffn 8 --shared-experts 1"
TP, PP, CP = "--micro-batch 4 --tp 2", "--layers 4 --pp 2", "--micro-batch 4 --cp 4"
LAYOUTS = [  # ranks, step, flags: a line for whatever communicates in a new way
    *((2, 2, f"--dp-mode {mode}") for mode in ("naive", "overlap", "bucket")),
    *((2, 3, f"--zero {stage} --recompute full") for stage in (1, 2, 3)),
    *((4, 3, f"{HYBRID} --zero {stage}") for stage in (1, 2, 3)),
    (4, 3, f"{HYBRID} --zero 3 --zero-reduce step --recompute full"),
    *((2, 4, f"{TP} --tp-mode {mode}") for mode in ("plain", "overlap", "chunked")),
    *((2, 4, f"{TP} --tp-mode {mode} --no-sequence-parallel") for mode in ("plain", "overlap")),
    (4, 4, "--micro-batch 4 --tp 4 --tp-mode chunked"),
    *((2, 5, f"{PP} --schedule {name}") for name in ("1f1b", "zb-h1", "zbv", "dualpipe", "interleaved")),
    (4, 5, f"{PP} --micro-batch 2 --tp 2 --tp-mode chunked --schedule interleaved"),
    (4, 5, f"{PP} --zero 3 --schedule zbv"),
    (8, 5, f"{PP} --dp 2 --tp 2 --zero 2 --schedule zb-h1"),
    *((4, 6, f"{CP} --cp-split {split}") for split in ("zigzag", "contiguous")),
    (4, 6, f"{CP} --recompute full --mask-documents --seq-len 64"),
    *((4, 6, f"{CP} --cp-mode {mode}") for mode in ("allgather", "ulysses")),
    (2, 6, "--micro-batch 2 --cp 2 --zero 3"),
    (4, 6, "--micro-batch 2 --cp 2 --tp 2 --tp-mode chunked --cp-mode allgather"),
    (4, 6, f"{PP} --micro-batch 2 --cp 2 --schedule zb-h1"),
    (2, 7, f"{EP} --ep 2 --balance bias --recompute full"),
    (2, 7, f"{EP} --ep 2 --zero 3"),
    (2, 7, f"{EP} --ep 2 --experts 64 --top-k 1"),  # most of which get no token
    (4, 7, f"{EP} --ep 4 --tp 2 --cp 2 --micro-batch 2 --capacity-factor 0.9 --zero 1"),
    (4, 7, f"{EP} --ep 2 --zero 2 {HYBRID} --z-coef 0.1"),
    (4, 7, f"{EP} {PP} --ep 2 --micro-batch 2 --cp 2 --schedule zb-h1"),
    (4, 7, f"{EP} {PP} --ep 2 --dp 2 --schedule dualpipe --balance bias"),
]
WIDE = [  # one step each, for the order of the operations: numbers are not compared
    (8, 4, f"{HYBRID} --tp 2 --zero 2"),
    (8, 7, f"{EP} {PP} --ep 4 --micro-batch 2 --cp 2 --tp 2 --zero 1 --schedule dualpipev"),
]
MORE_WIDE = [
    (8, 5, f"{PP} --dp 2 --tp 2 --zero 3 --schedule interleaved --tp-mode chunked"),
    (8, 6, f"{PP} --cp 2 --dp 2 --zero 3 --schedule zbv --cp-split contiguous"),
    (8, 5, f"{PP} --dp 2 --tp 2 --zero 1 --schedule dualpipe"),
    (8, 5, f"{PP} {HYBRID} --zero 3 --schedule 1f1b"),
    (8, 5, "--layers 8 --pp 4 --zero 1 --global-batch 8 --schedule zbv"),
    (8, 5, "--layers 8 --pp 8 --schedule zb-h2"),
    (8, 6, f"{PP} --micro-batch 2 --cp 2 --tp 2 --zero 1"),
    (8, 6, f"{HYBRID} --micro-batch 2 --cp 4 --zero 2 --cp-mode ulysses"),
    (8, 7, f"{EP} {PP} --ep 4 --dp 2 --tp 2 --zero 3 --schedule zbv --capacity-factor 1"),
]
WIDE += MORE_WIDE if os.environ.get("TEST_ALL") else []
PLANTED = {  # mutant: layout, what says so
    "bucket waited for at once": ((2, 2, "--dp-mode bucket"), "all_reduce of dp_cp: waited for at once"),
    "sum over replicas waited for": ((4, 3, f"{HYBRID} --zero 1"), "all_reduce of replica: waited for at once"),
    "last bucket not waited for": ((2, 2, "--dp-mode bucket"), "all_reduce of dp_cp: never waited for"),
    "weights of the previous region waited for": ((2, 3, "--zero 1 --recompute full"), "differences: {'loss': nan"),
    "output freed while it is sent": ((2, 5, f"{PP} --schedule 1f1b"), "exchange of pp_forward: memory was freed"),
    "partial sum changed while it is sent": ((2, 4, f"{TP} --tp-mode chunked"), "exchange of tp: a tensor was changed"),
    "launches in the order of completion": ((8, 4, f"{HYBRID} --tp 2 --zero 2"), "ranks wait for each other forever"),
    "receive buffer overwritten while it is read": ((4, 6, f"{CP} --cp-split zigzag"), "differences: {'loss': nan"),
    "sums changed while they travel": ((4, 6, f"{CP} --cp-split zigzag"), "exchange of cp: a tensor was changed"),
    "tokens used before they arrive": ((2, 7, f"{EP} --ep 2 --zero 3"), "differences: {'loss': nan"),
    "gradients of tokens not waited for": ((2, 7, f"{EP} --ep 2 --zero 3"), "all_to_all of ep: never waited for"),
}


class Outcome(NamedTuple):
    result: Result
    seen: tuple[Seen, ...]  # by rank


def train_each(cases: list[tuple[int, str, str | None]]) -> list[tuple[dict, Seen]]:
    found = []
    for step, flags, mutant in cases:
        # One that uses what has not arrived computes NaN, where a run would end
        numbers = mock.patch.object(Run, "check_finite") if mutant else contextlib.nullcontext()
        with asynchrony() as seen, numbers:
            found.append((train_case(step, f"{BASE} {flags}", mutant), seen))
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple, Outcome]:
    """By (layout, mutant); one world for each number of ranks."""
    found, every = {}, [(layout, None) for layout in LAYOUTS + WIDE]
    every += [(layout, name) for name, (layout, _) in PLANTED.items()]
    for ranks in (2, 4, 8):
        cases = [case for case in every if case[0][0] == ranks]
        flat = [(layout[1], layout[2] + " --steps 1" * (layout in WIDE), name) for layout, name in cases]
        for case, parts in zip(cases, zip(*run_ranks(ranks, train_each, flat), strict=True), strict=True):
            trained, seen = zip(*parts, strict=True)
            found[case] = Outcome(assemble(trained), seen)
    return found


def check(outcome: Outcome, layout: tuple) -> None:
    """Raise AssertionError if a run would be wrong on NCCL, or might hang there."""
    faults = [f"rank {rank}: {each}" for rank, seen in enumerate(outcome.seen) for each in seen.faults]
    assert not faults, "; ".join(faults[:4])
    for seen in outcome.seen:  # a bucket's sum over replicas hides behind the next one; the last of a step has none
        for name in ("all_reduce of dp_cp", "all_reduce of replica", "all_reduce of expert_replica"):
            assert "naive" in layout[2] or seen.waited_at_once(name) <= 2, f"{name}: waited for at once"
    play_strictly([seen.order for seen in outcome.seen], [seen.members for seen in outcome.seen])
    if layout not in WIDE:
        _, step, flags = layout
        found = differences(outcome.result, reference(training_of(f"{BASE} {flags}"), step if step > 5 else 1))
        wrong = {name: value for name, value in found.items() if not value < TOLERANCE}
        assert not wrong, f"differences: {wrong}"


@pytest.mark.parametrize("layout", LAYOUTS + WIDE, ids=str)
def test_mechanisms_rely_on_waits_alone(outcomes, layout):
    check(outcomes[layout, None], layout)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_rejected(outcomes, name):
    assert_applies(name)
    layout, message = PLANTED[name]
    with pytest.raises(AssertionError, match=message):
        check(outcomes[layout, name], layout)


def test_every_mutant_is_tried():
    assert PLANTED.keys() == ASYNCHRONY.keys()
