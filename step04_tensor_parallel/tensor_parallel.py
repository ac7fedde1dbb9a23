"""Tensor parallelism by hand: every rank holds a part of every matrix (Shoeybi et al., arXiv:1909.08053).

A sublayer, attention or MLP, multiplies by a matrix that is cut into columns, works on what it got (some heads, or a
part of the MLP's width) without talking to anybody, and multiplies by one that is cut into rows: the results are
summands of its output.

With sequence parallelism (Korthikanti et al., arXiv:2205.05198) norms and the residual stream, between sublayers, are
cut along the sequence: the sum that ends a sublayer is a reduce-scatter, and an all-gather begins the next.

Three ways to do the same, `--tp-mode`:
  plain    the operators of `operators.py` around ordinary linear layers: what they gathered is kept for the backward
  overlap  one function for gather and multiplication: it keeps this rank's part of the sequence only and gathers again
           in the backward; there the input's gradient travels while that of the weight is computed
  chunked  also the forward overlaps: the gather goes round a ring, a multiplication for each chunk that arrives
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from common import collectives, weight_gradients
from common.config import TrainConfig
from common.model import Decoder
from common.process_groups import Group, Mesh
from common.weight_gradients import weight_gradient
from step04_tensor_parallel.operators import (
    all_gather_sequence,
    f,
    f_star,
    g,
    g_star,
    gather_sequence,
    join_sequence,
    reduce_scatter_sequence,
    scatter_sequence,
)
from step04_tensor_parallel.ring import gather_and_multiply, multiply_and_scatter
from step04_tensor_parallel.vocab_parallel import embed


class ColumnParallel(torch.autograd.Function):
    """[x W1', x W2', ...] for weights cut into columns of the output, and one x: f or g, and the linear layers, in one.

    x (batch, seq/tp, hidden), without sequence parallelism (batch, seq, hidden) -> (batch, seq, width / tp) each.
    """

    @staticmethod
    def forward(ctx, x, group, sequence_parallel, chunked, *weights):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x, *weights)  # not the gathered sequence: it is tp times as large
        if sequence_parallel and chunked:
            return tuple(gather_and_multiply(x, weights, group))
        whole = gather_sequence(x, group) if sequence_parallel else x
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        if ctx.sequence_parallel:  # once more, meanwhile the input's gradient is computed, which does not need it
            parts, gathering = all_gather_sequence(x, ctx.group)
        dx = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            dx += gradient @ weight
        if ctx.sequence_parallel:
            dx, reducing = reduce_scatter_sequence(dx, ctx.group)
            gathering.wait()
            x = join_sequence(parts)
        else:
            reducing = collectives.all_reduce(dx, ctx.group, async_op=True)
        # while dx is on its way
        dws = [weight_gradient(weight, gradient, x) for weight, gradient in zip(weights, gradients, strict=True)]
        reducing.wait()
        return dx, None, None, None, *dws


class RowParallel(torch.autograd.Function):
    """x W' for a weight cut into rows of the input: the linear layer, and f_star or g_star, in one.

    x (batch, seq, width / tp) -> (batch, seq/tp, hidden), without sequence parallelism (batch, seq, hidden).
    """

    @staticmethod
    def forward(ctx, x, group, sequence_parallel, chunked, weight):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x, weight)
        if sequence_parallel and chunked:
            return multiply_and_scatter(x, weight, group)
        summand = F.linear(x, weight)
        if sequence_parallel:
            return scatter_sequence(summand, group)
        collectives.all_reduce(summand, group)
        return summand

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            gradient = gather_sequence(gradient, ctx.group)
        return gradient @ weight, None, None, None, weight_gradient(weight, gradient, x)


# ---- the same operations in the plain and in the joined form ---------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """How a run splits: the group, whether the residual stream is cut along the sequence, and the mode."""

    group: Group
    sequence_parallel: bool
    mode: str

    def column(self, x: torch.Tensor, linears: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
        """Linear layers of one input, cut into columns. The input is communicated once for all of them."""
        weights = [linear.weight for linear in linears]
        if self.mode == "plain":
            x = g(x, self.group) if self.sequence_parallel else f(x, self.group)
            return [weight_gradients.linear(x, weight) for weight in weights]
        return ColumnParallel.apply(x, self.group, self.sequence_parallel, self.mode == "chunked", *weights)

    def row(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A linear layer cut into rows."""
        if self.mode == "plain":
            return self.sum(weight_gradients.linear(x, weight))
        return RowParallel.apply(x, self.group, self.sequence_parallel, self.mode == "chunked", weight)

    def sum(self, summand: torch.Tensor) -> torch.Tensor:
        """The end of a sublayer: the sum over ranks, of which sequence parallelism keeps a part."""
        return g_star(summand, self.group) if self.sequence_parallel else f_star(summand, self.group)


