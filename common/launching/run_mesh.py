"""The mesh that a run's flags ask for. (The groups themselves, in process_groups.py, know no flags.)"""

import torch

from common.config import TrainConfig
from common.process_groups import Degrees, Mesh, build_mesh


def degrees_of(config: TrainConfig) -> Degrees:
    """Return the degrees of a checked configuration. Without ZeRO every data-parallel rank holds a copy."""
    replicas = config.zero_replicas if config.zero else config.dp * config.cp
    experts, axes = config.model_config.experts > 0, tuple(reversed(config.order.split(",")))
    return Degrees(config.tp, config.cp, config.pp, config.dp, config.ep, replicas, experts, axes)


def mesh_of(config: TrainConfig, device: torch.device) -> Mesh:
    """Return this rank's mesh of a checked configuration, with the link that it simulates. All ranks call it."""
    mesh = build_mesh(degrees_of(config), device, config.model_config.kv_heads, config.timeout)
    return mesh.with_link(config.link_model)
