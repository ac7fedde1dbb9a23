"""What theory says of step 4: collectives and bytes of a block, activations a rank keeps, what hides behind what.

tp ranks share every layer, of b sequences of s tokens. h is the hidden width, f the MLP's; a heads of width d and a_kv
K/V heads; beta the bytes of an activation. One message of the residual stream has b s h elements.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from common.costs.alpha_beta import Player
from common.model import at_least_float32
from common.model_config import ModelConfig

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


def block_collectives(way: Way, tp: int = 2) -> dict[str, Counter]:
    """Of one block, by phase and operation; a block has two regions, attention and MLP.

    Without sequence parallelism: 2 + 2 all-reduces (Shoeybi et al., arXiv:1909.08053, section 3). With it each of them
    becomes an all-gather and a reduce-scatter (Korthikanti et al., arXiv:2205.05198, section 4.2.2), and there is one
    more all-gather a region in the backward where the input was not kept. `full_recompute` runs the forward once more.
    Chunked: in the forward each goes round a ring, in tp - 1 messages.
    """
    if not way.sequence_parallel:
        forward, backward = Counter(all_reduce=2), Counter(all_reduce=2)
    else:
        forward = Counter(all_gather=2, reduce_scatter=2)
        backward = Counter(all_gather=4 if way.gathers_again else 2, reduce_scatter=2)
        if way.mode == "chunked":
            forward = Counter(send=4 * (tp - 1))
    return {"forward": forward, "backward": backward + (forward if way.full_recompute else Counter())}


def sent(op: str, size: float, tp: int) -> float:
    """Bytes that a rank sends (Thakur, Rabenseifner and Gropp, 2005): `size` is that of the whole, for a ring's
    message of the whole that goes round in parts.
    """
    return {"all_reduce": 2 * (tp - 1) / tp, "send": 1 / tp}.get(op, (tp - 1) / tp) * size


def block_bytes(way: Way, tp: int, stream: float) -> dict[str, float]:
    """Bytes that a rank sends for one block, by phase. `stream`: bytes of the residual stream, b s h beta."""
    counts = block_collectives(way, tp)
    return {phase: sum(n * sent(op, stream, tp) for op, n in ops.items()) for phase, ops in counts.items()}


def step_bytes(way: Way, tp: int, model: ModelConfig, batch: int, seq: int, width: int = 4) -> dict[str, float]:
    """Everything that a rank sends in a step of one micro-batch with tp alone (dp 1), by part; float32 by `width`.

    The embedding ends like a block and the head begins like one; the loss sends three numbers a token (Shoeybi et al.,
    section 3); gradients of norms are partial sums under sequence parallelism, those of shared K/V heads always.
    """
    tokens, stream = batch * seq, batch * seq * model.hidden * width
    if way.sequence_parallel:
        embedding, head = (
            sent("all_gather", 2 * stream, tp),
            sent("all_gather", (3 if way.gathers_again else 2) * stream, tp),
        )
    else:
        embedding = head = sent("all_reduce", stream, tp)
    replicas = max(1, tp // model.kv_heads)
    shared = 2 * model.layers * model.hidden * model.head_width * width  # one head of K and of V, in every layer
    norms = (2 * model.layers + 1) * model.hidden * width if way.sequence_parallel else 0
    return {
        "blocks": model.layers * sum(block_bytes(way, tp, stream).values()),
        "embedding": embedding,
        "head": head,
        "loss": sent("all_reduce", 3 * tokens * width, tp),
        "norms": sent("all_reduce", norms, tp),
        "K/V replicas": sent("all_reduce", shared, replicas) if replicas > 1 else 0.0,
        "gradient norm": sent("all_reduce", 8, tp),
    }


def row_then_column_bytes(tp: int, tokens: int, hidden: int, ffn: int, width: int = 4) -> dict[str, float]:
    """Bytes a rank sends for an MLP of two matrices, forward and backward, in the right order and in the wrong one.

    Column then row: one all-reduce of the output, and of the input's gradient. Row then column: an all-reduce of
    the hidden layer, which the activation function needs whole, and an all-gather of the output; in the backward the
    all-reduce of the hidden layer's gradient and an all-gather of the input's.
    """
    narrow, broad = tokens * hidden * width, tokens * ffn * width
    return {
        "column then row": 2 * sent("all_reduce", narrow, tp),
        "row then column": 2 * (sent("all_reduce", broad, tp) + sent("all_gather", narrow, tp)),
    }


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
    kv_heads = max(model.kv_heads, tp)  # with fewer heads than ranks every rank holds a whole one
    queries, heads = model.heads * d, (model.heads + 2 * kv_heads) * d
    return {
        "norms": 2 * tokens * (h * (high + width) + high) // stream,
        "column inputs": 2 * tokens * h * width // (stream if way.gathers_again else 1),
        "attention": tokens * ((heads + queries) * width + model.heads * high) // tp,
        "mlp": 4 * tokens * model.ffn * width // tp,
    }


def gpt_block_activations(tp: int, sequence_parallel: bool) -> float:
    """Of a GPT block, in units of s b h bytes, half precision, without the scores: 10 + 24/tp, or 34/tp.

    Korthikanti et al., arXiv:2205.05198, sections 4.2.1 and 4.2.2 (their terms of 5 a s / h belong to scores, which
    fused attention does not keep). LayerNorm, GELU, 4h, dropout: not our block.
    """
    return 34 / tp if sequence_parallel else 10 + 24 / tp


def loss_bytes(tokens: int, vocab: int, tp: int, high: int = 4) -> int:
    """What the vocabulary-parallel loss keeps: probabilities in at least float32, the target's column, whose it is."""
    return tokens * (-(-vocab // tp) * high + 8 + 1)


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
