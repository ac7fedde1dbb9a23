"""What all ranks do with finished gradients: sum those that another group holds parts of, and the global norm."""

import torch

from common import collectives
from common.process_groups import Group, Mesh

ROW = 1 << 14  # elements of a gradient whose squares are added up in one go on the CPU


def sum_extra_groups(parameters: list[torch.Tensor], gradients: list[torch.Tensor], mesh: Mesh) -> None:
    """Sum each gradient, in place, over the groups in the `extra_groups` of its parameter's spec.

    This comes after the sum over the data-parallel ranks, in one all-reduce per group. The ranks of such a group hold
    the same parameters, perhaps in another order, so they are sorted by name. If a rank holds several copies of one
    parameter, their gradients are added first.
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


def gradient_norm(parameters: list[torch.Tensor], gradients: list[torch.Tensor], world: Group) -> torch.Tensor:
    """Global 2-norm of the gradient, the same 0-d float64 tensor on every rank.

    Every rank sums the squares of the elements that it owns; one all-reduce adds them up. `gradients` are the finished
    ones (already reduced), one for each parameter, which need no more than a spec.
    """
    owned = [gradient for parameter, gradient in zip(parameters, gradients, strict=True) if parameter.spec.owner]
    norms = torch.cat([norm.view(-1) for norm in _norms(owned)]) if owned else torch.zeros(0)
    total = norms.to(gradients[0].device, torch.float64).square().sum()
    collectives.all_reduce(total, world)
    return total.sqrt()


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return 2-norms of rows or of whole tensors, in at least float32. The sum of their squares is the total.

    The CPU adds up a whole tensor in a few running sums, which in float32 lose more digits the longer the tensor is. So
    long tensors are cut into rows there.
    """
    dtype, norms, rest = torch.promote_types(tensors[0].dtype, torch.float32), [], tensors
    if not tensors[0].is_cuda:  # CUDA adds up in trees
        rest = []
        for flat in (tensor.flatten() for tensor in tensors):
            rows = flat.numel() // ROW
            if rows:
                norms.append(torch.linalg.vector_norm(flat[: rows * ROW].view(rows, ROW), dim=1, dtype=dtype))
            if rows * ROW < flat.numel():
                rest.append(flat[rows * ROW :])
    return norms + list(torch._foreach_norm(rest, dtype=dtype) if rest else [])
