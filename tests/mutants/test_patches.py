"""A patch whose code has changed fails alone: the other mutants are observed all the same."""

import pytest

from step03_zero.unit import Unit
from step03_zero.zero import Zero
from tests.mutants import patches
from tests.mutants.patches import EVERY, assert_applies, patched
from tests.mutants.patches.mutants import Mutants

STALE = Mutants(r"""
@ step03_zero.unit:Unit.free
half: self.gathering = None => pass
right: self.gathering = None => pass
@ step03_zero.zero:Zero.finish
half: nothing like this => pass
@ step03_zero.zero:Zero.was_renamed
gone: some => other
@ step03_zero.unit:Unit.free
no code: self.gathering = None => this is no Python
""")


@pytest.mark.parametrize("name", EVERY)
def test_every_patch_applies(name):
    assert_applies(name)


@pytest.mark.parametrize("name", STALE)
def test_one_that_does_not_changes_nothing(name, monkeypatch):
    monkeypatch.setattr(patches, "EVERY", STALE)
    before = Unit.free, Zero.finish
    with patched(name):
        assert ((Unit.free, Zero.finish) == before) == (name != "right"), "all changes of a mutant or none"
    if name == "right":
        return assert_applies(name)
    with pytest.raises(AssertionError, match=f"the patch of '{name}' no longer applies: "):
        assert_applies("right", name)
