"""Tensor parallelism by hand: every rank holds a part of every matrix (Shoeybi et al., arXiv:1909.08053).

A sublayer, attention or the MLP, multiplies by a matrix that is divided by columns, works on the result (some heads, or
a part of the MLP's width) without any communication, and multiplies by a matrix that is divided by rows. Each rank then
has one summand of the sublayer's output. With sequence parallelism (Korthikanti et al., arXiv:2205.05198) the norms and
the residual stream between sublayers are divided along the sequence. `--tp-mode` offers three ways to do the same:
  plain    the operators of `operators.py` around ordinary linear layers; gathered inputs are kept for the backward
  overlap  one autograd function for communication and product. It keeps only this rank's part of the sequence and
           gathers again in the backward, where the input's gradient is sent while the weight's is computed
  chunked  overlaps the forward too: gathers and reduce-scatters go round a ring, part by part

With 8 query heads and 2 K/V heads, tp 4 divides the query heads. Of the K/V heads, two ranks hold a copy each:

    rank           0      1      2      3
    query heads    0 1    2 3    4 5    6 7
    K/V head       0      0      1      1         the gradient of head 0 is the sum of those of ranks 0 and 1
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from common import collectives
from common.config import TrainConfig
from common.model import Decoder
from common.process_groups import Group, Mesh
from step04_tensor_parallel.linear import input_gradient, linear, output, weight_gradient
from step04_tensor_parallel.operators import Split, join_sequence, start_all_gather, start_reduce_scatter
from step04_tensor_parallel.ring import gather_and_multiply, multiply_and_scatter
from step04_tensor_parallel.vocab_parallel import VocabParallelEmbedding

# ---- dividing the model ----------------------------------------------------------------------------------------------


def apply_tensor_parallel(model: Decoder, config: TrainConfig, mesh: Mesh) -> None:
    """Replace the layers of a `Decoder` on the meta device by parallel ones that hold this rank's part of the weights.

    The spec of every parameter says which part that is, and over which groups its gradient is a partial sum.
    """
    tp, shape = mesh.tp, config.model_config
    if tp.size == 1:
        return
    split = Split(tp, config.sequence_parallel, config.tp_mode)
    queries, keys = (_part(heads, tp, shape.head_width) for heads in (shape.heads, shape.kv_heads))
    ffn, vocab = _part(shape.ffn, tp), _part(-(-shape.vocab // tp.size) * tp.size, tp)  # vocab: padded
    shared = {}
    if shape.kv_heads < tp.size:  # ranks that share a K/V head hold copies; each sees the gradient of its own queries
        shared = {"extra_groups": ("kv_replica",), "owner": mesh.kv_replica.rank == 0}
    for layer in model.layers.values():
        attention, mlp = layer.attention, layer.mlp
        attention.q_proj = ColumnParallelLinear(_cut(attention.q_proj, 0, queries), split)
        attention.k_proj = ColumnParallelLinear(_cut(attention.k_proj, 0, keys, **shared), split)
        attention.v_proj = ColumnParallelLinear(_cut(attention.v_proj, 0, keys, **shared), split)
        attention.o_proj = RowParallelLinear(_cut(attention.o_proj, 1, queries), split)
        mlp.gate_proj = ColumnParallelLinear(_cut(mlp.gate_proj, 0, ffn), split)
        mlp.up_proj = ColumnParallelLinear(_cut(mlp.up_proj, 0, ffn), split)
        mlp.down_proj = RowParallelLinear(_cut(mlp.down_proj, 1, ffn), split)
        attention.apply_linears = mlp.apply_linears = apply_column_parallel
    if model.has_embedding:
        model.embedding = VocabParallelEmbedding(_cut(model.embedding, 0, vocab), vocab[0], split)
    if model.has_head:
        tied = model.has_embedding and shape.tie_embeddings
        model.head = ColumnParallelLinear(model.embedding.weight if tied else _cut(model.head, 0, vocab), split)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # whole on every rank
            parameter.spec.owner = tp.rank == 0
            if config.sequence_parallel:  # each rank's gradient is that of its part of the sequence
                parameter.spec.extra_groups = ("tp",)


def _part(count: int, group: Group, width: int = 1) -> tuple[int, int]:
    """[start, stop) of this rank's part of `count` heads or rows, each `width` wide.

    Every rank has at least one. With fewer heads than ranks, neighbors therefore get the same one: a copy.
    """
    start = count * group.rank // group.size
    return start * width, max(start + 1, count * (group.rank + 1) // group.size) * width


def _cut(module: nn.Module, axis: int, part: tuple[int, int], **changes) -> nn.Parameter:
    """Return [start, stop) of a layer's weight along `axis`, with `changes` to its spec."""
    spec = module.weight.spec
    box = tuple(part if index == axis else whole for index, whole in enumerate(spec.box))
    empty = torch.empty([stop - start for start, stop in box], device="meta")
    weight = nn.Parameter(empty, requires_grad=module.weight.requires_grad)
    weight.spec = replace(spec, box=box, **changes)
    return weight


