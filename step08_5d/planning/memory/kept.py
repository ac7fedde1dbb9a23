"""What a micro-batch in flight keeps for its backward: in a layer tensor by tensor, and in stages of the pipeline."""

from functools import lru_cache
from typing import NamedTuple

import torch

from common.costs.vocabulary import WIDTHS
from common.model_config import ModelConfig
from step01_single_gpu.cost import layer_activations
from step07_expert_parallel.cost import activations as expert_activations
from step08_5d.cost import Layout
from step08_5d.planning.memory import latent
from step08_5d.planning.memory.ledger import Tensors
from step08_5d.planning.memory.sizes import LayerSizes, ulysses
from step08_5d.planning.stages import ranges_of_rank


class KeptByStage(NamedTuple):
    """Bytes that a stage keeps of a micro-batch."""

    layers: float
    beside: float  # tables of the rotation, tokens and targets
    received: float  # the hidden states that have arrived, if no operation has saved them

    @property
    def all(self) -> float:
        return sum(self)


def kept(model: ModelConfig, layout: Layout, rank: int) -> float:
    """Return the bytes that the stages of a rank keep of one micro-batch, with the tables of the rotation."""
    return sum(each.all for each in kept_by_stages(model, layout, rank))


def kept_by_stages(model: ModelConfig, layout: Layout, rank: int) -> list[KeptByStage]:
    """Return the same for each stage of a rank."""
    narrow, wide, _ = WIDTHS[layout.dtype]
    rotation = 2 * layout.seq / layout.cp * model.rotary_width * wide
    # What a later stage has received is a copy of its own, unless it is what the first norm or recomputation keeps
    copied = narrow < wide and layout.recompute != "full"
    received = layout.tokens * model.hidden / layout.tp * narrow if copied else 0.0
    result = []
    for number, (first, last) in enumerate(ranges_of_rank(model, layout, rank)):
        tables = rotation
        data = 8 * layout.tokens * ((first == 0) + (last == model.blocks))  # tokens or targets, or both
        if model.mtp and last == model.blocks:  # second targets, and both together; the second block's own tables
            data, tables = data + 24 * layout.tokens, 2 * tables
        layers = kept_by_layers(model, layout, first, last)
        result.append(KeptByStage(layers, tables + data, received if rank or number else 0.0))
    return result


def kept_by_layers(model: ModelConfig, layout: Layout, first: int, last: int) -> float:
    """Return the bytes that the layers [first, last) keep of one micro-batch."""
    with_experts = max(0, last - max(first, model.expert_layers.start))
    result = 0.0
    for experts, number in ((False, last - first - with_experts), (True, with_experts)):
        if number:
            result += number * kept_by_layer(model, of_a_layer(layout, experts), experts=experts)
    if last > max(first, model.layers):
        result += sum(beside_second_block(model, layout).values())
    return result


@lru_cache(maxsize=16)  # all ranks of a layout ask for it
def of_a_layer(layout: Layout, experts: bool = True) -> Layout:
    """Return the layout with all left out that makes no difference to a layer: a search asks for many like it."""
    same = layout._replace(dp=1, pp=1, zero=0, micro_batches=1, stages=1, nanotron=False, zero_replicas=1)
    return same if experts else same._replace(ep=1)


@lru_cache(maxsize=4096)
def kept_by_layer(model: ModelConfig, layout: Layout, *, experts: bool) -> float:
    """Return the bytes that a layer keeps of one micro-batch, dense or with experts."""
    return sum(tensors_of_layer(model, layout, layout.recompute, experts=experts).values())


def at_work(model: ModelConfig, layout: Layout, *, experts: bool) -> Tensors:
    """Return what is kept when a layer's backward begins. Recomputed, a layer also has its output and narrow input."""
    if layout.recompute != "full":
        return tensors_of_layer(model, layout, layout.recompute, experts=experts)
    size = LayerSizes.of(model, layout)
    copies = {"output": size.stream} | ({"narrow input": size.stream} if size.narrow else {})
    return tensors_of_layer(model, layout, "none", experts=experts) | copies


@lru_cache(maxsize=64)  # nobody may change them
def tensors_of_layer(model: ModelConfig, layout: Layout, recompute: str, *, experts: bool) -> Tensors:
    """Return what a layer keeps of one micro-batch: step 1's list for fused attention, divided over tensor ranks.

    Attention keeps no scores, so `selective` saves no more than a number for each row of them. With fewer K/V heads
    than tensor ranks, every rank has a whole one.
    """
    dtype = getattr(torch, layout.dtype)
    listed = layer_activations(model, layout.micro_batch, layout.seq // layout.cp, dtype, "fused", recompute)
    result = {each.name: each.bytes / layout.tp for each in listed}
    if recompute == "full":
        return result
    size = LayerSizes.of(model, layout)
    if model.latent:
        result = latent.kept(model, layout, size, recompute, result)
    else:
        result |= {"k": size.keys, "v": size.keys}
    if ulysses(layout) and recompute == "none":  # of all tokens: keys and values, their order, and the output once more
        result |= {"k": size.gathered_keys, "v": size.gathered_keys}
        result |= {"attention output": size.queries, "order of tokens": 8 * layout.seq}
    if experts:
        for name in ("gate_up.input", "gate", "silu", "up", "down.input"):
            del result[name]
        result |= _tensors_of_experts(model, layout, size)
    return result


def _tensors_of_experts(model: ModelConfig, layout: Layout, size: LayerSizes) -> Tensors:
    """What the experts of a layer keep. The router reads a copy in at least float32, the shared ones a narrow one."""
    tokens = int(layout.tokens / layout.tp)
    rows = tokens * model.top_k
    inner = rows * model.expert_ffn * size.w
    result = {"router.input": 4 * tokens * model.hidden}
    result |= {"experts.input": rows * model.hidden * size.w, "experts.output": rows * model.hidden * size.w}
    result |= dict.fromkeys(("experts.gate", "experts.silu", "experts.up", "experts.down.input"), inner)
    all_of_it = expert_activations(model, tokens, rows, size.w, layout.ep)
    result["scores, choices and orders"] = all_of_it - sum(result.values())
    if model.shared_experts:
        inner = tokens * model.shared_experts * model.expert_ffn * size.w
        result |= dict.fromkeys(("shared.gate", "shared.silu", "shared.up", "shared.down.input"), inner)
        result |= {"shared.gate_up.input": tokens * model.hidden * size.w} if size.narrow else {}
    return result


def beside_second_block(model: ModelConfig, layout: Layout, *, at_work: bool = False) -> Tensors:
    """Return what the block of multi-token prediction keeps of a micro-batch beside what its layer does.

    Args:
        at_work: whether its backward has begun. Recomputed, it then has all that it has not kept.
    """
    size, high = LayerSizes.of(model, layout), WIDTHS[layout.dtype][1]

    def of_norm(name: str) -> Tensors:
        sizes = {"input": size.wide, "normalised": size.stream, "rsqrt": layout.tokens / layout.tp * high}
        return {f"{name}.{each}": number for each, number in sizes.items()}

    result = of_norm("shared_head.norm")
    if layout.recompute == "full":  # its two inputs, of which those of a layer have one
        result["embedded"] = size.stream
    if layout.recompute != "full" or at_work:
        result |= of_norm("enorm") | of_norm("hnorm") | {"eh_proj.input": 2 * size.stream}
    return result
