"""The conjugate operators of tensor and sequence parallelism: what one does in the forward, its partner does in the
backward (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.2). A sublayer is attention or the MLP.

           forward                             backward
  f        nothing                             all-reduce         where a sublayer begins, without sequence parallelism
  f_star   all-reduce                          nothing            where it ends
  g        all-gather along the sequence       reduce-scatter     where a sublayer begins, with sequence parallelism
  g_star   reduce-scatter along the sequence   all-gather         where it ends
"""

import torch

from common import collectives
from common.collectives import Work
from common.process_groups import Group


def all_gather_sequence(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Begin to gather x (batch, seq/tp, ...) as (tp, batch, seq/tp, ...): `join_sequence` makes one sequence of it."""
    gathered = x.new_empty((group.size, *x.shape))
    return gathered, collectives.all_gather(gathered, x.contiguous(), group, async_op=True)


def join_sequence(parts: torch.Tensor) -> torch.Tensor:
    """(tp, batch, seq/tp, ...) -> (batch, seq, ...); a copy unless batch is 1."""
    return parts.transpose(0, 1).flatten(1, 2)


def reduce_scatter_sequence(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Begin to sum x (batch, seq, ...) over the group; this rank's part of the sequence: (batch, seq/tp, ...)."""
    parts = x.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()  # (tp, batch, seq/tp, ...)
    mine = torch.empty_like(parts[0])
    return mine, collectives.reduce_scatter(mine, parts, group, async_op=True)


def gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """(batch, seq/tp, ...) -> (batch, seq, ...)"""
    parts, work = all_gather_sequence(x, group)
    work.wait()
    return join_sequence(parts)


def scatter_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """(batch, seq, ...), a summand on each rank -> (batch, seq/tp, ...), this rank's part of the sum"""
    mine, work = reduce_scatter_sequence(x, group)
    work.wait()
    return mine


def sum_over(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group, in a tensor of its own."""
    total = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(total, group)
    return total


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return sum_over(gradient, ctx.group), None


class _FStar(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return sum_over(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_sequence(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return scatter_sequence(gradient, ctx.group), None


class _GStar(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scatter_sequence(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gather_sequence(gradient, ctx.group), None


f, f_star, g, g_star = _F.apply, _FStar.apply, _G.apply, _GStar.apply
