"""Which layers each rank holds: the model cut into stages, and what stages share."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from common.config import TrainConfig
from common.counts import count_flops
from common.model import ATTENTION_CORES, Decoder
from common.model_config import ModelConfig
from common.process_groups import Mesh, Placement, all_groups, create_groups
from step03_zero.zero import Zero
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.weight_gradients import defer_linear_layers


def split_layers(config: ModelConfig, stages: int, seq_len: int) -> list[tuple[int, int]]:
    """The layers [first, last) of each stage, chosen so that the slowest stage is as fast as possible.

    Every stage has at least one layer. The last one also multiplies by the head, which counts with its FLOPs; the
    embedding multiplies nothing. If several stages could take one more layer, a later one takes it: the first one holds
    the embedding and, in most schedules, the activations of more micro-batches.
    """
    flops = count_flops(config, seq_len)
    layer = (flops.linear + flops.attention_core) / config.layers
    layers, cost = [1] * stages, [layer] * stages
    cost[-1] += flops.head
    for _ in range(config.layers - stages):  # all layers are alike, so the greedy choice is the best
        lightest = min(range(stages), key=lambda stage: (cost[stage], -stage))
        layers[lightest] += 1
        cost[lightest] += layer
    bounds = [sum(layers[:stage]) for stage in range(stages + 1)]
    return list(zip(bounds, bounds[1:]))


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
    return ("embedding.weight",) if config.model_config.tie_embeddings else ()


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


def mark_shared_parameters(stages: list[nn.Module], schedule: Schedule, rank: int, at_both_ends: Iterable[str]) -> None:
    """Note in the specs which parameters other stages hold as well, after tensor parallelism has cut them.

    A matrix that is both embedding and head is stored at both ends of the pipeline, and a schedule with several copies
    of the model stores every parameter in each. Their gradients are sums over all holders, the groups `embed` and
    `mirror`. The holder that counts and saves the parameter is the first stage of the first copy.

    Args:
        rank: this one, in the pipeline.
        at_both_ends: names of the parameters that the first and the last stage share.
    """
    for chunk, model in enumerate(stages):
        copy, stage = schedule.stage_of(rank, chunk)
        for parameter in (*model.parameters(), *(buffer for buffer in model.buffers() if hasattr(buffer, "spec"))):
            spec = parameter.spec
            tied = schedule.stages > 1 and spec.name in at_both_ends
            if not tied and len(schedule.placement) == 1:
                continue  # no other stage holds it
            holders = "embed" if tied else "mirror"  # the group of these stages' ranks
            owner = spec.owner and copy == 0 and (stage == 0 or not tied)
            # With a bucket of its own, both ends cut it into the same shards
            parameter.spec = replace(spec, extra_groups=(*spec.extra_groups, holders), owner=owner, own_bucket=tied)
