"""Which layers lie on which rank: the model cut into stages, and what stages share."""

from dataclasses import replace

from torch import nn

from common import weight_gradients
from common.config import TrainConfig
from common.counts import count_flops
from common.errors import UsageError
from common.model import ATTENTION_CORES, Decoder
from common.model_config import ModelConfig
from common.process_groups import Mesh
from step05_pipeline.schedules.messages import check
from step05_pipeline.schedules.standard import Schedule, build, read


def schedule_of(config: TrainConfig) -> Schedule:
    """The schedule that a validated configuration asks for. Raises UsageError when there is none, or it cannot run."""
    micro_batches = config.accumulation_steps
    if config.schedule_file:
        if config.schedule != TrainConfig.schedule or config.consecutive:
            raise UsageError("--schedule-file stands in the place of --schedule and --consecutive; leave them out")
        schedule = read(config.schedule_file, config.pp, micro_batches, config.virtual_stages)
    else:
        options = {"consecutive": config.consecutive} if config.consecutive else {}
        schedule = build(config.schedule, config.pp, micro_batches, config.virtual_stages, **options)
    if schedule.stages > config.model_config.layers:
        raise UsageError(
            f"--schedule {schedule.name} on --pp {config.pp} has {schedule.stages} stages, "
            f"more than --layers {config.model_config.layers}"
        )
    if len(schedule.placement) > 1 and config.zero > 1:
        raise UsageError(
            f"--zero {config.zero}: --schedule {schedule.name} keeps two copies of the model, whose gradients are "
            "summed whole; it runs with --zero 0 or 1"
        )
    check(schedule)
    return schedule


def split_layers(config: ModelConfig, stages: int, seq_len: int) -> list[tuple[int, int]]:
    """[first, last) layer of each stage, so that the slowest stage is as fast as can be.

    All stages have a layer at least. The last also multiplies by the head, which counts for its FLOPs; the embedding
    multiplies nothing. Where several stages could take one more layer, a later one does: the first holds the embedding
    and, in most schedules, the activations of more micro-batches.
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


def relative_costs(config: ModelConfig, stages: int, seq_len: int) -> list[float]:
    """Forward FLOPs of each stage, as multiples of their mean."""
    flops = count_flops(config, seq_len)
    layer = (flops.linear + flops.attention_core) / config.layers
    costs = [(last - first) * layer for first, last in split_layers(config, stages, seq_len)]
    costs[-1] += flops.head
    return [cost * stages / sum(costs) for cost in costs]


def build_stages(config: TrainConfig, schedule: Schedule, mesh: Mesh) -> list[Decoder]:
    """This rank's stages, in the order of its chunks, on the meta device."""
    ranges = split_layers(config.model_config, schedule.stages, config.seq_len)
    stages = []
    for chunk in range(schedule.chunks(mesh.pp_forward.rank)):
        _, stage = schedule.stage_of(mesh.pp_forward.rank, chunk)
        stages.append(Decoder(config.model_config, ATTENTION_CORES[config.attention], *ranges[stage]))
    return stages


def share_parameters(stages: list[Decoder], schedule: Schedule, mesh: Mesh) -> None:
    """Say in the specs which parameters other stages hold as well, after tensor parallelism has cut them.

    A matrix that is embedding and head lies on both ends of the pipeline; a schedule with two copies of the model has
    every parameter twice. Their gradients are sums over all holders, of which the first stage of the first copy is the
    one that counts and saves.
    """
    for chunk, model in enumerate(stages):
        copy, stage = schedule.stage_of(mesh.pp_forward.rank, chunk)
        for parameter in model.parameters():
            tied = model.config.tie_embeddings and parameter.spec.name == "embedding.weight"
            others = ("embed",) if tied and schedule.stages > 1 else ("mirror",) if len(schedule.placement) > 1 else ()
            spec = parameter.spec
            owner = spec.owner and copy == 0 and (stage == 0 or not tied)
            # Both holders of a tied matrix cut it into the same shards, whatever their other parameters are
            alone = "embed" in others
            groups = (*spec.extra_groups, *others)
            parameter.spec = replace(spec, extra_groups=groups, owner=owner, own_bucket=alone)


def split_backward(stages: list[Decoder], schedule: Schedule, mesh: Mesh) -> None:
    """Where the schedule splits backwards, let linear layers put off their weights' gradients.

    Those that tensor parallelism has cut know how already.
    """
    splits = any(action.kind == "I" for actions in schedule.actions for action in actions)
    for model in stages if splits and mesh.tp.size == 1 else ():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, module=module: weight_gradients.linear(x, module.weight)
