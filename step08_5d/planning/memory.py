"""What the fullest rank of a layout holds, by kind: the steps' own formulas for one stage of the pipeline.

Parameters, gradients and optimizer state are exact where ranks hold equally much (heads, columns and vocabulary divided
without a remainder). Activations are what a rank keeps for the backward. The rest, `working`, is an estimate: what the
layer at work and the head need beyond that.
"""

from functools import cache

import torch

from common.costs.vocabulary import KINDS, WIDTHS
from common.model_config import ModelConfig
from step04_tensor_parallel.cost import Way, block_activations
from step07_expert_parallel.cost import activations as expert_activations
from step08_5d import cost
from step08_5d.cost import Layout
from step08_5d.planning.stages import fullest_ranks, in_flight, layers_of_ranks

CHUNK = 1 / 4  # of the memory of the head's gradient: the logits that exist at a time (step 8, fused head)


def memory(model: ModelConfig, layout: Layout) -> dict[str, float]:
    """Return the bytes by kind of the rank of a pipeline that holds most."""
    stages = fullest_ranks(model, layout)
    return max((of_stage(model, layout, stage) for stage in stages), key=lambda kinds: sum(kinds.values()))


def of_stage(model: ModelConfig, layout: Layout, stage: int) -> dict[str, float]:
    """Return the bytes by kind of this rank of a pipeline, under 1F1B, or interleaved if it has several stages."""
    rest, of_experts = parameters(model, layout, stage)
    narrow, wide, _ = WIDTHS[layout.dtype]
    result = {}
    for kind, width, first in zip(KINDS, WIDTHS[layout.dtype], (3, 2, 1)):  # first: the stage of ZeRO that divides it
        shards = (layout.copies, layout.edp) if layout.zero >= first else (1, 1)
        result[kind] = width * (rest / shards[0] + of_experts / shards[1])
    layers = layers_of_ranks(model, layout)[stage]
    kept, whole = (layer_activations(model, layout, again) for again in (layout.recompute, "none"))
    result["activations"] = in_flight(model, layout, stage) * layers * kept
    working = whole if layout.recompute == "full" else whole / 2  # a layer that is computed again; gradients of one
    if stage == layout.pp - 1:
        head = model.vocab * model.hidden / layout.tp
        working = max(working, (1 + CHUNK) * head * wide + 3 * layout.tokens * model.hidden * wide)
    if layout.zero == 3:  # what is gathered: two units, or in a pipeline the stage for a whole step
        both = (rest + of_experts) * (1 if layout.pp > 1 else min(1, 2 / layers))
        working += narrow * both * (1 - 1 / layout.copies)
    return result | {"working": working}


def parameters(model: ModelConfig, layout: Layout, stage: int) -> tuple[float, float]:
    """Return how many parameters a rank of this stage has before ZeRO: all but experts, and experts."""
    layers = layers_of_ranks(model, layout)[stage]
    mean = cost.parameters(model, layout, ends=False)
    rest, of_experts = (layers * (each * layout.pp / model.layers) for each in mean)
    matrix = model.vocab * model.hidden / layout.tp
    if stage == 0:
        rest += matrix
    if stage == layout.pp - 1:
        rest += model.hidden + (0 if model.tie_embeddings and stage == 0 else matrix)
    return rest, of_experts


def layer_activations(model: ModelConfig, layout: Layout, recompute: str) -> float:
    """Return the bytes that a layer keeps of one micro-batch, on average over layers with and without experts."""
    return _layer_activations(model, layout._replace(dp=1, pp=1, zero=0, micro_batches=1, stages=1), recompute)


@cache  # a search asks for the same layer in many pipelines
def _layer_activations(model: ModelConfig, layout: Layout, recompute: str) -> float:
    """The same, of a layout with all that makes no difference left out.

    Attention is fused and keeps no scores, so `selective` saves no more than a number for each row of them.
    """
    full_recompute = recompute == "full"
    dtype, seq = getattr(torch, layout.dtype), layout.seq // layout.cp
    way = Way(sequence_parallel=layout.tp > 1, full_recompute=full_recompute)
    dense = block_activations(model, layout.micro_batch, seq, dtype, layout.tp, way)
    if recompute == "selective":
        dense["attention"] -= layout.micro_batch * seq * model.heads * max(4, dtype.itemsize) // layout.tp
    share = cost.expert_layers(model) / model.layers
    if full_recompute or not share:
        return sum(dense.values())
    tokens = layout.tokens / layout.tp
    experts = expert_activations(model, int(tokens), int(tokens * model.top_k), dtype.itemsize, layout.ep)
    return sum(dense.values()) + share * (experts - dense["mlp"])
