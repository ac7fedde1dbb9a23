"""The moments of a backward at the ends of the model: loss and head, embedding. See `moments.py`."""

from common.costs.vocabulary import WIDTHS
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.memory.moments import Moment, norm
from step08_5d.planning.memory.sizes import Sizes

RATIO = 1 / 4  # of the memory of the head's gradient: the logits of a chunk of tokens (step 8, fused head)
FEW_BYTES = 2 * 2**20  # and of a small vocabulary's logits at least as many


def vocabulary(model: ModelConfig, layout: Layout) -> int:
    """Elements of the rank's part of the embedding or the head; the vocabulary is padded."""
    return -(-model.vocab // layout.tp) * model.hidden


# ---- loss and head ---------------------------------------------------------------------------------------------------


def kept_by_head(layout: Layout, size: Sizes) -> float:
    """Bytes of the last norm's input and normalized input, of its output and, with tp, of that gathered."""
    statistics = layout.tokens / layout.tp * WIDTHS[layout.dtype][1]
    return size.wide + 2 * size.stream + statistics + (size.whole if layout.tp > 1 else 0.0)


def kept_after_loss(model: ModelConfig, layout: Layout, size: Sizes) -> float:
    """Bytes that the head and the last norm keep of a micro-batch from the loss to the backward, with two gradients."""
    return kept_by_head(layout, size) + loss(model, layout, size).left


def loss(model: ModelConfig, layout: Layout, size: Sizes) -> Moment:
    """Loss and head, some tokens at a time (step 8, fused head).

    With the loss, the forward computes the gradients of the hidden states and, in the type of sums, of the matrix.
    """
    narrow, wide, _ = WIDTHS[layout.dtype]
    matrix, rows = vocabulary(model, layout), -(-model.vocab // layout.tp)
    length = max(16, int(RATIO * model.hidden * wide / narrow) // 16 * 16, FEW_BYTES // (rows * narrow))
    logits = min(length, layout.tokens) * rows
    # In float32: the logits once more, and less their largest; or a chunk's summand of the matrix's gradient
    copies = max(2 * wide * logits, narrow * matrix) if size.narrow else wide * logits
    inputs, gathered = size.stream, 0.0  # the norm's output, and that gathered: then released
    if layout.tp > 1:
        inputs, gathered = size.stream + size.whole, size.as_gathered
    there = size.whole + wide * matrix + narrow * logits + copies
    return Moment("loss", there, size.whole + wide * matrix - inputs, communication=gathered)


def head(model: ModelConfig, layout: Layout, size: Sizes) -> list[Moment]:
    """The backward of what `loss` has computed, and of the last norm. It rounds the gradient of the matrix."""
    narrow, wide, _ = WIDTHS[layout.dtype]
    matrix, result, arrived = vocabulary(model, layout), [], 0.0
    if not size.split:  # or it stays in the type of sums
        result.append(Moment("head", narrow * matrix if size.narrow else 0.0, -wide * matrix, narrow * matrix, 1))
    if layout.tp > 1:
        arrived = size.stream
        sorted_parts = size.whole - size.as_gathered
        result.append(Moment("head, scattered", sorted_parts + size.stream, size.stream - size.whole))
    return result + norm(size, arrived)


# ---- embedding -------------------------------------------------------------------------------------------------------


def embedding(model: ModelConfig, layout: Layout, size: Sizes) -> list[Moment]:
    """The gradient of its matrix.

    With tp, that of its output is gathered first, sorted unless there is a single sequence, and copied with zeros for
    the tokens that other ranks look up.
    """
    matrix = vocabulary(model, layout) * size.w
    if layout.tp == 1:
        return [Moment("embedding", matrix, -size.stream, matrix, 1)]
    before = size.stream if size.one else 0.0  # what has been gathered is released before that copy
    gathered = Moment("embedding: gathered", 2 * size.whole - before, size.whole - size.stream, 0.0, 0, size.whole)
    return [gathered, Moment("embedding", matrix, -size.whole, matrix, 1)]
