"""The known-wrong variants of every step, and `patched`, which applies one."""

import contextlib

from tests.mutants.patches import fp8, hidden, hunts, multi_token, rope, settings, step03, step04, step06

STEPS = step03.STEPS | step04.STEPS | step06.STEPS  # by the step that they are wrong in
TABLES = [*STEPS.values(), hidden.ASYNCHRONY, hidden.NARROW, fp8.MUTANTS, multi_token.MUTANTS]
TABLES += [rope.MUTANTS, hunts.HUNTS, settings.SETTINGS]
EVERY = dict(item for mutants in TABLES for item in mutants.items())


def misfit(mutant: str) -> str:
    """Why a mutant cannot be applied: the code that it changes is not there any more. Empty if it can."""
    with contextlib.ExitStack() as stack:
        try:
            EVERY[mutant](stack)
        except Exception as error:
            return f"the patch of {mutant!r} no longer applies: {error}"
    return ""


@contextlib.contextmanager
def patched(mutant: str | None):
    """Apply a mutant of any step to this process for the duration; None: nothing.

    One that cannot be applied changes nothing, so that a world which observes many still observes the others. Its own
    test says so with `assert_applies`.
    """
    with contextlib.ExitStack() as stack:
        if mutant is not None and not misfit(mutant):
            EVERY[mutant](stack)
        yield


def assert_applies(*mutants: str) -> None:
    """Raise AssertionError that names the first of these mutants that cannot be applied, and why."""
    for mutant in mutants:
        assert not (why := misfit(mutant)), why
