"""The four conjugate operators of tensor and sequence parallelism: what one does in the forward, its partner does in
the backward. A sublayer (attention or the MLP) begins with one of them and ends with its partner.

    operator                 playbook  forward         backward
    copy_to_ranks            f         nothing         all-reduce      begins a sublayer
    sum_over_ranks           f*        all-reduce      nothing         ends it
    gather_sequence          g         all-gather      reduce-scatter  begins a sublayer, with sequence parallelism
    reduce_scatter_sequence  g*        reduce-scatter  all-gather      ends it

Shoeybi et al., "Megatron-LM" (arXiv:1909.08053, section 3), call f* g. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4.2), add the two that divide the sequence.
"""

from dataclasses import dataclass

import torch

from common import collectives
from common.group import Group


def start_all_gather(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, collectives.Work]:
    """Begin to gather x (batch, seq/tp, ...) into (tp, batch, seq/tp, ...); after the wait, `join_sequence` it."""
    parts = x.new_empty((group.size, *x.shape))
    return parts, collectives.all_gather(parts, x.contiguous(), group, async_op=True)


def join_sequence(parts: torch.Tensor) -> torch.Tensor:
    """(tp, batch, seq/tp, ...) -> (batch, seq, ...); a copy unless batch is 1."""
    return parts.transpose(0, 1).flatten(1, 2)


def start_reduce_scatter(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, collectives.Work]:
    """Begin to sum x (batch, seq, ...) over the group into this rank's part of the sequence, (batch, seq/tp, ...)."""
    parts = x.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()  # (tp, batch, seq/tp, ...)
    mine = torch.empty_like(parts[0])
    return mine, collectives.reduce_scatter(mine, parts, group, async_op=True)


def _nothing(x, group):
    return x.view_as(x)


def _all_reduce(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(total, group)
    return total


def _all_gather(x, group):
    parts, work = start_all_gather(x, group)
    work.wait()
    return join_sequence(parts)


def _reduce_scatter(x, group):
    mine, work = start_reduce_scatter(x, group)
    work.wait()
    return mine


def make_operator(name, in_forward, in_backward):
    """Return an autograd function of (x, group) from a function of (x, group) for each direction.

    `type` makes the class, so that it gets this name: PyTorch calls the backward's node `CopyToRanksBackward` after it.
    """

    def forward(ctx, x, group):
        ctx.group = group
        return in_forward(x, group)

    def backward(ctx, gradient):
        return in_backward(gradient, ctx.group), None

    directions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), directions).apply


copy_to_ranks = make_operator("CopyToRanks", _nothing, _all_reduce)
sum_over_ranks = make_operator("SumOverRanks", _all_reduce, _nothing)
# (batch, seq/tp, ...) -> (batch, seq, ...), and back
gather_sequence = make_operator("GatherSequence", _all_gather, _reduce_scatter)
reduce_scatter_sequence = make_operator("ReduceScatterSequence", _reduce_scatter, _all_gather)


@dataclass(frozen=True)
class Split:
    """How a run divides its layers: over which group, whether along the sequence too, and in which `--tp-mode`."""

    group: Group
    sequence_parallel: bool
    mode: str

    def begin_sublayer(self, x: torch.Tensor) -> torch.Tensor:
        return (gather_sequence if self.sequence_parallel else copy_to_ranks)(x, self.group)

    def end_sublayer(self, summand: torch.Tensor) -> torch.Tensor:
        return (reduce_scatter_sequence if self.sequence_parallel else sum_over_ranks)(summand, self.group)
