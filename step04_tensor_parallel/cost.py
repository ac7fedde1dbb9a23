"""What tensor parallelism costs: collectives of a block and of a step, activations that a rank keeps, what hides.

tp ranks share every layer, of b sequences of s tokens. h is the hidden width, f the MLP's; a heads of width d and a_kv
K/V heads; beta the bytes of an activation. The residual stream of a micro-batch has b s h elements. Parameters,
gradients, optimizer state and operations are those of step 1, divided by tp (norms are whole).
"""

from dataclasses import dataclass

import torch

from common.costs.alpha_beta import Player
from common.costs.vocabulary import Message, sent
from common.counts import down_parameters
from common.layers import at_least_float32
from common.model_config import ModelConfig
from step01_single_gpu.cost import layer_activations
from step02_data_parallel.cost import SCALAR

# ---- collectives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a run splits its layers: the flags --sequence-parallel, --tp-mode and --recompute."""

    sequence_parallel: bool = True
    mode: str = "overlap"
    full_recompute: bool = False

    @property
    def gathers_again(self) -> bool:
        """The gathered input of a column-parallel layer is not kept, but gathered once more in the backward."""
        return self.sequence_parallel and self.mode != "plain"


def column_messages(way: Way, tp: int, stream: float) -> tuple[list[Message], list[Message]]:
    """What a rank sends in the forward and in the backward of column-parallel layers that share their input.

    Args:
        stream: bytes of the whole residual stream, b s h beta.
    """
    behind_dx, behind_dw = ("", "") if way.mode == "plain" else ("input's gradient", "weights' gradients")
    if not way.sequence_parallel:
        return [], [Message("tp", "all_reduce", sent("all_reduce", stream, tp), 1, behind_dw)]
    half = sent("all_gather", stream, tp)
    backward = [Message("tp", "all_gather", half, 1, behind_dx)] if way.gathers_again else []
    return [_in_forward("all_gather", way, tp, stream)], [
        *backward,
        Message("tp", "reduce_scatter", half, 1, behind_dw),
    ]


def attention_messages(way: Way, tp: int, stream: float, model: ModelConfig) -> tuple[list[Message], list[Message]]:
    """The same where the attention begins. Latent attention has two such places: it gathers what queries come from, and
    latent and rotated key, which are narrow, so that they are kept gathered in every mode.
    """
    if model.latent is None:
        return column_messages(way, tp, stream)
    queries, shared = model.latent.q_rank or model.hidden, model.latent.shared_width
    of_queries = column_messages(way, tp, stream * queries / model.hidden)
    of_shared = column_messages(Way(way.sequence_parallel, "plain"), tp, stream * shared / model.hidden)
    return tuple(first + second for first, second in zip(of_queries, of_shared, strict=True))


def row_messages(way: Way, tp: int, stream: float) -> tuple[list[Message], list[Message]]:
    """The same of a row-parallel layer. Both products of its backward need what is gathered."""
    if not way.sequence_parallel:
        return [Message("tp", "all_reduce", sent("all_reduce", stream, tp), 1)], []
    gather = Message("tp", "all_gather", sent("all_gather", stream, tp), 1)
    return [_in_forward("reduce_scatter", way, tp, stream)], [gather]


def _in_forward(op: str, way: Way, tp: int, stream: float) -> Message:
    """A half of an all-reduce. Chunked: it goes round a ring beside the product, in tp - 1 messages."""
    if way.mode == "chunked":
        return Message("tp", "send", sent("send", stream / tp, tp), tp - 1, "product")
    return Message("tp", op, sent(op, stream, tp), 1)


