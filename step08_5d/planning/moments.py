"""The moments of a step at which a rank may hold most, for one stage of the pipeline.

Weights, optimizer state and gradients live through a step. The peak is decided by what exists only for a moment while
the backward goes through a layer: gradients of activations, the gradient of a weight before it has been added to the
sums, copies in float32, whatever messages fill. A `Moment` names one such instant. Between two of them tensors come and
go, so a layer's backward is a list of moments in order, each with what it adds and what it leaves behind.

Sizes are those of the operations that a dry run counts: the fused head, PyTorch's own operations everywhere else,
`--tp-mode overlap` with sequence parallelism, and zigzag. On a GPU, kernels need less in some moments.

Letters: h hidden width, t tokens of a rank in a micro-batch, r = t / tp of them in the residual stream, w bytes of an
activation, wide bytes of a sum (at least float32).
"""

from typing import NamedTuple

from common.costs.vocabulary import WIDTHS
from common.model_config import ModelConfig
from step06_context_parallel import cost as context
from step08_5d.cost import Layout
from step08_5d.planning.share import splits_backward

RATIO = 1 / 4  # of the memory of the head's gradient: the logits of a chunk of tokens (step 8, fused head)
FEW_BYTES = 2 * 2**20  # and of a small vocabulary's logits at least as many


class Moment(NamedTuple):
    """An instant in the backward of a layer; sizes in bytes."""

    name: str
    there: float  # beside what the moments before it have left
    left: float  # that stays when it is over; negative if more is released than made
    weight: float = 0.0  # of a weight's gradient, in the training type, while it is added to the sums
    stored: int = 0  # parameters whose gradients have then been added to the sums


