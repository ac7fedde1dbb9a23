"""`--fp8`: gives the weights of all linear layers and experts products in FP8, and a history if scales are delayed.

Embedding, head, router and norms stay as they are. So do the sums: every weight hands its gradient on in float32, past
autograd, which would round it to the training type.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from common.config import TrainConfig
from common.group import Group
from common.layers import at_least_float32
from common.model import Decoder
from common.process_groups import Mesh
from step03_zero.zero import Zero
from step04_tensor_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from step05_pipeline.weight_gradients import defer_linear_layers
from step08_5d.fused import launches_kernels
from step08_5d.narrow_numbers.dispatch import NarrowDispatcher
from step08_5d.narrow_numbers.experts import ExpertProducts, products_of
from step08_5d.narrow_numbers.gather import NarrowGather
from step08_5d.narrow_numbers.history import OPERANDS, STEPS, History, finish_step
from step08_5d.narrow_numbers.linear import FORMATS, Products
from step08_5d.weight_sums import multiply_by


def apply_fp8(stages: list[Decoder], zero_wrappers: list[Zero], config: TrainConfig, mesh: Mesh) -> list["StepScales"]:
    """Let all linear layers and experts in the layers of these stages multiply as `config.fp8` says. Returns the scales
    that hold for a step: none without FP8.

    Raises ValueError if ZeRO does not have the weights yet, to whose sums their gradients are handed.
    """
    weights = [weight for stage in stages for weight in stage.parameters()]
    if config.fp8 == "none":
        return []
    if not all(hasattr(weight, "sums") for weight in weights):
        raise ValueError("apply_fp8 comes after ZeRO, which adds up the gradients of its products")
    in_kernels = launches_kernels(config, mesh.device)
    make = partial(Products, config.fp8, FORMATS[config.fp8_gradients], in_kernels=in_kernels)
    histories = []
    for stage, zero in zip(stages, zero_wrappers, strict=True):
        defer_linear_layers(stage.layers)  # which have step 4's seams
        for layer in stage.layers.values():
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear):
                    cut = _cut(module, name.startswith("mlp.shared") or config.sequence_parallel, mesh)
                    history = _history(module.weight, histories, config, mesh)
                    multiply_by(module.weight, make(cut=cut, history=history))
            if hasattr(layer.mlp, "experts"):
                if config.fp8_dispatch:
                    layer.mlp.dispatcher = NarrowDispatcher
                for weight in layer.mlp.experts.parameters():
                    each = _history(weight, histories, config, mesh) or [None] * len(weight)
                    multiply_by(weight, ExpertProducts([make(history=one, blocks_of_tokens=False) for one in each]))
        for unit in zero.units if config.fp8_gather else ():
            if unit.group.size > 1 and any(map(products_of, unit.parameters)):
                unit.all_gather = NarrowGather(unit)
    return [StepScales([products for weight in weights for products in products_of(weight)], histories, mesh)]


class StepScales:
    """Scales that hold for a step: delayed ones, from the histories in `buffers`, and those of gathered weights.

    See step 7's `RunningStatistics`.
    """

    def __init__(self, products: Sequence[Products], histories: Sequence[Tensor], mesh: Mesh):
        self.products, self.buffers, self.mesh = products, histories, mesh

    def finish(self, skip: Tensor | None = None) -> dict[str, Tensor]:
        """Delayed scales learn from the step, and those of gathered weights are out of date. Returns nothing to record.

        What overflows teaches nothing, so that a step to `skip` needs no more attention.
        """
        for products in self.products:
            products.gathered = None
        finish_step(self.buffers, self.mesh)
        return {}


def _cut(module: nn.Linear, in_parts: bool, mesh: Mesh) -> dict[str, tuple[Group, ...]]:
    """Which ranks hold other parts of this layer's operands, by axis.

    Tensor ranks have parts of the tokens where the weight is whole: in shared experts always, and with sequence
    parallelism (`in_parts`) in the down-projections of latent attention and of multi-token prediction.
    """
    cut_weight = isinstance(module, ColumnParallelLinear | RowParallelLinear)
    cut = {"tokens": (mesh.cp, mesh.tp) if in_parts and not cut_weight else (mesh.cp,)}
    if isinstance(module, ColumnParallelLinear):
        cut["out"] = (mesh.tp,)
    elif isinstance(module, RowParallelLinear):
        cut["in"] = (mesh.tp,)
    return cut


def _history(weight: nn.Parameter, histories: list[Tensor], config: TrainConfig, mesh: Mesh):
    """The `History` of a weight, or a list of those of its experts, in a tensor that joins `histories`; or None."""
    if config.fp8 != "delayed":
        return None
    spec, experts = weight.spec, weight.dim() == 3
    size = len(OPERANDS), 1 + STEPS
    dtype = at_least_float32(weight.dtype)
    history = torch.zeros(*weight.shape[: int(experts)], *size, dtype=dtype, device=weight.device)
    # All ranks that hold a part of the weight have all of its history. One of them saves it
    first = spec.owner and getattr(mesh, spec.shard_groups[0]).rank == 0 and (experts or mesh.tp.rank == 0)
    history.spec = replace(
        spec,
        name=f"{spec.name}.largest",
        global_shape=(*spec.global_shape[: int(experts)], *size),
        box=(*spec.box[: int(experts)], *((0, length) for length in size)),
        extra_groups=spec.extra_groups if experts else (*spec.extra_groups, "tp"),
        owner=first,
        state=True,
    )
    histories.append(history)
    return [History(each) for each in history] if experts else History(history)
