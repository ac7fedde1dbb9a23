"""The second half of a backward (ZB-H1): gradients of matrices, and what stays for them when the first half is over."""

from typing import NamedTuple

from common.costs.vocabulary import WIDTHS
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.memory.ends import vocabulary
from step08_5d.planning.memory.moments import Moment
from step08_5d.planning.memory.sizes import Sizes


class Product(NamedTuple):
    """A product whose result is the gradient of a matrix; sizes in bytes."""

    name: str
    weight: float  # of that gradient
    operands: float  # released with it: the matrix's input and the gradient of its output


def of_layer(model: ModelConfig, layout: Layout, experts: bool) -> list[Product]:
    """The products of a layer, in the order of its backward. Matrices of the same input release it with the last."""
    size, tp = Sizes.of(model, layout), layout.tp
    q, k, x, row = size.queries, size.keys, size.whole, model.hidden * size.w
    of_q = row * model.heads * model.head_width / tp
    of_k = row * max(model.kv_heads, tp) * model.head_width / tp
    attention = [Product("output projection", of_q, q + x), Product("values", of_k, k), Product("keys", of_k, k)]
    attention.append(Product("queries", of_q, q + x))
    if not experts:
        return _mlp("", row * model.ffn / tp, size.ffn, x) + attention
    copies = model.experts / layout.ep
    width, rows = model.expert_ffn, model.top_k * size.stream
    inner, shared_width = layout.tokens / tp * width * size.w, model.shared_experts * width
    result = _mlp("experts: ", copies * row * width, model.top_k * inner, rows)
    if model.shared_experts:
        result += _mlp("shared experts: ", row * shared_width, model.shared_experts * inner, size.stream)
    return result + attention


def _mlp(name: str, weight: float, inner: float, x: float) -> list[Product]:
    products = [("down", inner + x), ("up", inner), ("gate", inner + x)]
    return [Product(name + each, weight, operands) for each, operands in products]


def of_head(model: ModelConfig, layout: Layout) -> Product:
    """The gradient of the head's matrix, which the loss has made in the type of sums."""
    return Product("head", 0.0, vocabulary(model, layout) * WIDTHS[layout.dtype][1])


def deferred(products: list[Product]) -> float:
    """Return the bytes that are kept between the halves for these products."""
    return sum(each.operands for each in products)


def moments(products: list[Product]) -> list[Moment]:
    """One product after the other. The gradient before is still there, but not what that one was computed from."""
    result, before = [], Product("", 0.0, 0.0)
    for each in products:
        there = before.weight + each.weight - before.operands
        result.append(Moment(each.name, there, -before.operands, each.weight, 1))
        before = each
    return result
