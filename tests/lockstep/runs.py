"""A step's real train() on several ranks beside one process, under a mutant or without one."""

import functools
import importlib

from common.launching.command_line import STEP_NAMES
from common.lockstep.compare import first_difference
from common.lockstep.explain import describe
from common.lockstep.observe import observe, prepare
from common.lockstep.records import Seen, Whole
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks
from tests.mutants.patches import patched
from tests.parity.runs import SMALL, training_of

STEPS = 2  # what is wrong with an update shows in the second one


def see(step: int, flags: str, mutant: str | None = None, whole: bool = False) -> Seen:
    """What this rank sees of two steps by the train.py of `step`."""
    with patched(mutant):
        config = prepare(configure(step, f"{SMALL} {flags}"), STEPS)
        return observe(importlib.import_module(f"{STEP_NAMES[step - 1]}.train"), config, mesh_of(config), whole)


def see_cases(step: int, flags: str, mutants: list[str | None]) -> list[dict | str]:
    """On a rank: what it sees under each mutant."""
    return [see(step, flags, mutant) for mutant in mutants]


@functools.cache
def whole_of(flags: str) -> Whole:
    """The same training in one process, by the earliest step that can."""
    step = 7 if "--experts" in flags else 6 if "--mask-documents" in flags else 1
    return Whole(see(step, flags, whole=True).records)


def say(step: int, ranks: int, flags: str, mutants: list[str | None]) -> list[dict[str, str] | None]:
    """What `common.lockstep` says of each mutant; None where it finds no difference."""
    whole, found = whole_of(training_of(flags)), []
    for seen in zip(*run_ranks(ranks, see_cases, step, flags, mutants, timeout=600), strict=True):
        difference, _ = first_difference(whole, seen)
        found.append(difference and describe(difference, whole, seen))
    return found
