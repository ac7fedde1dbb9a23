"""Which layers each rank holds: the model cut into stages, and what stages share."""

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from common.counts import count_flops
from common.model_config import ModelConfig
from step05_pipeline.schedules.actions import Schedule


def split_layers(config: ModelConfig, stages: int, seq_len: int) -> list[tuple[int, int]]:
    """The layers [first, last) of each stage, chosen so that the slowest stage is as fast as possible.

    Every stage has at least one layer. The last one also multiplies by the head, which counts with its FLOPs, and so
    does all of multi-token prediction; the embedding multiplies nothing. If several stages could take one more layer, a
    later one takes it: the first one holds the embedding and, in most schedules, the activations of more micro-batches.
    """
    flops, everything = (count_flops(each, seq_len) for each in (replace(config, mtp=0), config))
    layer = (flops.linear + flops.attention_core) / config.layers
    layers, cost = [1] * stages, [layer] * stages
    cost[-1] += flops.head + everything.forward - flops.forward
    for _ in range(config.layers - stages):  # all layers are alike, so the greedy choice is the best
        lightest = min(range(stages), key=lambda stage: (cost[stage], -stage))
        layers[lightest] += 1
        cost[lightest] += layer
    bounds = [sum(layers[:stage]) for stage in range(stages + 1)]
    return list(zip(bounds, bounds[1:]))


def mark_shared_parameters(stages: list[nn.Module], schedule: Schedule, rank: int, at_both_ends: Iterable[str]) -> None:
    """Note in the specs which parameters other stages hold as well, after tensor parallelism has cut them.

    A matrix that is both embedding and head is stored at both ends of the pipeline, and a schedule with several copies
    of the model stores every parameter in each. Their gradients are sums over all holders, the groups `embed` and
    `mirror`. The holder that counts and saves the parameter is the first stage of the first copy.

    Args:
        rank: this one, in the pipeline.
        at_both_ends: names of the parameters that the first and the last stage share.

    Raises ValueError if two stages hold the same tensor: it has one spec, and they need two. And if ZeRO has the
    parameters already: what it updates has copies of their specs.
    """
    held: set[nn.Parameter] = set()
    for model in stages:
        if twice := held.intersection(model.parameters()):
            name = next(iter(twice)).spec.name
            raise ValueError(f"two stages of a rank hold the same {name}: build each from its own model")
        held.update(model.parameters())
    for chunk, model in enumerate(stages):
        copy, stage = schedule.stage_of(rank, chunk)
        for parameter in (*model.parameters(), *(buffer for buffer in model.buffers() if hasattr(buffer, "spec"))):
            spec = parameter.spec
            if hasattr(parameter, "sums"):  # of gradients
                raise ValueError(f"{spec.name}: mark_shared_parameters comes before ZeRO, which copies the specs")
            tied = schedule.stages > 1 and spec.name in at_both_ends
            if not tied and len(schedule.placement) == 1:
                continue  # no other stage holds it
            holders = "embed" if tied else "mirror"  # the group of these stages' ranks
            owner = spec.owner and copy == 0 and (stage == 0 or not tied)
            # With a bucket of its own, both ends cut it into the same shards
            parameter.spec = replace(spec, extra_groups=(*spec.extra_groups, holders), owner=owner, own_bucket=tied)
