"""What a step in all dimensions costs a rank: the dimensions' formulas added up.

b sequences of s tokens are a micro-batch, of which a rank takes m in a step. A rank of pp stages has layers / pp layers
and works on b s / cp tokens; h is their width. Numbers are means over the ranks of a pipeline, or with `ends=False`
those of a stage in the middle, which has neither embedding nor head. (A pipeline of one stage has both, whatever is
asked.) All experts are taken to be equally busy.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from common.config import TrainConfig
from common.costs.vocabulary import KINDS, WIDTHS, Message, sent
from common.counts import attention_parts, count_flops, down_parameters
from common.model_config import ModelConfig
from step01_single_gpu.cost import layer_activations, total_bytes
from step05_pipeline.schedules.catalogue import CHUNKS
from step06_context_parallel import cost as context
from step07_expert_parallel import cost as experts


class Layout(NamedTuple):
    """How a step is divided. Sequence parallelism comes with `tp`."""

    seq: int
    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    micro_batch: int = 1  # sequences
    micro_batches: int = 1  # of a rank in a step
    dtype: str = "float32"
    stages: int = 1  # of the pipeline, on each rank
    cp_mode: str = "ring"
    cp_split: str = "zigzag"
    recompute: str = "none"
    schedule: str = "1f1b"  # of one stage on each rank; several are interleaved
    nanotron: bool = False  # whether stages are those of nanotron, which published runs trained with; else as in step 5
    zero_replicas: int = 1  # copies of the weights, each of which ZeRO divides over its own ranks (hybrid sharding)

    @classmethod
    def of(cls, config: TrainConfig) -> "Layout":
        """Return the layout of a checked configuration."""
        same = {name: getattr(config, name) for name in ("dp", "pp", "cp", "tp", "ep", "zero", "micro_batch", "dtype")}
        same |= {name: getattr(config, name) for name in ("cp_mode", "cp_split", "recompute", "schedule")}
        same["zero_replicas"] = config.zero_replicas
        same["stages"] = config.virtual_stages or (CHUNKS if config.schedule == "interleaved" else 1)
        return cls(config.seq_len, micro_batches=config.accumulation_steps, **same)

    @property
    def is_whole(self) -> bool:
        """Whether a single stage has both ends of the model. Two stages hold their matrices apart, also on one rank."""
        return self.pp * self.stages == 1

    @property
    def copies(self) -> int:
        """Ranks that see other tokens with the same weights."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.dp * self.cp * self.tp // self.ep

    def sharing(self, experts: bool = False) -> tuple[int, int]:
        """Return over how many ranks ZeRO divides a copy of the weights (or of experts), and the number of copies."""
        holders = self.edp if experts else self.copies
        if not self.zero or self.zero_replicas == self.copies:
            return 1, holders
        copies = math.gcd(holders, self.zero_replicas)
        return holders // copies, copies

    @property
    def tokens(self) -> float:
        """Of a rank in a micro-batch, before sequence parallelism divides them by tp as well."""
        return self.micro_batch * self.seq / self.cp

    @property
    def tokens_per_gpu(self) -> float:
        """Of a step, over all GPUs: those of a pipeline and its tensor ranks work on the same ones."""
        return self.micro_batches * self.tokens / self.tp / self.pp


def parameters(model: ModelConfig, layout: Layout, ends: bool = True) -> tuple[float, float]:
    """Return the parameters of a rank before ZeRO: all but experts, and experts, which only ep divides."""
    rest, of_experts = of_layers(model, layout)
    if ends or layout.pp == 1:
        tables = 1 if model.tie_embeddings and layout.is_whole else 2
        if model.mtp and not layout.is_whole and not model.tie_embeddings:
            tables += 1  # the last stage looks up tokens as well
        rest += (tables * table(model, layout) + model.hidden) / layout.pp
    return rest, of_experts


def beside_block(model: ModelConfig) -> int:
    """Return what multi-token prediction has beside its block, whole on every tensor rank: a projection, three norms.

    Its block counts among the layers: in all means below it is divided among the stages as they are.
    """
    return model.mtp * (2 * model.hidden + 3) * model.hidden


def of_layers(model: ModelConfig, layout: Layout) -> tuple[float, float]:
    """Return those of a rank's layers alone.

    Norms, routers and shared experts are whole on every tensor rank, and each has at least one whole K/V head.
    """
    h, tp, with_experts, expert = model.hidden, layout.tp, len(model.expert_layers), 3 * model.hidden * model.expert_ffn
    attention = 2 * h * model.head_width * (model.heads + max(model.kv_heads, tp)) / tp  # q and output; k and v
    if model.latent:
        parts, whole = attention_parts(model), down_parameters(model)
        attention = whole + sum(size for name, size in parts.items() if "_a_" not in name) / tp
    rest = model.blocks * (attention + 2 * h) + (model.blocks - with_experts) * 3 * h * model.ffn / tp
    rest += beside_block(model)
    rest += with_experts * (h * model.experts + model.shared_experts * expert)
    return rest / layout.pp, with_experts * model.experts * expert / layout.ep / layout.pp


