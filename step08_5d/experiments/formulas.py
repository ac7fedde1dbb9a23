"""What the lessons' formulas say of a run in several dimensions: bytes that a rank sends, bytes that it holds.

b sequences of s tokens are a micro-batch, h is the hidden width, h_kv that of all K/V heads, L the layers, and m the
micro-batches of a rank. Everything is float32: 4 bytes. Results are means over all ranks.
"""

import torch

from common.config import TrainConfig
from common.counts import count_parameters
from step01_single_gpu.cost import layer_activations, total_bytes

WIDTH = 4


def reduced(size: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-reduce of `size` bytes, or in a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) / ranks * size


def sent(config: TrainConfig) -> dict[str, float]:
    """Bytes that a rank sends in a step, by dimension. With experts: all of them equally busy.

    dp   the gradients of all but experts, once over the dp x cp ranks; of experts over those that hold the same ones.
         ZeRO-3: a reduce-scatter of gradients and two all-gathers of weights, one of the embedding, norm and head
    pp   the residual stream of each micro-batch to the next stage, its gradient back
    cp   in each layer keys and values N - 1 times in the forward; again in the backward, sums of their gradients N
         times
    tp   in each layer 2 all-gathers and 2 reduce-scatters in the forward, 4 and 2 in the backward; half of that where
         experts are in the place of the MLP. The embedding has 2, the head 2; the loss sends 3 numbers for each token
    ep   in each layer a dispatch and a combine in the forward, and both in the backward; 8 bytes for each expert
    """
    model, count = config.model_config, count_parameters(config.model_config)
    dp, pp, cp, tp, ep, m = config.dp, config.pp, config.cp, config.tp, config.ep, config.accumulation_steps
    h, layers = model.hidden, model.layers / pp
    tokens = config.micro_batch * config.seq_len / cp  # of a rank, before sequence parallelism
    stream = tokens * h * WIDTH
    result = dict.fromkeys(("dp", "pp", "cp", "tp", "ep"), 0.0)

    rest, experts = parameters(config)
    copies = dp * cp
    if config.zero == 3:
        again = model.layers * (count.attention + count.dense_mlp + 2 * h)
        result["dp"] = (copies - 1) / copies * (2 * rest + again) * WIDTH * m
    else:
        result["dp"] = reduced(rest * WIDTH, copies) + reduced(experts * WIDTH, copies * tp // ep)
    result["pp"] = 2 * m * stream / tp * (pp - 1) / pp
    if cp > 1:
        keys = tokens * model.kv_heads * model.head_width / tp * WIDTH
        result["cp"] = m * layers * 2 * keys * (3 * cp - 2)
    if tp > 1:
        collectives = (5 if model.experts else 10) * layers + 4 / pp
        whole = 2 * layers * h + h / pp + layers * h * model.experts  # norms and routers: summed over tp,
        whole /= copies if config.zero else 1  # with ZeRO only this rank's shard of them
        loss = reduced(3 * tokens * WIDTH, tp) / pp
        result["tp"] = m * (collectives * (tp - 1) / tp * stream + loss) + reduced(whole * WIDTH, tp)
    if ep > 1:
        rows = model.top_k * tokens / tp * h * WIDTH
        result["ep"] = m * layers * (4 * rows + 8 * model.experts) * (ep - 1) / ep
    return result


def parameters(config: TrainConfig) -> tuple[float, float]:
    """Parameters of a rank, all but experts and experts, before ZeRO: norms and routers are whole on every tensor rank.

    Experts are divided by ep alone, whatever tp is.
    """
    model, count = config.model_config, count_parameters(config.model_config)
    of_experts = 3 * model.hidden * model.expert_ffn * model.experts * model.layers if model.experts else 0
    whole = count.norms + model.layers * model.hidden * model.experts
    divided = count.total - of_experts - whole
    return (divided / config.tp + whole) / config.pp, of_experts / config.ep / config.pp


def held(config: TrainConfig) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state (two moments) that a rank holds; ZeRO divides them."""
    rest, experts = parameters(config)
    copies = config.dp * config.cp
    result = {}
    for kind, first, numbers in (("parameters", 3, 1), ("gradients", 2, 1), ("optimizer state", 1, 2)):
        shards = (copies, copies * config.tp // config.ep) if config.zero >= first else (1, 1)
        result[kind] = numbers * WIDTH * (rest / shards[0] + experts / shards[1])
    return result


def kept_by_layers(config: TrainConfig) -> float:
    """Bytes that the layers of the first stage keep for backwards in 1F1B: p micro-batches in flight, or all m."""
    size = config.micro_batch, config.seq_len, torch.float32
    layer = total_bytes(layer_activations(config.model_config, *size, "fused", "none"))
    in_flight = min(config.pp, config.accumulation_steps)
    return in_flight * config.model_config.layers / config.pp * layer / (config.tp * config.cp)
