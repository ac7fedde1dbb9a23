"""Experts whose products are in FP8: each expert is a linear layer of its own, with scales of its own."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from common.model import at_least_float32
from step04_tensor_parallel.linear import weight_gradient
from step07_expert_parallel.experts import Counts, Experts
from step08_5d.narrow_numbers.dispatch import Rounded
from step08_5d.narrow_numbers.linear import Products


class ExpertProducts:
    """The three products of one weight (experts, out, in), expert by expert. Rows are sorted by expert.

    PyTorch has a single product for all experts with scales, on Hopper and Blackwell. This is the loop it should equal.
    """

    def __init__(self, each: list[Products]):
        self.each = each

    def output(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """x (rows, in) -> (rows, out)."""
        out = x.new_empty(len(x), weight.shape[1])
        return self._fill(out, counts, lambda products, index, rows: products.output(x[rows], weight[index]))

    def input_gradient(self, gradient: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """gradient (rows, out) -> (rows, in)."""
        out = gradient.new_empty(len(gradient), weight.shape[2])
        return self._fill(
            out, counts, lambda products, index, rows: products.input_gradient(gradient[rows], weight[index])
        )

    def weight_gradient(self, gradient: Tensor, x: Tensor, counts: Counts) -> Tensor:
        """(rows, out) and (rows, in) -> (experts, out, in) in at least float32: zeros for an expert without rows."""
        shape = len(self.each), gradient.shape[1], x.shape[1]
        out = torch.zeros(shape, dtype=at_least_float32(x.dtype), device=x.device)
        for products, dw, rows in zip(self.each, out, counts.rows, strict=True):
            if rows.start < rows.stop:
                dw.copy_(products.weight_gradient(gradient[rows], x[rows]))
        return out

    def _fill(self, out: Tensor, counts: Counts, product: Callable) -> Tensor:
        for index, rows in enumerate(counts.rows):
            if rows.start < rows.stop:
                out[rows] = product(self.each[index], index, rows)
        return out


def products_of(weight: Tensor) -> list[Products]:
    """What multiplies in FP8 with this weight: one for a linear layer, one for each expert, none for other weights."""
    products = getattr(weight, "products", None)
    return getattr(products, "each", [products] if products else [])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.weight, ctx.counts = weight, counts
        ctx.save_for_backward(x)
        return weight.products.output(x, weight, counts)

    @staticmethod
    def backward(ctx, gradient):
        (x,), weight, counts = ctx.saved_tensors, ctx.weight, ctx.counts
        dw = weight_gradient(weight, gradient, x, partial(weight.products.weight_gradient, counts=counts))
        return weight.products.input_gradient(gradient, weight, counts), dw, None


class NarrowExperts(Experts):
    """`Experts` whose weights have `products`. `rounds`: they round their rows as a dispatch in FP8 does."""

    def __init__(self, experts: Experts, rounds: bool):
        nn.Module.__init__(self)
        self.rounds = rounds
        self.activation = experts.activation
        self.gate_proj, self.up_proj, self.down_proj = experts.gate_proj, experts.up_proj, experts.down_proj

    def forward(self, x, counts):  # (rows, hidden), sorted by expert -> (rows, hidden)
        x = Rounded.apply(x) if self.rounds else x
        gate = _GroupedLinear.apply(x, self.gate_proj, counts)
        up = _GroupedLinear.apply(x, self.up_proj, counts)
        return _GroupedLinear.apply(self.activation(gate, up), self.down_proj, counts)