# ---- cutting the model -----------------------------------------------------------------------------------------------


def apply_tensor_parallel(model: Decoder, config: TrainConfig, mesh: Mesh) -> None:
    """Cut a `Decoder` on the meta device: its parameters become this rank's parts, their specs say which parts."""
    tp = mesh.tp
    if tp.size == 1:
        return
    split, shape = Split(tp, config.sequence_parallel, config.tp_mode), config.model_config
    for layer in model.layers.values():
        attention, mlp = layer.attention, layer.mlp
        _cut(attention.q_proj, 0, _part(shape.heads * shape.head_width, tp))
        _cut(attention.o_proj, 1, _part(shape.heads * shape.head_width, tp))
        if shape.kv_heads >= tp.size:
            heads, replicas = _part(shape.kv_heads, tp), {}
        else:  # fewer K/V heads than ranks: those that share one hold copies, each sees the gradient of its own queries
            head = tp.rank * shape.kv_heads // tp.size
            heads, replicas = (head, head + 1), {"extra_groups": ("kv_replica",), "owner": mesh.kv_replica.rank == 0}
        for linear in (attention.k_proj, attention.v_proj):
            _cut(linear, 0, tuple(head * shape.head_width for head in heads), **replicas)
        _cut(mlp.gate_proj, 0, _part(shape.ffn, tp))
        _cut(mlp.up_proj, 0, _part(shape.ffn, tp))
        _cut(mlp.down_proj, 1, _part(shape.ffn, tp))
        attention.apply_linears = mlp.apply_linears = split.column
        for linear in (attention.o_proj, mlp.down_proj):
            linear.forward = partial(_row, split, linear)
    rows = _part(-(-shape.vocab // tp.size) * tp.size, tp)  # padded
    if model.has_embedding:
        _cut(model.embedding, 0, rows)
        model.embedding.forward = lambda tokens: split.sum(embed(model.embedding, tokens, rows[0]))
    if model.has_head:
        if model.has_embedding and shape.tie_embeddings:
            model.head.weight = model.embedding.weight
        else:
            _cut(model.head, 0, rows)
        model.head.forward = lambda x: split.column(x, [model.head])[0]
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # whole on every rank
            parameter.spec.owner = tp.rank == 0
            if config.sequence_parallel:  # each rank's gradient is that of its part of the sequence
                parameter.spec.extra_groups = ("tp",)


def _row(split: Split, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return split.row(linear.weight, x)  # the weight of that moment: parameters are still replaced after the cut


def _part(size: int, group: Group) -> tuple[int, int]:
    """[start, stop) of this rank's part."""
    return size * group.rank // group.size, size * (group.rank + 1) // group.size


def _cut(module: nn.Module, axis: int, bounds: tuple[int, int], **changes) -> None:
    """Keep [start, stop) of the weight along `axis`."""
    spec = module.weight.spec
    box = tuple(bounds if index == axis else old for index, old in enumerate(spec.box))
    module.weight = nn.Parameter(torch.empty([stop - start for start, stop in box], device="meta"))
    module.weight.spec = replace(spec, box=box, **changes)
