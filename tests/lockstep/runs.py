"""A step's real train() on several ranks beside one process, under a mutant or without one."""

import functools
import importlib
from contextlib import nullcontext
from typing import NamedTuple

from common.launching.command_line import STEP_NAMES
from common.lockstep.compare import Difference, first_difference
from common.lockstep.explain import describe
from common.lockstep.notes import Seen, Whole
from common.lockstep.observe import observe, prepare
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks
from tests.mechanisms.step08.test_fused import with_kernels
from tests.mutants.patches import patched
from tests.parity.runs import SMALL, training_of

STEPS = 2  # what is wrong with an update shows in the second one


class Case(NamedTuple):
    """A training, with a mutant or without one. `kernels`: step 8's, in Triton's interpreter."""

    step: int
    flags: str
    mutant: str | None = None
    kernels: bool = False


def see(case: Case, whole: bool = False) -> Seen:
    """What this rank sees of two steps."""
    with patched(case.mutant), with_kernels() if case.kernels else nullcontext():
        config = prepare(configure(case.step, f"{SMALL} {case.flags}"), STEPS)
        train = importlib.import_module(f"{STEP_NAMES[case.step - 1]}.train")
        return observe(train, config, mesh_of(config), whole)


def see_all(cases: list[Case]) -> list[Seen]:
    return [see(case) for case in cases]


@functools.cache
def whole_of(flags: str) -> Whole:
    """The same training in one process, by the earliest step that can."""
    step = 7 if "--experts" in flags else 6 if "--mask-documents" in flags else 1
    return Whole(see(Case(step, flags), whole=True).notes)


def compare(ranks: int, cases: list[Case]) -> list[tuple[Difference | None, dict[str, str]]]:
    """The first difference of each case, and what there is to say of it."""
    found = []
    for case, seen in zip(cases, zip(*run_ranks(ranks, see_all, cases, timeout=600), strict=True), strict=True):
        whole = whole_of(training_of(case.flags))
        difference, _ = first_difference(whole, seen)
        found.append((difference, describe(difference, whole, seen) if difference else {}))
    return found