# ---- the divided linear layers ---------------------------------------------------------------------------------------


class _ParallelLinear(nn.Linear):
    """A linear layer without bias that holds a part of the weight."""

    def __init__(self, weight: nn.Parameter, split: Split):
        super().__init__(*reversed(weight.shape), bias=False, device="meta")
        self.weight, self.split = weight, split


class ColumnParallelLinear(_ParallelLinear):
    """Computes out/tp columns of the output: weight (out/tp, in).

    Input: (batch, seq/tp, in), without sequence parallelism (batch, seq, in). Output: (batch, seq, out/tp).
    """

    def forward(self, x):
        return apply_column_parallel(x, [self])[0]


def apply_column_parallel(x: torch.Tensor, linears: Sequence[ColumnParallelLinear]) -> Sequence[torch.Tensor]:
    """Return the outputs of several column-parallel layers of one input, which is communicated once for all of them."""
    split, weights = linears[0].split, [each.weight for each in linears]
    if split.mode == "plain":
        x = split.begin_sublayer(x)
        return [linear(x, weight) for weight in weights]
    return _OverlappedColumnLinears.apply(x, split, *weights)


class RowParallelLinear(_ParallelLinear):
    """Multiplies in/tp columns of the input, and adds up the products of all ranks: weight (out, in/tp).

    Input: (batch, seq, in/tp). Output: (batch, seq/tp, out), without sequence parallelism (batch, seq, out).
    """

    def forward(self, x):
        if self.split.mode == "plain":
            return self.split.end_sublayer(linear(x, self.weight))
        return _OverlappedRowLinear.apply(x, self.split, self.weight)


class _OverlappedColumnLinears(torch.autograd.Function):
    """`begin_sublayer` and the linear layers behind it, in one function."""

    @staticmethod
    def forward(ctx, x, split, *weights):
        ctx.split, ctx.weights = split, weights
        ctx.save_for_backward(x)  # not the gathered sequence, which is tp times as large
        if split.mode == "chunked":
            return tuple(gather_and_multiply(x, weights, split.group))
        whole = split.begin_sublayer(x)
        return tuple(output(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        split, weights, (x,) = ctx.split, ctx.weights, ctx.saved_tensors
        if split.sequence_parallel:  # gather again, while we compute the input's gradient, which does not need it
            parts, gathering = start_all_gather(x, split.group)
        dx = input_gradient(gradients[0], weights[0])
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            dx += input_gradient(gradient, weight)
        if split.sequence_parallel:
            dx, reducing = start_reduce_scatter(dx, split.group)
            gathering.wait()
            x = join_sequence(parts)
        else:
            reducing = collectives.all_reduce(dx, split.group, async_op=True)
        # dx is in flight
        dws = [weight_gradient(weight, gradient, x) for weight, gradient in zip(weights, gradients, strict=True)]
        reducing.wait()
        return dx, None, *dws


class _OverlappedRowLinear(torch.autograd.Function):
    """A linear layer and `end_sublayer`, in one function."""

    @staticmethod
    def forward(ctx, x, split, weight):
        ctx.split, ctx.weight = split, weight
        ctx.save_for_backward(x)
        if split.mode == "chunked":
            return multiply_and_scatter(x, weight, split.group)
        summand = output(x, weight)
        if split.sequence_parallel:
            return split.end_sublayer(summand)
        collectives.all_reduce(summand, split.group)  # in place
        return summand

    @staticmethod
    def backward(ctx, gradient):
        weight, (x,) = ctx.weight, ctx.saved_tensors
        gradient = ctx.split.begin_sublayer(gradient)  # the conjugate of `end_sublayer`
        return input_gradient(gradient, weight), None, weight_gradient(weight, gradient, x)
