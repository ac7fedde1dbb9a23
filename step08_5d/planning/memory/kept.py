"""What a micro-batch in flight keeps for its backward, in layers and in stages of the pipeline."""

from functools import lru_cache
from typing import NamedTuple

import torch

from common.costs.vocabulary import WIDTHS
from common.model_config import ModelConfig
from step04_tensor_parallel.cost import Way, block_activations
from step07_expert_parallel.cost import activations as expert_activations
from step08_5d.cost import Layout
from step08_5d.planning.memory.share import share_of
from step08_5d.planning.memory.sizes import Sizes, ulysses


class Kept(NamedTuple):
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


def kept_by_stages(model: ModelConfig, layout: Layout, rank: int) -> list[Kept]:
    """Return the same for each stage of a rank."""
    narrow, wide, _ = WIDTHS[layout.dtype]
    tables = 2 * layout.seq / layout.cp * model.head_width * wide
    # What a later stage has received is a copy of its own, unless it is what the first norm or recomputation keeps
    copied = narrow < wide and layout.recompute != "full"
    received = layout.tokens * model.hidden / layout.tp * narrow if copied else 0.0
    result = []
    for number, (first, last) in enumerate(share_of(model, layout, rank).stages):
        data = 8 * layout.tokens * ((first == 0) + (last == model.layers))  # tokens or targets, or both
        layers = kept_by_layers(model, layout, first, last)
        result.append(Kept(layers, tables + data, received if rank or number else 0.0))
    return result


def kept_by_layers(model: ModelConfig, layout: Layout, first: int, last: int) -> float:
    """Return the bytes that the layers [first, last) keep of one micro-batch."""
    with_experts = max(0, last - max(first, model.dense_layers)) if model.experts else 0
    result = (last - first - with_experts) * kept_by_layer(model, layout, False)
    return result + with_experts * kept_by_layer(model, layout, True) if with_experts else result


def kept_by_layer(model: ModelConfig, layout: Layout, experts: bool) -> float:
    """Return the bytes that a layer keeps of one micro-batch, dense or with experts."""
    return _kept_by_layer(model, of_a_layer(layout), layout.recompute, experts)


def kept_at_work(model: ModelConfig, layout: Layout, experts: bool) -> float:
    """Return the same when its backward begins: recomputed, all that it would keep, its output and its narrow input."""
    if layout.recompute != "full":
        return kept_by_layer(model, layout, experts)
    size = Sizes.of(model, layout)
    recomputed = _kept_by_layer(model, of_a_layer(layout), "none", experts)
    return recomputed + size.stream * (2 if size.narrow else 1)


def of_a_layer(layout: Layout) -> Layout:
    """Return the layout with all left out that makes no difference to a layer: a search asks for many like it."""
    return layout._replace(dp=1, pp=1, zero=0, micro_batches=1, stages=1, nanotron=False)


@lru_cache(maxsize=4096)
def _kept_by_layer(model: ModelConfig, layout: Layout, recompute: str, experts: bool) -> float:
    """Attention is fused and keeps no scores, so `selective` saves no more than a number for each row of them."""
    full_recompute = recompute == "full"
    dtype, seq = getattr(torch, layout.dtype), layout.seq // layout.cp
    way = Way(sequence_parallel=layout.tp > 1, full_recompute=full_recompute)
    dense = block_activations(model, layout.micro_batch, seq, dtype, layout.tp, way)
    if recompute == "selective":
        dense["attention"] -= layout.micro_batch * seq * model.heads * max(4, dtype.itemsize) // layout.tp
    elif ulysses(layout) and not full_recompute:  # of all tokens, their order, and the output once more
        size = Sizes.of(model, layout)
        dense["attention"] += size.queries + 2 * (size.gathered_keys - size.keys) + 8 * layout.seq
    if full_recompute or not experts:
        return sum(dense.values())
    tokens = int(layout.tokens / layout.tp)
    rows, width, shared_ffn = tokens * model.top_k, dtype.itemsize, model.shared_experts * model.expert_ffn
    own_input = model.hidden if width < WIDTHS[layout.dtype][1] else 0  # the router keeps a copy in the type of sums
    shared = tokens * (own_input + 4 * shared_ffn) * width if shared_ffn else 0
    # The MLP's input is that of a router, which has counted it
    dense["mlp"], dense["column inputs"] = 0, dense["column inputs"] // 2
    return sum(dense.values()) + expert_activations(model, tokens, rows, width, layout.ep) + shared
