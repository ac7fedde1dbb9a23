"""The sum of gradients that other groups than the data-parallel one hold parts of."""

import torch

from common import collectives
from common.process_groups import Mesh


def sum_extra_groups(parameters: list[torch.Tensor], gradients: list[torch.Tensor], mesh: Mesh) -> None:
    """Sum each gradient, in place, over the groups in the `extra_groups` of its parameter's spec.

    This comes after the sum over the data-parallel ranks, in one all-reduce per group. The ranks of such a group hold
    the same parameters, perhaps in another order, so they are sorted by name. If a rank holds several copies of one
    parameter, their gradients are added first. (A rank of a pipeline may have the first stage and the last one. Then a
    matrix that is both embedding and head is stored in each of them.)
    """
    for name in sorted({name for parameter in parameters for name in parameter.spec.extra_groups}):
        held: dict[tuple, list[torch.Tensor]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if name in parameter.spec.extra_groups:
                held.setdefault((parameter.spec.name, parameter.spec.flat_range or ()), []).append(gradient)
        partial = [held[key] for key in sorted(held)]
        joined = torch.cat([sum(copies[1:], copies[0]).flatten() for copies in partial])
        collectives.all_reduce(joined, getattr(mesh, name))
        parts = joined.split([copies[0].numel() for copies in partial])
        pairs = [(copy, part.view_as(copy)) for part, copies in zip(parts, partial, strict=True) for copy in copies]
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
