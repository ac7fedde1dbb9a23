"""Gradients of weights are added up by products, as on a GPU, where PyTorch computes everything."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from step07_expert_parallel import experts
from step08_5d import train, weight_sums
from step08_5d.kernels.linear_cross_entropy import add_product


def add_experts(y, x, counts, total, first) -> None:
    """What `multiply_transposed` of the kernels does."""
    for rows, each in zip(counts.rows, total, strict=True):
        add_product(each, y[rows], x[rows], first)


@contextmanager
def sums_in_products():
    """In this block, `build` of step 8 makes such a model."""
    real, kernels = train.apply_kernels, SimpleNamespace(multiply=experts.multiply, multiply_transposed=add_experts)

    def apply_kernels(model, config, mesh) -> None:
        real(model, config, mesh)
        weight_sums.sum_in_products(model)

    with (
        mock.patch.object(train, "apply_kernels", apply_kernels),
        mock.patch.object(weight_sums, "grouped_matmul", kernels),
    ):
        yield
