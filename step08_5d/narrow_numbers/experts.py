"""Experts whose products are in FP8: each expert is a linear layer of its own, with scales of its own."""

from collections.abc import Callable

from torch import Tensor

from step01_single_gpu.mixed_precision import Add
from step07_expert_parallel.experts import Counts
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

    def weight_gradient(self, gradient: Tensor, x: Tensor, counts: Counts) -> Add:
        """(rows, out) and (rows, in) -> what adds (experts, out, in), in at least float32, to sums: one by one."""

        def add(total: Tensor, first: bool) -> None:
            for products, each, rows in zip(self.each, total, counts.rows, strict=True):
                if rows.start < rows.stop:
                    dw = products.weight_gradient(gradient[rows], x[rows])
                    each.copy_(dw) if first else each.add_(dw)
                elif first:
                    each.zero_()

        return add

    def _fill(self, out: Tensor, counts: Counts, product: Callable) -> Tensor:
        for index, rows in enumerate(counts.rows):
            if rows.start < rows.stop:
                out[rows] = product(self.each[index], index, rows)
        return out


def products_of(weight: Tensor) -> list[Products]:
    """What multiplies in FP8 with this weight: one for a linear layer, one for each expert, none for other weights."""
    products = getattr(weight, "products", None)
    return [each for each in getattr(products, "each", [products]) if isinstance(each, Products)]
