"""Experts for the model of these steps: which MLPs they replace, and what the flags choose."""

from dataclasses import replace

import torch

from common.config import TrainConfig
from common.model import Decoder, SwiGLU
from common.parameter import ParameterSpec, attach_specs
from common.process_groups import Mesh
from step01_single_gpu.initial_weights import initial_values
from step01_single_gpu.mixed_precision import LossScaler
from step05_pipeline.weight_gradients import defer_linear_layers
from step07_expert_parallel.balancing import Balancing
from step07_expert_parallel.capacity import SequenceParts
from step07_expert_parallel.experts import Experts
from step07_expert_parallel.moe import MoE
from step07_expert_parallel.router import Router, Routing


def routing_of(config: TrainConfig) -> Routing:
    """How tokens choose the experts of a model that has some."""
    shape = config.model_config
    return Routing(
        shape.experts,
        shape.top_k,
        gate=shape.gate,
        groups=shape.expert_groups,
        groups_per_token=shape.groups_per_token,
        normalize=shape.normalize_gates,
        scale=shape.gate_scale,
        aux_coef=config.aux_coef if config.balance == "aux" else 0.0,
        z_coef=config.z_coef,
        capacity_factor=config.capacity_factor,
    )


def apply_experts(model: Decoder, config: TrainConfig, mesh: Mesh, scaler: LossScaler) -> None:
    """Replace the MLPs of a `Decoder` on the meta device by experts, in all layers but the first `dense_layers`.

    This rank holds a part of the experts, and all of the router and of the shared experts. With tensor parallelism it
    has a part of the sequence to itself there, as in the norms, so that those gradients are summed over `tp`.

    Args:
        scaler: of the loss. See `Router`.
    """
    shape, ep, tp = config.model_config, mesh.ep, mesh.tp
    parts = SequenceParts(mesh.cp, tp, config.cp_split)
    for index, layer in model.layers.items():
        if not shape.has_experts(int(index)):
            continue
        name = f"layers.{index}.mlp"
        residual = layer.mlp.down_proj.weight.spec.init_std
        count = shape.experts // ep.size
        mine = count * ep.rank, count * (ep.rank + 1)
        with torch.device("meta"):
            places = parts, config.global_batch, scaler, config.torch_dtype, mesh.device
            router = Router(shape.hidden, routing_of(config), *places)
            experts = Experts(count, shape.hidden, shape.expert_ffn)
            shared = SwiGLU(shape.hidden, shape.shared_experts * shape.expert_ffn) if shape.shared_experts else None
        if shared:  # like all other matrices they put off their weight gradients, if the schedule splits the backward
            defer_linear_layers(shared)
        layer.mlp = MoE(router, experts, shared, ep)
        attach_specs(layer.mlp, {"down_proj": residual, "down_proj.weight": residual, "": 0.02})
        of_experts = set(experts.parameters())
        for parameter in layer.mlp.parameters():
            spec = replace(parameter.spec, name=f"{name}.{parameter.spec.name}")
            if parameter in of_experts:
                whole, box = (shape.experts, *spec.global_shape[1:]), (mine, *spec.box[1:])
                spec = replace(spec, global_shape=whole, box=box, shard_groups=("expert_shard", "expert_replica"))
            elif tp.size > 1:
                spec = replace(spec, extra_groups=("tp",), owner=tp.rank == 0)
            parameter.spec = spec
        box, first = ((0, shape.experts),), mesh.dp_cp.rank == tp.rank == 0  # every rank has the whole bias
        router.bias.spec = ParameterSpec(f"{name}.router.bias", (shape.experts,), box, init_std=0.0, owner=first)


def routers_of(stages: list[Decoder]) -> list[tuple[int, Router]]:
    """The routers of this rank's layers, each with the number of its layer."""
    layers = [(int(index), layer.mlp) for stage in stages for index, layer in stage.layers.items()]
    return [(index, mlp.router) for index, mlp in layers if hasattr(mlp, "router")]


def build_balancing(stages: list[Decoder], config: TrainConfig, mesh: Mesh) -> Balancing:
    """What balances the experts of these stages. Their biases get initial values here."""
    shape, routers = config.model_config, routers_of(stages)
    rate = config.bias_rate if config.balance == "bias" else 0.0
    balancing = Balancing(routers, shape.expert_layers, shape.experts, rate, mesh.world, mesh.device)
    if balancing.buffers:
        initial_values(config)(balancing.buffers)
    return balancing
