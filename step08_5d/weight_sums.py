"""Gradients of weights, added to a step's float32 sums by the very products that compute them.

A product of 16-bit matrices is added up in float32. Autograd wants it in 16 bits, so it is rounded and written, then
read and added to the sum: 2 + 2 + 8 bytes for each weight and micro-batch. Here the product adds: 8 bytes, and nothing
is rounded in between. A model of 1.7 billion so saves 6.8 GB, or 1.4 ms at 4.8 TB/s, per micro-batch (*predicted*).
The head's gradient is complete after the loss (`linear_cross_entropy.py`), and a norm's are partial sums of its rows:
they are added without being rounded first.
"""

from functools import partial

import torch
from torch import nn

from common.config import TrainConfig
from common.model import Decoder
from common.process_groups import Mesh
from step03_zero.zero import Zero
from step04_tensor_parallel.linear import product
from step05_pipeline.weight_gradients import DeferringLinear
from step07_expert_parallel.experts import Counts, Kernels, multiply_transposed
from step08_5d.fused import launches_kernels
from step08_5d.kernels import grouped_matmul
from step08_5d.kernels.linear_cross_entropy import add_product, add_scaled, scaled


def sum_in_products(stages: list[Decoder], zero_wrappers: list[Zero], config: TrainConfig, mesh: Mesh) -> None:
    """Let the weights of these stages do so on a GPU, in backwards that are not split in two.

    These are linear layers and experts, norms, and the head, whose gradients are complete sums in float32. With `--fp8`
    linear layers and experts do so on the CPU as well, where a product in FP8 leaves in float32.
    """
    on_gpu = launches_kernels(config, mesh.device)
    if not on_gpu and config.fp8 == "none":
        return
    for stage, zero in zip(stages, zero_wrappers, strict=True):
        for name, module in list(stage.layers.named_modules()):
            if type(module) is nn.Linear:  # without the seam of step 4's layers
                stage.layers.set_submodule(name, DeferringLinear(module.weight))
        for weight in stage.parameters() if on_gpu else stage.layers.parameters():
            weight.postpone = partial(accumulate, zero)
        if on_gpu and stage.has_head and stage.has_embedding and stage.config.tie_embeddings:
            stage.embedding.weight.postpone = partial(accumulate, zero, last=False)  # of the head's; its own follows


def accumulate(zero: Zero, operands: tuple, last: bool = True) -> None:
    """What a weight's `postpone` does with (weight, gradient, x, multiply): add their product to the step's sum."""
    weight, gradient, x, multiply = operands
    function, settings = getattr(multiply, "func", multiply), getattr(multiply, "keywords", {})
    if function in ADDING:
        zero.accumulate(weight, lambda total, first: ADDING[function](total, gradient, x, first, **settings), last)
    else:
        zero.accumulate(weight, multiply(gradient, x), last)


def add_linear(total: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, first: bool) -> None:
    add_product(total, gradient.flatten(0, -2), x.flatten(0, -2), first)


def add_experts(
    total: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, first: bool, counts: Counts, kernels: Kernels | None
) -> None:
    """In one launch, also where PyTorch has a faster product, as that returns 16 bits."""
    if kernels:
        grouped_matmul.multiply_transposed(gradient, x, counts, total, first)
    else:
        for rows, each in zip(counts.rows, total, strict=True):
            add_product(each, gradient[rows], x[rows], first)


# What adds the result of a `multiply` to a sum: add(total, gradient, x, first), with the settings of a partial one
ADDING = {product: add_linear, multiply_transposed: add_experts, scaled: add_scaled}
