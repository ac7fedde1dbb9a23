"""How a number that is wrong is told: with enough digits, and with a factor where that says something."""

import pytest
import torch

from common.labs.graded import Expected, Graded
from common.labs.ranks import Case


def lines(right: torch.Tensor, *found: torch.Tensor) -> str:
    """What is said of these, each in a case of its own."""
    graded = [Graded(Case(ranks=1, width=5 + n), [Expected({"x": right})], [{"x": x}]) for n, x in enumerate(found)]
    return "\n".join(graded[0].lines(graded))


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (5480.03, 5480.03 + 4e-5, "5480.03004 instead of 5480.03."),
        (1.0, 1.0 + 3e-9, "1.000000003 instead of 1."),
        (0.5, 0.25, "0.25 instead of 0.5."),
    ],
)
def test_digits_are_printed_until_they_differ(right, wrong, said):
    assert said in lines(*torch.tensor([right, wrong], dtype=torch.float64))


def test_a_factor_needs_several_numbers_or_is_a_simple_ratio():
    many = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert "0.9701 times" in lines(many, many * 0.9701)
    one = torch.tensor(3.0, dtype=torch.float64)
    assert "times" not in lines(one, one * 0.9701) and "times" not in lines(torch.eye(2)[0], torch.eye(2)[0] * 2.13)
    assert "0.6667 times" in lines(one, one * 2 / 3) and "wrong sign" in lines(one, -one)
    assert "whatever the sizes" in lines(one, one * 0.9701, one * 0.9701), "of two cases, it says something"
    assert "width has the same number" in lines(one, one * 5, one * 6)
