"""The pipeline for the model of these steps: which stages a rank builds, what runs them, and what the flags choose."""

from dataclasses import replace

import torch

from common.config import TrainConfig
from common.model import ATTENTION_CORES, Decoder
from common.process_groups import Mesh, Placement, all_groups, create_groups
from step03_zero.zero import Zero
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.stages import split_layers
from step05_pipeline.weight_gradients import defer_linear_layers


def build_stages(config: TrainConfig, schedule: Schedule, mesh: Mesh) -> list[Decoder]:
    """This rank's stages on the meta device, in the order of their chunk numbers.

    If the schedule splits backwards, their linear layers can defer weight gradients. (Those by which tensor parallelism
    replaces them can always do so.)
    """
    ranges = split_layers(config.model_config, schedule.stages, config.seq_len)
    stages = []
    for chunk in range(schedule.chunks(mesh.pp_forward.rank)):
        _, number = schedule.stage_of(mesh.pp_forward.rank, chunk)
        stage = Decoder(config.model_config, ATTENTION_CORES[config.attention], *ranges[number])
        if schedule.splits_backward:
            defer_linear_layers(stage)
        stages.append(stage)
    return stages


def shared_ends(config: TrainConfig) -> tuple[str, ...]:
    """The names of what both ends of the model hold."""
    shape = config.model_config  # multi-token prediction looks up tokens at the end, too
    return ("embedding.weight",) if shape.tie_embeddings or shape.mtp else ()


def build_pipeline(
    schedule: Schedule,
    stages: list[Decoder],
    zero_wrappers: list[Zero],
    config: TrainConfig,
    mesh: Mesh,
    kind: type[Pipeline] = Pipeline,
) -> Pipeline:
    """What runs these stages in the order of the schedule."""
    tokens = config.rank_seq_len // (config.tp if config.sequence_parallel else 1)
    shape = config.micro_batch, tokens, config.model_config.hidden
    like = torch.empty((), dtype=config.torch_dtype, device=mesh.device).expand(shape)  # takes no memory
    delays = [1e-3 * config.layer_delay * len(stage.layers) for stage in stages] if config.layer_delay else ()
    return kind(schedule, stages, zero_wrappers, mesh.pp_forward, mesh.pp_backward, like, free_sent=True, delays=delays)


def place_stages(mesh: Mesh, placement: Placement, timeout: float) -> Mesh:
    """Return `mesh` with the groups `embed` and `mirror` of this placement. All ranks call it together."""
    if placement == (tuple(range(mesh.degrees.pp)),):  # that of `build_mesh`
        return mesh
    groups = all_groups(mesh.degrees, placement=placement)
    groups = {name: groups[name] for name in ("embed", "mirror")}
    mesh = replace(mesh, **create_groups(mesh.degrees, mesh.device, groups, timeout))
    return mesh.with_link(mesh.world.line and mesh.world.line.link)
