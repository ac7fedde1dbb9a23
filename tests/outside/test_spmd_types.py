"""spmd-types as the judge: the sketches' types agree, and without the messages of any one call they do not."""

import pytest
from spmd_types import SpmdTypeError

from tests.outside.typed_sketches import SKETCHES

CALLS = [(step, number, call) for step, sketch in SKETCHES.items() for number, call in enumerate(sketch.calls())]
SEEN = [each for each in CALLS if not each[2].startswith("exchange")]


@pytest.mark.parametrize("step", SKETCHES)
def test_the_types_of_a_sketch_agree(step):
    SKETCHES[step].run()


@pytest.mark.parametrize("step, number, call", SEEN, ids=[f"{step}: {call}" for step, _, call in SEEN])
def test_a_sketch_without_a_message_is_rejected(step, number, call):
    with pytest.raises(SpmdTypeError):
        SKETCHES[step].run(silent=number)


def test_every_call_of_the_sketches_is_looked_at():
    found = {step: [call.split("(")[0] for of, _, call in CALLS if of == step] for step in SKETCHES}
    assert found[2] == ["dist.all_reduce"] * 2
    assert sorted(found[4]) == ["dist.all_reduce"] * 2 + ["gather"] * 3 + ["reduce_scatter"] * 2
    assert sorted(found[7]) == ["dist.all_reduce"] * 2 + ["exchange"] * 5


@pytest.mark.parametrize("number", [number for step, number, call in CALLS if call.startswith("exchange")])
def test_types_do_not_see_whose_rows_arrive(number):
    """The page says so: an all-to-all turns varying into varying. Parity with one process sees it."""
    SKETCHES[7].run(silent=number)
