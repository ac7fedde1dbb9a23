"""Gradients of weights, added to a step's float32 sums by the very products that compute them.

A product of 16-bit matrices is added up in float32. Autograd wants it in 16 bits, so it is rounded and written, then
read and added to the sum: 2 + 2 + 8 bytes for each weight and micro-batch. Here the product adds: 8 bytes, and nothing
is rounded in between. A model of 1.7 billion so saves 6.8 GB, or 1.4 ms at 4.8 TB/s, per micro-batch (*predicted*).
The head's gradient is complete after the loss (`linear_cross_entropy.py`), and a norm's are partial sums of its rows:
they are added without being rounded first.

For that a weight needs both of step 4's seams: products that return its gradient as a function which adds it to a sum,
and a sink that hands this function to what adds up gradients. `multiply_by` sets the two together.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from common.model import Decoder
from step01_single_gpu.mixed_precision import Add
from step04_tensor_parallel.linear import Dense
from step05_pipeline.weight_gradients import defer_linear_layers
from step07_expert_parallel import experts
from step07_expert_parallel.experts import Counts, Experts
from step08_5d.kernels import grouped_matmul
from step08_5d.kernels.linear_cross_entropy import add_product, add_scaled


class SummingDense(Dense):
    """`Dense` that adds to sums."""

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor) -> Add:
        return lambda total, first: add_product(total, gradient.flatten(0, -2), x.flatten(0, -2), first)


class SummingGrouped:
    """`Grouped` that adds to sums. Other products are in our kernels where PyTorch has none."""

    @staticmethod
    def output(x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        return _multiply(x, weight.mT, counts)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        return _multiply(gradient.contiguous(), weight, counts)

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor, counts: Counts) -> Add:
        """In one launch, also where PyTorch has a faster product, as that returns 16 bits."""
        return partial(grouped_matmul.multiply_transposed, gradient, x, counts)


def _multiply(x: Tensor, matrices: Tensor, counts: Counts) -> Tensor:
    module = experts if experts.has_kernel(x, matrices, matrices.mT) else grouped_matmul
    return module.multiply(x, matrices, counts)


class SummingHead:
    """Of a head whose gradient is complete but for a factor."""

    @staticmethod
    def weight_gradient(dw: Tensor, factor: Tensor) -> Add:
        return lambda total, first: add_scaled(total, dw, factor, first)


def add_to_sum(weight: Tensor, gradient: Tensor, x: Tensor, multiply: Callable, whole: bool = True) -> None:
    """A `gradient_sink`: what `multiply` returns is added to the step's sum of this weight's gradients, unrounded."""
    weight.sums.accumulate(weight, multiply(gradient, x), whole)


def multiply_by(weight: Tensor, products) -> None:
    """Let `products` multiply with a weight, and hand its gradient to the step's sum, past autograd."""
    weight.products, weight.gradient_sink = products, add_to_sum


def sum_in_products(model: Decoder) -> None:
    """Let the products of linear layers and experts, norms, and the head with the loss add to sums.

    Raises ValueError for a weight that has products already, which would be lost.
    """
    defer_linear_layers(model.layers)  # which have step 4's seams
    for module in model.layers.modules():
        if isinstance(module, nn.Linear | Experts):
            for weight in module.parameters():
                products = SummingDense if weight.dim() == 2 else SummingGrouped
                if getattr(weight, "products", products) is not products:
                    raise ValueError(f"{weight.spec.name} has products: apply_kernels comes before what changes these")
                multiply_by(weight, products)
    if model.has_head:
        multiply_by(model.loss.weight, SummingHead)
    for weight in model.parameters():  # of norms, too
        weight.gradient_sink = add_to_sum
    if model.has_head and hasattr(model, "embedding") and model.config.tie_embeddings:
        # The head's gradient; that of the embedding follows
        model.embedding.weight.gradient_sink = partial(add_to_sum, whole=False)
