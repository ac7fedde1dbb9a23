"""The three facts about autograd that lesson 3 states."""

from step03_zero import autograd_primer


def test_hooks_come_in_the_order_of_the_lesson():
    events = autograd_primer.hooks_and_their_order()
    backward = [f"the gradient of layer {i}'s {what} is known" for i in (1, 0) for what in ("output", "weight")]
    assert events[-4:] == backward


def test_autograd_sees_a_change_in_place_and_no_refill():
    objection, gradient = autograd_primer.versions()
    assert "modified by an inplace operation" in objection and gradient == 3