def block_messages(way: Way, tp: int, stream: float, model: ModelConfig | None = None) -> list[Message]:
    """What a rank sends for one block and micro-batch; a block has two sublayers, attention and MLP.

    Without sequence parallelism: 2 + 2 all-reduces (Shoeybi et al., arXiv:1909.08053, section 3). With it each of them
    becomes an all-gather and a reduce-scatter (Korthikanti et al., arXiv:2205.05198, section 4.2.2), and there is one
    more all-gather a sublayer in the backward where the input was not kept. `full_recompute` runs the forward again.
    Without a model, it is one without latent attention.
    """
    (enter, back), (leave, back_again) = column_messages(way, tp, stream), row_messages(way, tp, stream)
    first, back_first = attention_messages(way, tp, stream, model) if model else (enter, back)
    forward = first + enter + 2 * leave
    return forward + back_first + back + 2 * back_again + (forward if way.full_recompute else [])


def messages(
    way: Way, tp: int, model: ModelConfig, batch: int, seq: int, micro_batches: int = 1, width: int = 4
) -> list[Message]:
    """Everything that a rank sends in a step with tp alone (dp 1).

    The embedding ends like a sublayer and the head begins like one; the loss sends three numbers a token (Shoeybi et
    al., section 3). Once per step: gradients of norms and of latent attention's down-projections, partial sums under
    sequence parallelism; those of shared K/V heads; and the gradient norm. What is summed has at least float32.

    Args:
        batch, seq: of a micro-batch. width: bytes of an activation.
    """
    tokens, high = batch * seq, max(4, width)
    stream = tokens * model.hidden * width
    ends = row_messages(Way(way.sequence_parallel), tp, stream), column_messages(way, tp, stream)
    each = model.layers * block_messages(way, tp, stream, model) + [one for end in ends for both in end for one in both]
    each += [Message("tp", "all_reduce", sent("all_reduce", size * high, tp), 1) for size in (tokens, 2 * tokens)]
    found = [message._replace(count=micro_batches * message.count) for message in each]
    if way.sequence_parallel:
        whole = ((2 * model.layers + 1) * model.hidden + model.layers * down_parameters(model)) * high
        found.append(Message("tp", "all_reduce", sent("all_reduce", whole, tp), 1))
    replicas = max(1, tp // model.kv_heads)
    if replicas > 1:  # one head of K and of V, in every layer
        shared = 2 * model.layers * model.hidden * model.head_width * high
        found.append(Message("kv_replica", "all_reduce", sent("all_reduce", shared, replicas), 1))
    return [*found, Message("world", "all_reduce", sent("all_reduce", SCALAR, tp), 1)]


# ---- activations -----------------------------------------------------------------------------------------------------


def block_activations(
    model: ModelConfig, batch: int, seq: int, dtype: torch.dtype, tp: int, way: Way
) -> dict[str, int]:
    """Bytes that one block of our model keeps on a rank for the backward, by part (fused attention).

    Step 1's list of tensors, each divided by tp or not. What lies between blocks (norms, and the inputs of
    column-parallel layers) is divided by tp only under sequence parallelism; `plain` keeps these inputs gathered.
    """
    high, tokens = at_least_float32(dtype).itemsize, batch * seq
    width, h, d = dtype.itemsize, model.hidden, model.head_width
    stream = tp if way.sequence_parallel else 1
    if way.full_recompute:
        return {"layer inputs": tokens * h * width // stream}
    gathered = tokens * h * width // (stream if way.gathers_again else 1)
    result = {
        "norms": 2 * tokens * (h * (high + width) + high) // stream,
        "column inputs": gathered,
        "mlp": 4 * tokens * model.ffn * width // tp,
    }
    if model.latent:
        result["column inputs"] += gathered if _gathers_whole_input(model, way) else 0
        return result | _latent_activations(model, batch, seq, dtype, tp, way)
    kv_heads = max(model.kv_heads, tp)  # with fewer heads than ranks every rank holds a whole one
    queries, heads = model.heads * d, (model.heads + 2 * kv_heads) * d
    result["column inputs"] += gathered
    return result | {"attention": tokens * ((heads + queries) * width + model.heads * high) // tp}


def _gathers_whole_input(model: ModelConfig, way: Way) -> bool:
    """Whether latent attention keeps its input gathered for its queries, beside the part that makes the latent."""
    return not model.latent.q_rank and way.sequence_parallel and not way.gathers_again


def _latent_activations(
    model: ModelConfig, batch: int, seq: int, dtype: torch.dtype, tp: int, way: Way
) -> dict[str, int]:
    """The same of latent attention, by part. Latents and their norms are computed for a rank's part of the sequence;
    what keys and values are expanded from is gathered; the rest belongs to heads.
    """
    stream = tp if way.sequence_parallel else 1
    result = {"latents": 0, "attention": 0}
    for each in layer_activations(model, batch, seq, dtype, "fused", "none"):
        if each.name == "kv_b_proj.input":
            result["latents"] += each.bytes
        elif each.name == "q_b_proj.input":
            result["latents"] += each.bytes // (stream if way.gathers_again else 1)
        elif each.name == "qkv.input" or each.name.startswith(("q_a_norm", "kv_a_norm")):
            result["latents"] += each.bytes // stream
        elif each.part == "attention":
            result["attention"] += each.bytes // tp
    return result


def gpt_block_activations(tp: int, sequence_parallel: bool) -> float:
    """Of a GPT block, in units of s b h bytes, half precision, without the scores: 10 + 24/tp, or 34/tp.

    Korthikanti et al., arXiv:2205.05198, sections 4.2.1 and 4.2.2 (their terms of 5 a s / h belong to scores, which
    fused attention does not keep). LayerNorm, GELU, 4h, dropout: not our block.
    """
    return 34 / tp if sequence_parallel else 10 + 24 / tp


# ---- does it hide ----------------------------------------------------------------------------------------------------


def play_step(way: Way, player: Player, layers: int, stream: float, tokens: int, norms: float, times: dict) -> None:
    """A step of two ranks: its messages on the link, and the products that they may hide behind.

    Whatever else a rank computes, it computes while the link is idle, so it is left out.

    Args:
        stream: bytes of b s h. norms: bytes of all norms' gradients.
        times: seconds of the products of a rank's column-parallel (qkv, gate_up, head) and row-parallel (o, down)
            layers by name: (forward, input's gradient, weight's gradient).
    """

    def all_reduce(size: float) -> float:
        player.message(size)  # the reduce-scatter and the all-gather that it consists of
        return player.message(size)

    def gather_or_scatter() -> float:
        return player.message(stream)

    def summed() -> None:
        player.wait(gather_or_scatter() if way.sequence_parallel else all_reduce(stream))

    def column(name: str) -> None:
        half = times[name][0] / 2
        if way.mode == "chunked":
            coming = gather_or_scatter()
            player.now += half
            player.wait(coming)
        else:
            if way.sequence_parallel:
                player.wait(gather_or_scatter())
            player.now += half
        player.now += half

    def row(name: str) -> None:
        half = times[name][0] / 2
        player.now += half
        going = gather_or_scatter() if way.mode == "chunked" else None
        player.now += half
        if going is None:
            summed()
        else:
            player.wait(going)

    def column_backward(name: str) -> None:
        _, dx, dw = times[name]
        if way.mode == "plain":
            player.now += dx + dw
            summed()
            return
        gathered = gather_or_scatter() if way.sequence_parallel else player.now
        player.now += dx
        reduced = gather_or_scatter() if way.sequence_parallel else all_reduce(stream)
        player.wait(gathered)
        player.now += dw
        player.wait(reduced)

    def row_backward(name: str) -> None:
        if way.sequence_parallel:
            player.wait(gather_or_scatter())
        player.now += sum(times[name][1:])

    summed()  # embedding
    for _ in range(layers):
        column("qkv")
        row("o")
        column("gate_up")
        row("down")
    column("head")
    for size in (4 * tokens, 8 * tokens):  # loss
        player.wait(all_reduce(size))
    column_backward("head")
    for _ in range(layers):
        row_backward("down")
        column_backward("gate_up")
        row_backward("o")
        column_backward("qkv")
    if way.sequence_parallel:  # embedding, norms
        player.wait(gather_or_scatter())
        player.wait(all_reduce(norms))
    player.wait(all_reduce(8))  # gradient norm