def table(model: ModelConfig, layout: Layout) -> int:
    """Return the parameters of a tensor rank's part of the embedding or the head, whose vocabulary is padded."""
    return -(-model.vocab // layout.tp) * model.hidden


# ---- messages --------------------------------------------------------------------------------------------------------


def messages(model: ModelConfig, layout: Layout, ends: bool = True, gradient: int | None = None) -> list[Message]:
    """Return all that a rank sends in a step, but for the norm of the gradient and the loss of the record.

    Args:
        gradient: bytes of an element in sums of gradients; None: as in our training, at least those of float32.
    """
    ends, (width, wide, _) = ends or layout.pp == 1, WIDTHS[layout.dtype]
    gradient = gradient or wide
    tied = table(model, layout) if (model.tie_embeddings or model.mtp) and ends else 0
    result = of_weights(model, layout, ends, gradient)
    if tied and layout.pp > 1:  # its holders are the first and the last stage
        size = gradient * tied / layout.sharing()[0]
        result.append(Message("embed", "all_reduce", sent("all_reduce", size, 2), 2 / layout.pp))
    times = layout.micro_batches * model.blocks / layout.pp
    stream = layout.tokens * model.hidden * width
    if layout.pp > 1:  # the residual stream to the next stage, and its gradient back
        borders = (layout.pp * layout.stages - 1) / layout.pp if ends else layout.stages
        for group in ("pp_forward", "pp_backward"):
            hops = layout.micro_batches * borders
            result.append(Message(group, "send", stream / layout.tp, hops, "other micro-batches"))
    if layout.cp > 1:  # keys and values, of a rank's own heads
        way, tokens = (layout.cp_mode, layout.cp_split, layout.cp), layout.micro_batch * layout.seq
        result += context.messages(*way, model, tokens, width, wide, times, layout.tp)
    result += of_tensors(model, layout, stream, ends, gradient)
    of_layers = layout.micro_batches * len(model.expert_layers) / layout.pp
    return result + experts.messages(model, layout.tokens / layout.tp, layout.ep, width, of_layers)


def of_weights(model: ModelConfig, layout: Layout, ends: bool, gradient: int) -> list[Message]:
    """Return the sums of gradients and the gathers of weights that ZeRO shards; in one bucket.

    Stages 2 and 3 sum after every micro-batch. Stage 3 gathers before every forward and backward; or with pp once a
    step. Before a backward that is all but what stays after the forward (last norm and head) and what is not read (the
    embedding); if these are one matrix, its forward gathers that twice. The block of multi-token prediction gathers the
    embedding once more, before its forward and its backward. Copies are summed when all else has been.
    """
    narrow, each, pp = WIDTHS[layout.dtype][0], layout.micro_batches, layout.pp
    once, behind = pp > 1 or layout.zero < 3, "the backward of other stages" if pp > 1 else "the backward"
    size, result = 0 if once else table(model, layout), []
    tables = ("", (model.tie_embeddings + model.mtp) * size, model.mtp * size), ("expert_", 0, 0)
    of_rank = zip(parameters(model, layout, ends), of_layers(model, layout))
    for (size, of_layer), (name, twice, again) in zip(of_rank, tables):
        ranks, copies = layout.sharing(bool(name))
        if ranks > 1 and size:
            shard, part = f"{name}shard", (ranks - 1) / ranks
            scatters, gathers = each if layout.zero >= 2 else 1, 1 if once else each
            result.append(Message(shard, "reduce_scatter", size * gradient * part, scatters, behind))
            result.append(Message(shard, "all_gather", (size + twice) * narrow * part, gathers, "the forward"))
            if not once:
                result.append(Message(shard, "all_gather", (of_layer + again) * narrow * part, each, "the backward"))
        if copies > 1 and size:
            whole = sent("all_reduce", size * gradient / ranks, copies)
            result.append(Message(f"{name}replica", "all_reduce", whole, 1, behind))
    return result


def of_tensors(model: ModelConfig, layout: Layout, stream: float, ends: bool, gradient: int) -> list[Message]:
    """Return what tensor ranks exchange: the sequence around each sublayer, losses, gradients of what all of them hold.
    And of what some do, if they are more than K/V heads.

    A sublayer (attention, and an MLP that no experts replace) gathers its input in the forward, and twice in the
    backward; it reduce-scatters its output, and the gradient of its input. Embedding and head have one of each; with
    multi-token prediction there are two embeddings, and twice as many tokens in the head.
    """
    tp, pp = layout.tp, layout.pp
    if tp == 1:
        return []
    sublayers, end = (2 * model.blocks - len(model.expert_layers)) / pp, 1 / pp if ends else 0
    part, each, predictions = (tp - 1) / tp * stream, layout.micro_batches, 1 + model.mtp
    result = []
    if model.latent:  # in place of its input, what queries come from, twice; and latent and rotated key, once
        latent, layers = model.latent, model.blocks / pp
        sublayers -= layers
        queries, shared = (
            width / model.hidden * part for width in (latent.q_rank or model.hidden, latent.shared_width)
        )
        for op, again in (("all_gather", 2), ("reduce_scatter", 1)):
            result += [Message("tp", op, queries, each * again * layers), Message("tp", op, shared, each * layers)]
            result.append(Message("tp", op, part, each * layers))  # around `o_proj`
    for operation, times in (("all_gather", 3), ("reduce_scatter", 2)):
        times = each * (times * sublayers + predictions * end)
        result.append(Message("tp", operation, part, times, "weight gradients, in the backward"))
        result.append(Message("tp", operation, predictions * part, each * end, "weight gradients, in the backward"))
    for numbers in (1, 2):  # of a token: the largest logit; the sum of exponentials and the logit of the target
        size = sent("all_reduce", 4 * numbers * predictions * layout.tokens, tp)
        result.append(Message("tp", "all_reduce", size, each * end))
    beside_experts = model.hidden * (model.experts + 3 * model.shared_experts * model.expert_ffn)
    whole = model.blocks * (2 * model.hidden + down_parameters(model)) + beside_block(model)
    whole = (whole + len(model.expert_layers) * beside_experts) / pp + model.hidden * end
    shard = gradient / layout.sharing()[0]  # with ZeRO only this rank's shard of them
    result.append(Message("tp", "all_reduce", sent("all_reduce", shard * whole, tp), 1))
    if (same := tp // model.kv_heads) > 1:  # a head of keys and of values
        heads = 2 * model.blocks * model.hidden * model.head_width / pp
        result.append(Message("kv_replica", "all_reduce", sent("all_reduce", shard * heads, same), 1))
    return result


# ---- bytes held, operations, bubble ----------------------------------------------------------------------------------


def held(model: ModelConfig, layout: Layout) -> dict[str, float]:
    """Return the bytes of parameters, gradients and optimizer state that a rank holds; ZeRO divides them."""
    rest, of_experts = parameters(model, layout)
    result, ranks = {}, (layout.sharing()[0], layout.sharing(experts=True)[0])
    for kind, width, first in zip(KINDS, WIDTHS[layout.dtype], (3, 2, 1)):  # first: the stage of ZeRO that divides it
        shards = ranks if layout.zero >= first else (1, 1)
        result[kind] = width * (rest / shards[0] + of_experts / shards[1])
    return result


def activations(model: ModelConfig, layout: Layout) -> float:
    """Return the bytes that dense layers of the first stage keep in 1F1B: pp micro-batches in flight, or all m."""
    size = layout.micro_batch, layout.seq, getattr(torch, layout.dtype)
    model = replace(model, kv_heads=max(model.kv_heads, layout.tp))  # a tensor rank has at least a whole one
    listed = layer_activations(model, *size, "fused", layout.recompute)
    layer = total_bytes(listed)  # latent and rotated key are gathered, and whole on every tensor rank
    layer += (layout.tp - 1) * sum(each.bytes for each in listed if each.name in ("kv_b_proj.input", "rotated key"))
    in_flight = min(layout.pp, layout.micro_batches)
    return in_flight * model.layers / layout.pp * layer / (layout.tp * layout.cp)


def operations(model: ModelConfig, layout: Layout) -> dict[str, float]:
    """Return a rank's FLOPs in a step, forward and backward, without the half of the scores that is masked."""
    flops = count_flops(model, layout.seq)
    sequences = layout.micro_batch * layout.micro_batches / (layout.cp * layout.tp * layout.pp)
    copies = max(0, layout.tp - model.kv_heads)  # of K/V heads that other ranks compute as well
    again = model.blocks * 4 * layout.seq * model.hidden * model.head_width * copies
    products = 3 * (flops.linear + again + flops.head)
    products += (context.expansions(layout.cp_mode, layout.cp) - 3) * flops.expansion
    return {"products": products * sequences, "attention": 1.5 * flops.attention_core * sequences}


def bubble(layout: Layout) -> float:
    """Return the share of a step in which a rank of the pipeline waits, in 1F1B, interleaved or not (step 5)."""
    return (layout.pp - 1) / (layout.stages * layout.micro_batches + layout.pp - 1)