class Sizes(NamedTuple):
    """Bytes of what a layer works with on this rank."""

    narrow: bool  # activations are narrower than sums
    whole: float  # t h w: hidden states of all tokens of the rank's sequences, gathered over tp
    stream: float  # r h w: those of the residual stream
    wide: float  # the same in the type of sums
    queries: float  # t heads d / tp w
    keys: float  # the same of keys; of values
    statistics: float  # the attention's log-sum-exp
    ffn: float  # t ffn / tp w
    gathered_keys: float  # ulysses: keys of all tokens, of this rank's part of the heads
    one: bool  # a single sequence: gathered parts of it need not be sorted
    w: int
    split: bool  # the backward comes in halves: inputs of matrices, and gradients of their outputs, stay for the second

    @property
    def gradient_stays(self) -> bool:
        """Whether that of the residual stream is the very one that a matrix needs later (with tp that is gathered)."""
        return self.split and self.whole == self.stream

    @classmethod
    def of(cls, model: ModelConfig, layout: Layout) -> "Sizes":
        w, high, _ = WIDTHS[layout.dtype]
        t, tp, d = layout.tokens, layout.tp, model.head_width
        keys = t * max(model.kv_heads, tp) * d / tp * w
        stream = t * model.hidden / tp
        shape = (t * model.hidden * w, stream * w, stream * high, t * model.heads * d / tp * w, keys)
        shape += (t * model.heads / tp * high, t * model.ffn / tp * w)
        copies = max(1, layout.cp // max(1, model.kv_heads // tp))  # ulysses: every rank needs a head
        return cls(w < high, *shape, keys * copies, layout.micro_batch == 1, w, splits_backward(layout))


# ---- the backward of a layer -----------------------------------------------------------------------------------------


def layer(model: ModelConfig, layout: Layout, experts: bool) -> tuple[Moment, ...]:
    """The backward of one layer: its MLP or experts, their norm, the attention, its norm."""
    size = Sizes.of(model, layout)
    second = of_experts(model, layout, size) if experts else mlp(model, layout, size, model.ffn)
    return (*second, *norm(size, size.stream), *attention(model, layout, size), *norm(size, size.stream))


def mlp(model: ModelConfig, layout: Layout, size: Sizes, ffn: int, divided: bool = True) -> list[Moment]:
    """From the gradient of the residual stream, which stays, to that of the MLP's input.

    Args:
        divided: among tensor ranks. Shared experts are not, and see the rank's part of the sequence.
    """
    tp = layout.tp if divided else 1
    inner = (layout.tokens if divided else layout.tokens / layout.tp) * ffn / tp * size.w
    weight = model.hidden * ffn / tp * size.w
    return [
        *row("down", size, inner, weight, tp, input_stays=False),
        # gradients of silu(gate) and up; then silu(gate), up and the gradient of their product are released
        Moment("the product of silu and up", 2 * inner, -inner),
        Moment("silu", inner, -inner),
        *columns("gate and up", size, [inner, inner], [weight, weight], tp),
    ]


def row(name: str, size: Sizes, inner: float, weight: float, tp: int, input_stays: bool) -> list[Moment]:
    """A linear layer that ends a sublayer: gradients of its input (`inner` bytes) and of its weight.

    With tp the gradient of its output is gathered first, and sorted unless there is a single sequence.
    """
    left = inner if input_stays else 0.0  # its input goes when its gradient has come
    gathered = size.whole if tp > 1 else 0.0
    result = [] if tp == 1 else [Moment(f"{name}: gathered", gathered * (1 if size.one else 2), 0.0)]
    if size.split:
        return [*result, Moment(name, gathered + inner, gathered + inner)]
    return [*result, Moment(name, gathered + inner + weight, left, weight, 1)]


def columns(name: str, size: Sizes, inner: list[float], weights: list[float], tp: int) -> list[Moment]:
    """Linear layers of the same input: their gradients (`inner` bytes each) become one of the input, which is released.

    With tp: the input is gathered again, its gradient is a sum over the layers, sorted and reduce-scattered.
    """
    if size.split and tp == 1:
        more = [Moment(name, size.stream, size.stream), Moment(f"{name}: their sum", size.stream, -size.stream)]
        return [Moment(name, size.stream, size.stream), *more * (len(inner) - 1)]
    if size.split:
        there = max(3 * size.whole, 2 * size.whole + size.stream) if size.one else 3 * size.whole + size.stream
        return [Moment(name, there, size.whole)]
    if tp == 1:
        result = []
        for index, (each, weight) in enumerate(zip(reversed(inner), reversed(weights))):
            result.append(Moment(name, size.stream + weight, size.stream - each, weight, 1))
            if index:
                result.append(Moment(f"{name}: their sum", size.stream + weight, -size.stream))
        last = result[-2]
        result[-2] = last._replace(left=last.left - size.stream)  # the input
        return result
    if size.one:
        there = max(3 * size.whole, 2 * size.whole + size.stream + sum(weights))
    else:
        there = 3 * size.whole + size.stream + sum(weights)
    return [Moment(name, there, -sum(inner), sum(weights), len(weights))]


def norm(size: Sizes, before: float) -> list[Moment]:
    """RMSNorm: from the gradient of its output, and that of the residual stream (`before` bytes), to their sum.

    It keeps its input in the type of sums, and the normalized input for the gradient of its gain.
    """
    x, wide = size.stream, size.wide
    cast = [Moment("norm: in the type of sums", wide, wide - x)] if size.narrow else []
    back = [Moment("norm: rounded", x, x - wide)] if size.narrow else []
    return [
        Moment("norm: gain", 2 * x, -x, 0.0, 1),
        *cast,
        Moment("norm: scaled", 2 * wide, 0.0),
        Moment("norm: square", 4 * wide, -wide),
        *back,
        *([Moment("norm: added to the residual stream", x, 0.0 if size.gradient_stays else -x)] if before else []),
    ]


def attention(model: ModelConfig, layout: Layout, size: Sizes) -> list[Moment]:
    """From the gradient of the residual stream, which stays, to that of the attention's input."""
    q, k, tp, selective = size.queries, size.keys, layout.tp, layout.recompute == "selective"
    heads, keys = (number * model.head_width / tp for number in (model.heads, max(model.kv_heads, tp)))
    of_q, of_k = (model.hidden * width * size.w for width in (heads, keys))
    rotated = q * (2 * size.wide / size.stream + 1.5 if size.narrow else 2.5)
    if ulysses(layout):
        kept = q + 2 * k if selective else 2 * (q + size.gathered_keys) + size.statistics
    else:
        kept = 2 * q + 2 * k + (0 if selective else size.statistics)
        kept -= q if size.split else 0  # the output, which is the input of a matrix
    return [
        *row("output projection", size, q, of_q, tp, input_stays=not ulysses(layout)),
        *core(layout, size, kept),
        Moment("rotation", rotated, 0.0),
        *columns("queries, keys and values", size, [q, k, k], [of_q, of_k, of_k], tp),
    ]


def ulysses(layout: Layout) -> bool:
    return layout.cp > 1 and layout.cp_mode == "ulysses"


def core(layout: Layout, size: Sizes, kept: float) -> list[Moment]:
    """The attention itself: gradients of queries, keys and values for that of its output.

    Over cp ranks: sums for all queries, and keys, values and their sums in all places where step 6 holds them, and what
    a block of half the pairs adds. All-gathered, the most may be held when the sums have come home. With Ulysses, a
    rank has all tokens of some heads, in a single block.
    """
    q, k = size.queries, size.gathered_keys if ulysses(layout) else size.keys
    new, ratio, again = q + 2 * size.keys, size.wide / size.stream, 0.0
    if layout.recompute == "selective":
        again = q + size.statistics + (2 * k if layout.cp > 1 else 0.0) + (q if ulysses(layout) else 0.0)
    there = new
    if layout.cp > 1:
        sums = ratio * (q + 4 * k)
        w, wide, _ = WIDTHS[layout.dtype]
        block, moving = max(q + k, q / 2 + 2 * k), 0.0
        if ulysses(layout):
            block = q + 2 * k
        else:
            moving = context.buffers(layout.cp_mode, layout.cp, k / w, w, wide)["backward"]
        if layout.cp_mode == "allgather":
            block = max(block, 2 * ratio * k + (q + 2 * k if size.narrow else 0.0))
        there = moving + sums + block
    return [Moment("attention", again + there, new - q - kept)]


def of_experts(model: ModelConfig, layout: Layout, size: Sizes) -> list[Moment]:
    """Experts: gates, the way back from other ranks, three grouped products, the way there, and the router."""
    w = size.w
    ratio = size.wide / size.stream
    rows = model.top_k * size.stream
    inner = model.top_k * layout.tokens / layout.tp * model.expert_ffn * w
    weight = model.experts / layout.ep * model.hidden * model.expert_ffn * w
    cast = size.wide if size.narrow else 0.0  # the gradient in the type of sums
    travel = [Moment("experts: rows travel", rows, 0.0), Moment("experts: rows in order", rows, 0.0)]
    shared = []
    if model.shared_experts:
        shared = mlp(model, layout, size, model.shared_experts * model.expert_ffn, divided=False)
    return [
        Moment("experts: gates", cast + 2 * ratio * rows, 0.0),  # rows times the gradient; then rows are released
        *(travel if layout.ep > 1 else []),
        Moment("experts: down", inner + weight, -rows, weight, 1),
        Moment("experts: the product of silu and up", 2 * inner, -inner),
        Moment("experts: silu", inner, -inner),
        Moment("experts: up", rows + weight, rows - inner, weight, 1),
        Moment("experts: gate", rows + weight, -inner, weight, 1),
        Moment("experts: their sum", rows, -rows),
        *(travel if layout.ep > 1 else []),
        *shared,
        Moment(
            "experts: copies added up",
            (ratio * rows if size.narrow else 0.0) + size.wide + (size.stream if size.narrow else 0.0),
            size.stream - rows,
        ),
        Moment("experts: router", size.wide, -cast if size.narrow else 0.0, 0.0, 1),
    ]


# ---- the second half of a backward -----------------------------------------------------------------------------------


def deferred(size: Sizes) -> float:
    """Bytes that a dense layer keeps between the halves: inputs of its matrices, and gradients of their outputs."""
    return 4 * size.whole + 3 * size.ffn + 2 * size.queries + 2 * size.keys


def deferred_by_head(model: ModelConfig, layout: Layout) -> float:
    """Bytes of the gradient of the head's matrix, which the loss has made in the type of sums."""
    return -(-model.vocab // layout.tp) * model.hidden * WIDTHS[layout.dtype][1]


def second_half(model: ModelConfig, layout: Layout, size: Sizes, layers: int, has_head: bool) -> list[Moment]:
    """The gradients of a stage's matrices, one after the other, from the last layer to the first.

    When one of them is computed, the one before it is still there, but not what that one was computed from.
    """
    q, k, ffn, x, tp = size.queries, size.keys, size.ffn, size.whole, layout.tp
    row_bytes = model.hidden * size.w / tp
    of_ffn, of_q = row_bytes * model.ffn, row_bytes * model.heads * model.head_width
    of_k = row_bytes * max(model.kv_heads, tp) * model.head_width
    layer = [("down", of_ffn, ffn + x), ("up", of_ffn, ffn), ("gate", of_ffn, ffn + x)]
    layer += [("output projection", of_q, q + x), ("values", of_k, k), ("keys", of_k, k), ("queries", of_q, q + x)]
    head = [("head", 0.0, deferred_by_head(model, layout))] if has_head else []
    result, before, operands_before = [], 0.0, 0.0
    for name, weight, operands in head + layers * layer:
        result.append(Moment(name, before + weight - operands_before, -operands_before, weight, 1))
        before, operands_before = weight, operands
    return result


# ---- the ends of the model, and what recomputation brings back -------------------------------------------------------


def kept_at_work(model: ModelConfig, layout: Layout, size: Sizes, layer_activations, experts: bool) -> float:
    """Bytes of a layer whose backward begins: all that it keeps; recomputed, also its output and its narrow input."""
    if layout.recompute != "full":
        return layer_activations(model, layout, layout.recompute, experts)
    return layer_activations(model, layout, "none", experts) + size.stream * (2 if size.narrow else 1)


def kept_by_head(model: ModelConfig, layout: Layout, size: Sizes) -> float:
    """Bytes of the last norm's input and normalized input, of its output and, with tp, of that gathered."""
    statistics = layout.tokens / layout.tp * WIDTHS[layout.dtype][1]
    return size.wide + 2 * size.stream + statistics + (size.whole if layout.tp > 1 else 0.0)


def kept_after_loss(model: ModelConfig, layout: Layout, size: Sizes) -> float:
    """Bytes that the head and the last norm keep of a micro-batch from the loss to the backward, with two gradients."""
    return kept_by_head(model, layout, size) + head(model, layout, size)[0].left


def head(model: ModelConfig, layout: Layout, size: Sizes) -> list[Moment]:
    """Loss and head, some tokens at a time (step 8, fused head), then the last norm.

    The loss is computed in the forward, and with it the gradients of the hidden states and, in the type of sums, of the
    matrix. The backward rounds that one.
    """
    narrow, wide, _ = WIDTHS[layout.dtype]
    rows = -(-model.vocab // layout.tp)
    length = max(16, int(RATIO * model.hidden * wide / narrow) // 16 * 16, FEW_BYTES // (rows * narrow))
    logits, matrix = min(length, layout.tokens) * rows, rows * model.hidden
    # In float32: the logits once more, and less their largest; or a chunk's summand of the matrix's gradient
    copies = max(2 * wide * logits, narrow * matrix) if size.narrow else wide * logits
    inputs = size.stream + (size.whole if layout.tp > 1 else 0.0)  # the norm's output, and that gathered: then released
    rounded = narrow * matrix if size.narrow else 0.0
    there = size.whole + wide * matrix + narrow * logits + copies
    result = [Moment("loss", there, size.whole + wide * matrix - inputs)]
    if not size.split:  # or it stays in the type of sums
        result.append(Moment("head", rounded, -wide * matrix, narrow * matrix, 1))
    if layout.tp > 1:
        sorted_parts = 0.0 if size.one else size.whole
        result.append(Moment("head, scattered", sorted_parts + size.stream, size.stream - size.whole))
    return result + norm(size, 0.0)
