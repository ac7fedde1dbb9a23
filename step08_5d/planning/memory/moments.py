"""The moments of a layer's backward at which a rank may hold most.

Weights, optimizer state and gradients live through a step. The peak is decided by what exists only for a moment while
the backward goes through a layer: gradients of activations, the gradient of a weight before it has been added to the
sums, copies in float32, whatever messages fill. A `Moment` names one such instant. Between two of them tensors come and
go, so a layer's backward is a list of moments in order, each with what it adds and what it leaves behind.

Sizes are those of the operations that a dry run counts: the fused head, PyTorch's own operations everywhere else,
`--tp-mode overlap` with sequence parallelism, and zigzag. On a GPU, kernels need less in some moments. What happens at
the ends of the model says `ends.py`, and in the second half of a backward `second_half.py`; letters are those of
`sizes.py`.
"""

from typing import NamedTuple

from common.costs.vocabulary import WIDTHS
from common.model_config import ModelConfig
from step06_context_parallel import cost as context
from step08_5d.cost import Layout
from step08_5d.planning.memory.sizes import Sizes, gradient_stays, ulysses


class Moment(NamedTuple):
    """An instant in the backward of a layer; sizes in bytes."""

    name: str
    there: float  # beside what the moments before it have left
    left: float = 0.0  # that stays when it is over; negative if more is released than made
    weight: float = 0.0  # of a weight's gradient, in the training type, while it is added to the sums
    stored: int = 0  # parameters whose gradients have then been added to the sums
    communication: float = 0.0  # of all bytes: in buffers that a collective has filled or is sending
    arrived: float = 0.0  # and of these, in those that stay when it is over


def layer(model: ModelConfig, layout: Layout, experts: bool) -> tuple[Moment, ...]:
    """The backward of one layer: its MLP or experts, their norm, the attention, its norm."""
    size = Sizes.of(model, layout)
    arrived = size.stream if layout.tp > 1 else 0.0
    at_work = of_experts(model, layout, size) if experts else mlp(model, layout, size, model.ffn)
    if layout.recompute == "full" and layout.tp > 1 and not experts:  # its output is sorted, to be scattered
        at_work = [Moment("recomputed", 2 * size.whole - size.as_gathered), *at_work]
    return (
        *at_work,
        *norm(size, 0.0 if experts else arrived),
        *added(size, gradient_stays(model, size, experts)),
        *attention(model, layout, size),
        *norm(size, arrived),
        *added(size, gradient_stays(model, size)),
    )


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
    gathered, as_gathered, gather = 0.0, 0.0, []
    if tp > 1:
        gathered, as_gathered = size.whole, size.as_gathered
        gather = [Moment(f"{name}: gathered", 2 * gathered - as_gathered, communication=gathered)]
    if size.split:
        return [*gather, Moment(name, gathered + inner, gathered + inner, communication=as_gathered)]
    return [*gather, Moment(name, gathered + inner + weight, left, weight, 1, as_gathered)]


def columns(name: str, size: Sizes, inner: list[float], weights: list[float], tp: int) -> list[Moment]:
    """Linear layers of the same input: their gradients (`inner` bytes each) become one of the input, which is released.

    With tp: the input is gathered again, its gradient is a sum over the layers, sorted and reduce-scattered.
    """
    if tp > 1:
        return _divided_columns(name, size, inner, weights)
    if size.split:
        more = [Moment(name, size.stream, size.stream), Moment(f"{name}: their sum", size.stream, -size.stream)]
        return [Moment(name, size.stream, size.stream), *more * (len(inner) - 1)]
    result = []
    for index, (each, weight) in enumerate(zip(reversed(inner), reversed(weights))):
        result.append(Moment(name, size.stream + weight, size.stream - each, weight, 1))
        if index:
            result.append(Moment(f"{name}: their sum", size.stream + weight, -size.stream))
    last = result[-2]
    result[-2] = last._replace(left=last.left - size.stream)  # the input
    return result


def _divided_columns(name: str, size: Sizes, inner: list[float], weights: list[float]) -> list[Moment]:
    x = size.whole
    added = Moment(f"{name}: their sum", 3 * x, communication=x)  # the input arrives; two layers' gradients of it
    both = 2 * x + size.stream  # the input has arrived, and its gradient is on its way to the rank's part of the sum
    there = 3 * x + size.stream - size.as_gathered  # and the sorted input
    if size.split:
        return [added, Moment(name, there, x, communication=x if size.one else both)]
    return [added, Moment(name, there + sum(weights), -sum(inner), sum(weights), len(weights), both, size.stream)]


