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
from typing import NamedTuple

import torch
from torch import nn

from common import collectives
from common.group import Group
from common.parameter import attach_specs
from step04_tensor_parallel.linear import input_gradient, linear, output, weight_gradient
from step04_tensor_parallel.operators import Split, join_sequence, start_all_gather, start_reduce_scatter
from step04_tensor_parallel.ring import gather_and_multiply, multiply_and_scatter
from step04_tensor_parallel.vocab_parallel import VocabParallelEmbedding

# ---- dividing the model ----------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """How a linear layer is divided.

    axis: of its weight (out, in). 0: by columns of the product, which come out of it; 1: by rows, which go into it.
    unit: the attribute of the module around it that says how many of these belong together, or "" if none do.
    whole: its input is whole already, so that nothing is communicated: see `whole` of latent attention.
    """

    axis: int
    unit: str = ""
    whole: bool = False


Cuts = dict[type[nn.Module], dict[str, Cut]]


def cut_layers(model: nn.Module, cuts: Cuts, split: Split, copies: Group | None = None) -> None:
    """Replace the linear layers that a table names by parallel ones, which hold this rank's part on the meta device.

    Args:
        copies: the ranks with a copy of the same part, where a layer has fewer units (K/V heads) than there are ranks.

    Raises ValueError for a layer that cannot be divided.
    """
    tp = split.group
    attach_specs(model)
    for module in list(model.modules()):
        for name, (axis, unit, whole) in cuts.get(type(module), {}).items():
            layer, width, changes = getattr(module, name), getattr(module, unit) if unit else 1, {}
            if layer is None:  # one that this module does without
                continue
            _check_layer(module, layer, split)
            count = layer.weight.shape[axis] // width
            if count < tp.size and copies:  # each copy sees the gradient of its own queries
                changes = {"extra_groups": (copies.name,), "owner": copies.rank == 0}
            elif count % tp.size:
                raise ValueError(f"{layer.weight.spec.name}: {tp.size} ranks cannot divide {count} units of {width}")
            kind = RowParallelLinear if axis else WholeInputLinear if whole else ColumnParallelLinear
            setattr(module, name, kind(_cut(layer.weight, axis, _part(count, tp, width), **changes), split))
        if type(module) in cuts and hasattr(module, "apply_linears"):
            module.apply_linears = apply_column_parallel
        if type(module) in cuts and hasattr(module, "whole"):
            module.whole = split.begin_sublayer


def cut_vocabulary(model: nn.Module, embedding: str | None, head: str | None, vocab: int, split: Split) -> None:
    """Divide embedding and head, which a model may lack (None), along the vocabulary. It is padded to equal parts.

    `embedding` and `head` are the names of modules. If they share a weight, they still do.
    """
    part = _part(-(-vocab // split.group.size) * split.group.size, split.group)
    parts: dict[nn.Parameter, nn.Parameter] = {}  # whole -> cut
    for name in filter(None, (embedding, head)):
        weight = model.get_submodule(name).weight
        cut = parts.setdefault(weight, _cut(weight, 0, part))
        new = VocabParallelEmbedding(cut, part[0], split) if name == embedding else ColumnParallelLinear(cut, split)
        model.set_submodule(name, new)


def share_the_rest(model: nn.Module, split: Split) -> None:
    """Note of parameters that are whole on every rank, such as those of norms, that one rank counts them.

    With sequence parallelism each rank's gradient is that of its part of the sequence.
    """
    for module in model.modules():
        if isinstance(module, _ParallelLinear | VocabParallelEmbedding):
            continue
        for parameter in module.parameters(recurse=False):
            parameter.spec.owner = split.group.rank == 0
            if split.sequence_parallel:
                parameter.spec.extra_groups = (split.group.name,)


def _check_layer(module: nn.Module, layer: nn.Module, split: Split) -> None:
    """Raise ValueError for what our parallel layers cannot replace."""
    name = layer.weight.spec.name
    if not isinstance(layer, nn.Linear) or layer.bias is not None:
        what = type(layer).__name__ + " with a bias" * (getattr(layer, "bias", None) is not None)
        raise ValueError(f"{name}: only an nn.Linear without a bias can be cut, and this is a {what}")
    if split.sequence_parallel and not hasattr(module, "apply_linears"):
        kind = type(module).__name__
        raise ValueError(f"{name}: {kind} takes its sequence's length from its input, of which it would get a part")


def _part(count: int, group: Group, width: int = 1) -> tuple[int, int]:
    """[start, stop) of this rank's part of `count` heads or rows, each `width` wide.

    Every rank has at least one. With fewer heads than ranks, neighbors therefore get the same one: a copy.
    """
    start = count * group.rank // group.size
    return start * width, max(start + 1, count * (group.rank + 1) // group.size) * width


def _cut(weight: nn.Parameter, axis: int, part: tuple[int, int], **changes) -> nn.Parameter:
    """Return [start, stop) of a layer's weight along `axis`, with `changes` to its spec."""
    box = tuple(part if index == axis else whole for index, whole in enumerate(weight.spec.box))
    empty = torch.empty([stop - start for start, stop in box], device="meta")
    cut = nn.Parameter(empty, requires_grad=weight.requires_grad)
    cut.spec = replace(weight.spec, box=box, **changes)
    return cut


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


class WholeInputLinear(ColumnParallelLinear):
    """The same for an input (batch, seq, in) that somebody has gathered. Nothing is communicated here."""

    def forward(self, x):
        return linear(x, self.weight)


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
