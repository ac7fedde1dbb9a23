"""Clipping by the norm of the whole gradient, whichever ranks hold its parts."""

import torch

from common import collectives
from common.process_groups import Mesh

ROW = 1 << 14  # elements of a gradient whose squares are added up in one go on the CPU


def gradient_norm(parameters: list[torch.Tensor], gradients: list[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """Global 2-norm of the gradient, the same 0-d float64 tensor on every rank.

    Every rank sums the squares of the elements that it owns; one all-reduce adds them up.

    Args:
        gradients: the finished ones (already reduced), one for each parameter, which need no more than a spec. A rank
            may have none.
        mesh: of it, `world`, all ranks, and `device`.
    """
    owned = [gradient for parameter, gradient in zip(parameters, gradients, strict=True) if parameter.spec.owner]
    norms = torch.cat([norm.view(-1) for norm in _norms(owned)]) if owned else torch.zeros(0)
    total = norms.to(mesh.device, torch.float64).square().sum()
    collectives.all_reduce(total, mesh.world)
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


def clip_factor(grad_norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the factor, a 0-d tensor, that brings gradients to a global norm of at most `limit` (0: no limit)."""
    return (limit / (grad_norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(grad_norm)
