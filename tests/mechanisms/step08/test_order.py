"""The order in which `build` applies the mechanisms: each refuses to come where something would be lost in silence."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from common.group import Group
from step01_single_gpu.mixed_precision import LossScaler
from step03_zero.apply_zero import apply_zero
from step04_tensor_parallel.apply_tensor_parallel import apply_tensor_parallel
from step05_pipeline.apply_pipeline import build_stages, shared_ends
from step05_pipeline.config import schedule_of
from step05_pipeline.stages import mark_shared_parameters
from step06_context_parallel.context_parallel import apply_context_parallel
from step07_expert_parallel.apply_experts import apply_experts
from step08_5d.fused import apply_kernels
from step08_5d.narrow_numbers.layers import apply_fp8
from step08_5d.weight_sums import sum_in_products
from tests.harness.observing import configure, mesh_of

FLAGS = "--data synthetic --layers 1 --hidden 16 --ffn 32 --heads 2 --kv-heads 2 --experts 2 --shared-experts 1 "
FLAGS += "--mask-documents --fp8 tensor"


def in_order(names: list[str]) -> None:
    """Apply these to a model, on the first of two ranks of `tp` as far as weights are divided before ZeRO."""
    config = configure(8, FLAGS)
    mesh, schedule, zeros = mesh_of(config), schedule_of(config), []
    two = dataclasses.replace(mesh, tp=Group("tp", (0, 1), 0), kv_replica=Group("kv_replica", (0,), 0))
    stages = build_stages(config, schedule, mesh)
    (stage,) = stages
    apply: dict[str, Callable] = {
        "tensor parallelism": lambda: apply_tensor_parallel(stage, config, two),
        "experts": lambda: apply_experts(stage, config, two, LossScaler(torch.float64)),
        "context parallelism": lambda: apply_context_parallel(stage, config, mesh),
        "kernels": lambda: apply_kernels(stage, config, mesh),
        "sums in kernels": lambda: sum_in_products(stage),  # the part of `apply_kernels` that needs a GPU
        "shared parameters": lambda: mark_shared_parameters(stages, schedule, 0, shared_ends(config)),
        "ZeRO": lambda: zeros.append(apply_zero(stage, config, mesh)),
        "FP8": lambda: apply_fp8(stages, zeros, config, mesh),
    }
    for name in names:
        apply[name]()


def test_the_order_of_build():
    in_order("tensor parallelism, experts, context parallelism, kernels, shared parameters, ZeRO, FP8".split(", "))


@pytest.mark.parametrize(
    "names, line",
    [
        # Shared experts, which are a SwiGLU, would be cut
        ("experts, tensor parallelism", "layer 0 has a MoE: apply_tensor_parallel comes before what replaces MLPs"),
        # The blocks of attention would run without kernels
        ("kernels, context parallelism", "apply_kernels comes after apply_context_parallel, into whose attention "),
        # Experts would run without kernels, and round their weights' gradients
        ("context parallelism, kernels, experts", "apply_kernels comes after apply_experts, for whose products "),
        # A norm would come without the hook that waits for its weights
        ("experts, context parallelism, ZeRO, kernels", "apply_kernels comes before ZeRO, whose hooks are on modules "),
        ("ZeRO, FP8, sums in kernels", "layers.0.attention.q_proj.weight has products: apply_kernels comes before "),
        # Gradients would not be summed over the holders
        ("ZeRO, shared parameters", "embedding.weight: mark_shared_parameters comes before ZeRO, which copies the "),
        # Histories would be on the meta device, and hooks take no gradients
        ("FP8, ZeRO", "apply_fp8 comes after ZeRO, which adds up the gradients of its products"),
    ],
)
def test_another_order_is_refused(names, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        in_order(names.split(", "))