def norm(size: Sizes, arrived: float) -> list[Moment]:
    """RMSNorm: from the gradient of its output to that of its input.

    It keeps its input in the type of sums, and the normalized input for the gradient of its gain.

    Args:
        arrived: bytes of the gradient of its output, if that is in the buffer which a collective has filled.
    """
    x, wide = size.stream, size.wide
    cast = [Moment("norm: in the type of sums", wide, wide - x, communication=arrived)] if size.narrow else []
    back = [Moment("norm: rounded", x, x - wide)] if size.narrow else []
    return [
        Moment("norm: gain", 2 * x, -x, 0.0, 1, arrived),
        *cast,
        Moment("norm: scaled", 2 * wide, communication=0.0 if size.narrow else arrived),
        Moment("norm: square", 4 * wide, -wide),
        *back,
    ]


def added(size: Sizes, stays: bool) -> list[Moment]:
    """The gradient of a sublayer's input becomes part of the residual stream's, which may stay for the second half."""
    return [Moment("norm: added to the residual stream", size.stream, 0.0 if stays else -size.stream)]


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
        Moment("rotation", rotated),
        *columns("queries, keys and values", size, [q, k, k], [of_q, of_k, of_k], tp),
    ]


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
    left = new - q - kept
    if layout.cp == 1:
        return [Moment("attention", again + new, left)]
    sums, block, moving, at_home = ratio * (q + 4 * k), max(q + k, q / 2 + 2 * k), 0.0, []
    w, wide, _ = WIDTHS[layout.dtype]
    if ulysses(layout):
        block = q + 2 * k
    else:
        moving = context.buffers(layout.cp_mode, layout.cp, k / w, w, wide)["backward"]
    communication = moving
    if layout.cp_mode == "allgather":
        communication, home = 2 * layout.cp * k, 2 * ratio * k
        there = again + moving + sums + home + (q + 2 * k if size.narrow else 0.0)
        at_home = [Moment("attention: sums are at home", there, communication=communication + home)]
    return [*at_home, Moment("attention", again + moving + sums + block, left, communication=communication)]


def of_experts(model: ModelConfig, layout: Layout, size: Sizes) -> list[Moment]:
    """Experts: gates, the way back from other ranks, three grouped products, the way there, and the router."""
    ratio, away = size.wide / size.stream, layout.ep > 1
    rows = model.top_k * size.stream
    inner = model.top_k * layout.tokens / layout.tp * model.expert_ffn * size.w
    weight = model.experts / layout.ep * model.hidden * model.expert_ffn * size.w
    cast = size.wide if size.narrow else 0.0  # the gradient in the type of sums
    arrived = rows if away else 0.0
    products = [
        Moment("experts: down", inner + weight, -rows, weight, 1),
        Moment("experts: the product of silu and up", 2 * inner, -inner),
        Moment("experts: silu", inner, -inner),
        Moment("experts: up", rows + weight, rows - inner, weight, 1),
        Moment("experts: gate", rows + weight, -inner, weight, 1),
        Moment("experts: their sum", rows, -rows),
    ]
    if size.split:  # what the products work with stays
        later = {"experts: down": inner, "experts: up": rows, "experts: gate": rows}
        products = [Moment(each.name, later[each.name], later[each.name]) if each.weight else each for each in products]
    shared = []
    if model.shared_experts:
        shared = mlp(model, layout, size, model.shared_experts * model.expert_ffn, divided=False)
        if not size.narrow:  # their input is the router's
            shared.append(Moment("experts: input", 0.0, size.stream))
    home = [Moment("experts: rows travel", rows), Moment("experts: rows in order", rows, communication=rows)]
    there = [Moment("experts: rows in order", rows), Moment("experts: rows travel", rows)]
    added_up = (ratio * rows + size.stream if size.narrow else 0.0) + size.wide
    return [
        Moment("experts: gates", cast + 2 * ratio * rows),  # rows times the gradient; then rows are released
        *(home if away else []),
        *products,
        *(there if away else []),
        *(each._replace(communication=arrived, arrived=arrived) for each in shared),
        Moment("experts: copies added up", added_up, size.stream - rows, communication=arrived),
        Moment("experts: router", size.wide, -cast, 0.0, 1),
    ]
