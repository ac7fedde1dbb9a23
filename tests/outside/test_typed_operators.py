"""spmd-types as the judge of step 4's operators: it simulates ranks, and compares numbers with the claimed types."""

import zlib
from types import SimpleNamespace

import pytest
import torch
from spmd_types import I, P, R, S, rules
from spmd_types.rulecheck import RuleCheckError, rulecheck

from common import collectives
from common.group import Group
from step04_tensor_parallel import operators

X = torch.arange(48.0).reshape(2, 4, 6).sin()  # (batch, sequence, width)
OPERATORS = {  # name -> types before and after
    "copy_to_ranks": (I, R),
    "sum_over_ranks": (P, I),
    "gather_sequence": (S(1), R),
    "reduce_scatter_sequence": (P, S(1)),
}


@pytest.fixture(autouse=True)
def simulated_ranks(monkeypatch):
    """Theirs draw summands by a function for GPUs only, and want one dimension more of a reduce-scatter."""

    def noise(like: torch.Tensor, *key) -> torch.Tensor:
        random = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
        return torch.randn(like.shape, generator=random, dtype=like.dtype)

    def reduce_scatter(output: torch.Tensor, *arguments, **options):
        return real(output[None], *arguments, **options)

    real = collectives._reduce_scatter
    monkeypatch.setattr("spmd_types.rulecheck._seeded_noise", noise)
    monkeypatch.setattr(collectives, "_reduce_scatter", reduce_scatter)


def claimed(function, before, after) -> type:
    """An autograd function of (x, process group) with the claim that it turns type `before` into type `after`."""
    sent = {(I, R): rules.convert, (I, P): rules.convert, (R, I): rules.convert}
    sent |= {(P, I): rules.all_reduce, (P, R): rules.all_reduce}
    sent |= {(P, S(1)): rules.reduce_scatter, (S(1), R): rules.all_gather}

    class Claimed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            if group.size() == 1:  # the reference: no operator changes what the whole is
                return x.clone()
            return function(x, Group("tp", (0, 1), 0, group, "fake"))

        @staticmethod
        def spmd_typecheck(*, x, group):
            return sent[before, after](x, group, src=before, dst=after)

    return Claimed


def judge(function, before, after) -> None:
    rulecheck(
        claimed(function, before, after), (X, "tp"), {"x": {"tp": before}}, mesh={"tp": 2}, local_tensor_mode=True
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_and_its_backward_have_their_types(name):
    """The backward takes the type that belongs to what the forward returns, and returns what belongs to its input."""
    before, after = OPERATORS[name]
    of = getattr(operators, name).__self__
    judge(lambda x, group: of.forward(SimpleNamespace(), x, group), before, after)
    backward = lambda x, group: of.backward(SimpleNamespace(group=group), x)[0]  # noqa: E731
    judge(backward, after.backward_type(), before.backward_type())


@pytest.mark.parametrize("before, after", [(P, I), (P, S(1))])
def test_a_sum_that_sends_nothing_is_rejected(before, after):
    def own_part(x, group):
        return x.view_as(x) if after is I else x.chunk(group.size, 1)[0].clone()

    with pytest.raises(RuleCheckError):
        judge(own_part, before, after)
