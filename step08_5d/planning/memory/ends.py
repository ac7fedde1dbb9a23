"""The backward at the ends of the model as ledgers: loss and head, embedding. See `layer.py`.

Nobody may change these ledgers: each is made once for all layouts of which `of_an_end` leaves the same.
"""

from functools import lru_cache

import torch

from common.costs.vocabulary import WIDTHS
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.kernels.linear_cross_entropy import chunk_length
from step08_5d.planning.memory.kept import of_a_layer
from step08_5d.planning.memory.ledger import Deferred, Ledger, Linear, Tensors
from step08_5d.planning.memory.linear import norm
from step08_5d.planning.memory.sizes import LayerSizes

HIDDEN, MATRIX = "gradient of hidden states", "gradient of head.weight, wide"
BOTH = "gradients of both predictions"


def vocabulary(model: ModelConfig, layout: Layout) -> int:
    """Elements of the rank's part of the embedding or the head; the vocabulary is padded."""
    return -(-model.vocab // layout.tp) * model.hidden


@lru_cache(maxsize=16)
def of_an_end(layout: Layout) -> Layout:
    """Return the layout with all left out that makes no difference to the ends: a search asks for many like it."""
    return of_a_layer(layout)._replace(ep=1, recompute="none")


# ---- loss and head ---------------------------------------------------------------------------------------------------


def kept_by_head(model: ModelConfig, layout: Layout, size: LayerSizes) -> Tensors:
    """What the last norm keeps, and its output, which is the head's input; with tp, also gathered.

    With multi-token prediction the head's input are both predictions, and the norm reads the first half of a tensor.
    Then nobody holds what has been gathered.
    """
    result = {"norm.input": size.wide, "norm.normalised": size.stream, "head.input": size.stream}
    result |= {"norm.rsqrt": layout.tokens / layout.tp * WIDTHS[layout.dtype][1]}
    result |= {"head.input, gathered": size.whole} if layout.tp > 1 else {}
    if model.mtp:
        doubled = [f"head.input{', gathered' if layout.tp > 1 else ''}", *([] if size.narrow else ["norm.input"])]
        result |= {name: 2 * result[name] for name in doubled}
        result |= {"head.input": 0.0} if layout.tp > 1 else {}
    return result


@lru_cache(maxsize=1024)
def loss(model: ModelConfig, layout: Layout) -> Ledger:
    """Loss and head, some tokens at a time (step 8, fused head).

    With the loss, the forward computes the gradients of the hidden states and, in the type of sums, of the matrix.
    """
    size, (narrow, wide, _) = LayerSizes.of(model, layout), WIDTHS[layout.dtype]
    matrix, rows, kept = vocabulary(model, layout), -(-model.vocab // layout.tp), kept_by_head(model, layout, size)
    predictions = 1 + model.mtp
    weight = torch.empty(rows, model.hidden, dtype=getattr(torch, layout.dtype), device="meta")
    logits = min(chunk_length(weight, fused=False), predictions * layout.tokens) * rows
    # In float32: the logits once more, and less their largest; or a chunk's summand of the matrix's gradient
    copies = max(2 * wide * logits, narrow * matrix) if size.narrow else wide * logits
    chunk = {"logits": narrow * logits, "logits in float32": copies}
    if model.mtp and size.narrow:  # which no backward reads, and which the caller still holds
        chunk |= {"both predictions": 2 * size.stream, "the last layer's output": size.stream}
    inputs = [each for each in kept if each.startswith("head.")]
    ledger = Ledger(kept, in_buffers=inputs[1:] if size.one and not model.mtp else ())
    ledger.event("loss", {HIDDEN: predictions * size.whole, MATRIX: wide * matrix} | chunk, [*chunk, *inputs])
    return ledger


@lru_cache(maxsize=1024)
def head(model: ModelConfig, layout: Layout) -> Ledger:
    """The backward of what `loss` has computed, and of the last norm. It rounds the gradient of the matrix."""
    size, narrow, predictions = LayerSizes.of(model, layout), WIDTHS[layout.dtype][0], 1 + model.mtp
    ledger = Ledger(loss(model, layout).tensors, splits=size.split)
    matrix, of_norm = Linear("head", 0.0, narrow * vocabulary(model, layout)), HIDDEN
    if not size.split:  # or it stays in the type of sums
        if size.narrow:
            ledger.event("head", {matrix.gradient: matrix.weight}, [MATRIX])
        else:  # it is what the loss has made
            ledger.event("head", {}, [MATRIX], leaves={matrix.gradient: matrix.weight})
        ledger.add_up("head", [matrix])
    if layout.tp > 1:
        of_norm = "gradient of head.input"
        one = predictions * layout.micro_batch == 1
        in_order, parts = {f"{HIDDEN}, in order": 0.0 if one else predictions * size.whole}, predictions * size.stream
        ledger.event("head, scattered", in_order | {of_norm: parts}, [HIDDEN, *in_order], filled=[of_norm])
    result = norm(ledger, size, "norm", of_norm, stays=bool(model.mtp))
    if model.mtp:
        ledger.event("head: both predictions", {BOTH: 2 * size.stream}, [result, of_norm])
    return ledger


def deferred_by_head(model: ModelConfig, layout: Layout) -> Deferred:
    """The gradient of the head's matrix, which the loss has made in the type of sums."""
    return Deferred("head", 0.0, {MATRIX: vocabulary(model, layout) * WIDTHS[layout.dtype][1]})


# ---- embedding -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def embedding(model: ModelConfig, layout: Layout) -> Ledger:
    """The gradient of its matrix."""
    size, output = LayerSizes.of(model, layout), "gradient of the embeddings"
    ledger = Ledger({output: size.stream})
    of_embedding(ledger, model, layout, size, output)
    return ledger


def of_embedding(
    ledger: Ledger, model: ModelConfig, layout: Layout, size: LayerSizes, output: str, *, waits: bool = False
) -> None:
    """From the gradient of its output, which is released, to that of its matrix.

    With tp, that of its output is gathered first, sorted unless there is a single sequence, and copied with zeros for
    the tokens that other ranks look up.

    Args:
        waits: whether the result stays.
    """
    gathered, copied = "gradients of all tokens", "gradients of all tokens, copied"
    matrix = Linear("embedding", 0.0, vocabulary(model, layout) * size.w)
    if layout.tp > 1:
        if size.one:
            ledger.event("embedding: gathered", {gathered: size.whole}, [output], buffers=[gathered])
            ledger.event("embedding: gathered", {copied: size.whole}, [gathered])
        else:
            both = {gathered: size.whole, copied: size.whole}
            ledger.event("embedding: gathered", both, [gathered, output], buffers=[gathered])
        output = copied
    ledger.event("embedding", {matrix.gradient: matrix.weight}, [output])
    if not waits:
        ledger.store()
        ledger.event("embedding, added up", {}, [matrix.gradient])
