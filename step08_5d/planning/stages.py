"""Which layers each rank of a pipeline holds.

They are divided as step 5 divides them: the last stage also has the head and holds fewer, and no number of stages has
to divide the layers. The block of multi-token prediction is one more layer of the last stage. Published runs were
divided by nanotron.
"""

from functools import cache
from itertools import pairwise

from common.model_config import ModelConfig
from step05_pipeline.stages import split_layers
from step08_5d.cost import Layout


@cache  # a search asks for a few hundred of them, and often
def _ranges(model: ModelConfig, stages: int, seq: int, nanotron: bool = False) -> list[tuple[int, int]]:
    *others, (first, _) = split_like_nanotron(model, stages) if nanotron else split_layers(model, stages, seq)
    return [*others, (first, model.blocks)]


def split_like_nanotron(model: ModelConfig, stages: int) -> list[tuple[int, int]]:
    """Return the layers [first, last) of each stage of a published run: the layer that fills a stage is still its own.

    A stage is full when it and those before it have their share of all multiplications by weights, those of the head
    included (nanotron, `models/base.py`). The last stage may have the head alone.
    """
    layer, head = 4 * model.hidden**2 + 3 * model.hidden * model.ffn, model.hidden * model.vocab
    whole = model.layers * layer + head
    bounds = [min(model.layers, whole * stage // (stages * layer) + 1) for stage in range(1, stages)]
    return list(pairwise([0, *bounds, model.layers]))


def stage_sizes(model: ModelConfig, stages: int, seq: int) -> tuple[int, ...]:
    """Return how many layers each stage of the model has."""
    return tuple(last - first for first, last in _ranges(model, stages, seq))


def ranges_of_rank(model: ModelConfig, layout: Layout, rank: int) -> list[tuple[int, int]]:
    """Return the layers [first, last) of each stage of a rank."""
    return _ranges(model, layout.pp * layout.stages, layout.seq, layout.nanotron)[rank :: layout.pp]


def layers_of_ranks(model: ModelConfig, layout: Layout) -> tuple[int, ...]:
    """Return how many layers each rank of the pipeline has, in all of its stages."""
    return _layers_of_ranks(model, layout.pp, layout.stages, layout.seq, layout.nanotron)


@cache
def _layers_of_ranks(model: ModelConfig, p: int, v: int, seq: int, nanotron: bool) -> tuple[int, ...]:
    sizes = [last - first for first, last in _ranges(model, p * v, seq, nanotron)]
    return tuple(sum(sizes[rank::p]) for rank in range(p))
